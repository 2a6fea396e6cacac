"""Several models in one update: generator and critic, two towers. Each is reduced by its own wrapper."""

import contextlib
import functools
from collections.abc import Generator, Sequence

from torch import nn

from megabatch.errors import PlanError
from megabatch.wrappers.base import CHANGED, Choice, Wrapper, trainable
from megabatch.wrappers.ddp import DDPWrapper, noting_launches
from megabatch.wrappers.gradients import WideGradients


class MultiModelWrapper(Wrapper):
    """Does for every model of a list what its own reducer does."""

    kind_name = "several models"

    def __init__(self, reducers: Sequence[Wrapper], frozen: Sequence[nn.Module]) -> None:
        """``frozen`` models have no reducer, as long as they stay so."""
        self.parameters = [parameter for wrapper in reducers for parameter in wrapper.parameters]
        if len({id(parameter) for parameter in self.parameters}) < len(self.parameters):
            raise PlanError("two of the models share a parameter, which would be reduced twice; give each to one model")
        first = reducers[0]
        if any(_kind(each) != _kind(first) for each in reducers):
            kinds = ", ".join(each.kind_name for each in reducers)
            raise PlanError(
                f"the models are wrapped in ways that do not go together ({kinds}); wrap all alike, over the same ranks"
            )
        self.ranks, self.device, self.loss_factor = first.ranks, first.device, first.loss_factor
        self.norm_groups = first.norm_groups
        self._reducers, self._frozen = list(reducers), frozen
        self.replaces_gradients = any(each.replaces_gradients for each in reducers)
        self.forwards_meet = any(each.forwards_meet for each in reducers)
        self.may_pause = all(each.may_pause for each in reducers)
        self.models = [*(model for wrapper in reducers for model in wrapper.models), *frozen]
        self._ddps = [each.ddp for each in reducers if isinstance(each, DDPWrapper)]
        for index, wrapper in enumerate(reducers):  # one hash, since the order between models matters too
            wrapper.note_collective = functools.partial(self._note_collective_of, index)

    def accumulate_in(self, wide: WideGradients) -> None:
        for wrapper in self._reducers:
            wrapper.accumulate_in(wide)
        self.loss_factor = self._reducers[0].loss_factor

    def check_unchanged(self) -> None:
        for wrapper in self._reducers:
            wrapper.check_unchanged()
        if any(map(trainable, self._frozen)):
            raise PlanError(CHANGED)

    @property
    def accumulating(self) -> Sequence[nn.Parameter]:
        return [parameter for wrapper in self._reducers for parameter in wrapper.accumulating]

    @property
    def runs_alone(self) -> bool:
        return all(wrapper.runs_alone for wrapper in self._reducers)

    def choose(self, policy: str) -> Choice:
        choices = dict(wrapper.choose(policy) for wrapper in self._reducers)
        if len(choices) > 1:  # a plain model beside a sharded one: it is summed once, whatever the policy
            choices.pop("last", None)
        if len(choices) > 1:
            raise PlanError(f"the models need different sync policies, {' and '.join(choices)}; wrap all alike")
        return next(iter(choices.items()))

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for wrapper in self._reducers:
                stack.enter_context(wrapper.microbatch(policy, last=last))
            if not self.ranks.is_alone:
                stack.enter_context(noting_launches(self._ddps, self.note_collective))
            yield

    def finish_call(self) -> None:
        for wrapper in self._reducers:
            wrapper.finish_call()

    def finish_update(self) -> None:
        self.collectives = 0
        for wrapper in self._reducers:
            wrapper.finish_update()

    def discard(self) -> None:
        self.collectives = 0
        for wrapper in self._reducers:
            wrapper.discard()

    def _note_collective_of(self, index: int, number: int) -> None:
        self.note_collective(index << 32 | number)


def _kind(wrapper: Wrapper) -> object:
    """Return the attributes that must be the same for one norm and one loss: factor, ranks and norm groups."""
    return wrapper.loss_factor, wrapper.ranks.num_all, wrapper.norm_groups
