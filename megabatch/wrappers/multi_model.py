"""Several models in one update: generator and critic, two towers. Each is reduced by its own wrapper."""

import contextlib
from collections.abc import Generator, Sequence

from torch import nn

from megabatch.errors import PlanError
from megabatch.wrappers.base import CHANGED, Choice, PlainReducer, trainable
from megabatch.wrappers.precision import Wide


class SeveralReducer(PlainReducer):
    """Does for every model of a list what its own reducer does."""

    wrapper = "several models"

    def __init__(self, reducers: Sequence[PlainReducer], frozen: Sequence[nn.Module]) -> None:
        """``frozen`` models have no reducer, as long as they stay so."""
        self.parameters = [parameter for reducer in reducers for parameter in reducer.parameters]
        if len({id(parameter) for parameter in self.parameters}) < len(self.parameters):
            raise PlanError("two of the models share a parameter, which would be reduced twice; give each to one model")
        first = reducers[0]
        if any(_kind(each) != _kind(first) for each in reducers):
            kinds = ", ".join(each.wrapper for each in reducers)
            raise PlanError(
                f"the models are wrapped in ways that do not go together ({kinds}); wrap all alike, over the same ranks"
            )
        self.ranks, self.device, self.loss_factor = first.ranks, first.device, first.loss_factor
        self.norm_groups = first.norm_groups
        self._reducers, self._frozen = list(reducers), frozen
        self.replaces_gradients = any(each.replaces_gradients for each in reducers)
        self.forwards_meet = any(each.forwards_meet for each in reducers)
        self.may_pause = all(each.may_pause for each in reducers)
        self.models = [*(model for reducer in reducers for model in reducer.models), *frozen]

    def accumulate_in(self, wide: Wide) -> None:
        for reducer in self._reducers:
            reducer.accumulate_in(wide)
        self.loss_factor = self._reducers[0].loss_factor

    def check_unchanged(self) -> None:
        for reducer in self._reducers:
            reducer.check_unchanged()
        if any(map(trainable, self._frozen)):
            raise PlanError(CHANGED)

    @property
    def accumulating(self) -> Sequence[nn.Parameter]:
        return [parameter for reducer in self._reducers for parameter in reducer.accumulating]

    @property
    def runs_alone(self) -> bool:
        return all(reducer.runs_alone for reducer in self._reducers)

    @property
    def may_add(self) -> bool:
        return all(reducer.may_add for reducer in self._reducers)

    def keeps(self, policy: str) -> list[nn.Parameter]:
        return [parameter for reducer in self._reducers for parameter in reducer.keeps(policy)]

    @property
    def gathered(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return hash(tuple(reducer.gathered for reducer in self._reducers))

    def choose(self, policy: str) -> Choice:
        choices = dict(reducer.choose(policy) for reducer in self._reducers)
        if len(choices) > 1:  # a plain model beside a sharded one: it is summed once, whatever the policy
            choices.pop("last", None)
        if len(choices) > 1:
            raise PlanError(f"the models need different sync policies, {' and '.join(choices)}; wrap all alike")
        return next(iter(choices.items()))

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for reducer in self._reducers:
                stack.enter_context(reducer.microbatch(policy, last=last))
            yield

    def finish_call(self) -> None:
        for reducer in self._reducers:
            reducer.finish_call()

    def finish_update(self) -> None:
        for reducer in self._reducers:
            reducer.finish_update()

    def discard(self) -> None:
        for reducer in self._reducers:
            reducer.discard()


def _kind(reducer: PlainReducer) -> object:
    """What must be the same for one norm and one loss: the factor, the ranks, and who holds the rest of a gradient."""
    return reducer.loss_factor, reducer.ranks.num_all, reducer.norm_groups
