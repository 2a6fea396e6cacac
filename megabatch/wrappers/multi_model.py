"""Several models in one update, such as a policy and a critic, or two towers. Each has its own wrapper."""

import contextlib
from collections.abc import Generator, Sequence
from itertools import chain

from torch import nn

from megabatch.core.gradients import Gradients
from megabatch.core.wrapper import CHANGED, Choice, Wrapper, trainable
from megabatch.errors import PlanError
from megabatch.wrappers.collective_order import CollectiveOrder, OrderedWrapper
from megabatch.wrappers.ddp import DDPWrapper, noting_launches


class MultiModelWrapper(OrderedWrapper):
    """Passes each operation on to the wrapper of each model in a list."""

    kind_name = "several models"

    def __init__(self, wrappers: Sequence[Wrapper], frozen: Sequence[nn.Module]) -> None:
        """``frozen`` are the models without a trained parameter. They have no wrapper."""
        self.parameters = list(chain.from_iterable(wrapper.parameters for wrapper in wrappers))
        if len({id(parameter) for parameter in self.parameters}) < len(self.parameters):
            raise PlanError("two of the models share a parameter, which would be reduced twice; give each to one model")
        # One loss has one factor and one norm, so all models must be reduced alike.
        first, kinds = wrappers[0], list(map(_kind, wrappers))
        if kinds.count(kinds[0]) < len(kinds):
            names = ", ".join(wrapper.kind_name for wrapper in wrappers)
            raise PlanError(
                f"the models are wrapped in ways that do not go together ({names}); wrap all alike, over the same ranks"
            )
        self.ranks, self.device, self.loss_factor = first.ranks, first.device, first.loss_factor
        self.norm_groups = first.norm_groups
        self.wrappers, self._frozen = list(wrappers), frozen
        # One hash of collectives, since the order between models matters too.
        self.collective_order, self.index = CollectiveOrder(), 0
        for index, wrapper in enumerate(wrappers):
            wrapper.ranks.position = self.ranks.position
            self.replaces_gradients |= wrapper.replaces_gradients
            self.writes_buffers |= wrapper.writes_buffers
            self.forwards_meet |= wrapper.forwards_meet
            if isinstance(wrapper, OrderedWrapper):
                wrapper.collective_order, wrapper.index = self.collective_order, index
        self.models = [*chain.from_iterable(wrapper.models for wrapper in wrappers), *frozen]
        self._ddp_wrappers = [wrapper for wrapper in wrappers if isinstance(wrapper, DDPWrapper)]

    def accumulate_in(self, wide: Gradients) -> None:
        for wrapper in self.wrappers:
            wrapper.accumulate_in(wide)
        self._follow()

    def check_unchanged(self) -> None:
        for wrapper in self.wrappers:
            wrapper.check_unchanged()
        # A model that was unfrozen since would train without any reduction.
        if any(map(trainable, self._frozen)):
            raise PlanError(CHANGED)

    @property
    def accumulating(self) -> Sequence[nn.Parameter]:
        return list(chain.from_iterable(wrapper.accumulating for wrapper in self.wrappers))

    @property
    def is_microbatch_local(self) -> bool:
        return all(wrapper.is_microbatch_local for wrapper in self.wrappers)

    def choose(self, policy: str) -> Choice:
        # The reason of the last wrapper with a policy is shown for all of them.
        choices = dict(wrapper.choose(policy) for wrapper in self.wrappers)
        if len(choices) > 1:
            # A plain model beside a sharded one is summed once, whatever the policy.
            choices.pop("last", None)
        if len(choices) > 1:
            raise PlanError(f"the models need different sync policies, {' and '.join(choices)}; wrap all alike")
        return next(iter(choices.items()))

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.microbatch(policy, last=last))
            if not self.ranks.is_alone:
                # DDP launches buckets from C++, in the order of the backward over all models.
                ddps = [wrapper.ddp for wrapper in self._ddp_wrappers]
                stack.enter_context(noting_launches(ddps, self.note_collective))
            yield

    @contextlib.contextmanager
    def without_reduction(self) -> Generator[None]:
        with contextlib.ExitStack() as stack:
            for wrapper in self.wrappers:
                stack.enter_context(wrapper.without_reduction())
            yield

    def begin_call(self, policy: str) -> None:
        for wrapper in self.wrappers:
            wrapper.begin_call(policy)
        # One DDP may have a communication hook.
        if self._has_two_factors():
            for wrapper in self._ddp_wrappers:
                wrapper.average()
        self._follow()

    def hold_reduction(self, policy: str) -> None:
        for wrapper in self.wrappers:
            wrapper.hold_reduction(policy)
        if self._has_two_factors():
            for wrapper in self._ddp_wrappers:
                wrapper.release_reduction()
        self._follow()

    def before_agreement(self, *, is_new: bool) -> None:
        for wrapper in self.wrappers:
            wrapper.before_agreement(is_new=is_new)

    def reshard(self) -> None:
        for wrapper in self.wrappers:
            wrapper.reshard()

    def finish_update(self) -> None:
        self.collective_order.reset()
        for wrapper in self.wrappers:
            wrapper.finish_update()
        self._follow()

    def discard(self) -> None:
        self.collective_order.reset()
        for wrapper in self.wrappers:
            wrapper.discard()
        self._follow()

    def _has_two_factors(self) -> bool:
        return len({wrapper.loss_factor for wrapper in self.wrappers}) > 1

    def _follow(self) -> None:
        """Take over what the models' wrappers have changed."""
        self.loss_factor = self.wrappers[0].loss_factor
        self.is_held = any(wrapper.is_held for wrapper in self.wrappers)


def _kind(wrapper: Wrapper) -> object:
    """Return the attributes that must be the same for one norm and one loss: factor, ranks and norm groups."""
    return wrapper.loss_factor, wrapper.ranks.num_all, wrapper.norm_groups
