"""Detection of foreign changes: an open update is lost if other code changes its gradients between two calls.

All checks run on the host. They compare identities and write counts of tensors, never values.
"""

from typing import NamedTuple

from megabatch.core.wrapper import REQUIRES_GRAD, Wrapper
from megabatch.errors import MegabatchError
from megabatch.guards.attached_tensors import AttachedTensors
from megabatch.guards.loss_trial import NewLossTrial
from megabatch.guards.receipts import Receipt, count_all_writes


class Leftover(NamedTuple):
    """The state of gradients and parameters at the end of a call."""

    gradients: Receipt
    parameter_writes: list[int]
    are_trained: list[bool]


class Ownership:
    """Checks that gradients stay unchanged between calls, and surrounds the trial of a new loss."""

    def __init__(self, wrapper: Wrapper, trial: NewLossTrial) -> None:
        self._wrapper, self._trial = wrapper, trial
        self._is_exact = not wrapper.replaces_gradients
        self._left: Leftover | None = None
        self._attached = AttachedTensors(wrapper)

    def enter(self, *, is_new: bool) -> None:
        """Forget the state after the last call, and note the state of the model before this one.

        ``is_new`` is True for the first call of a loss.
        """
        self.release()
        self._attached.note(looks_at_modules=is_new)
        if is_new:
            self._trial.begin()

    def leave(self, total_factor: float = 1.0) -> None:
        """Record the state after a call. Raises `LossContractError` for a new loss that fails its trial.

        ``total_factor`` is the factor of the totals that were differentiated.
        """
        self._attached.check(total_factor)
        if self._trial.is_open:
            self._trial.end()
        parameters = self._wrapper.parameters
        trained = list(map(REQUIRES_GRAD, parameters))
        self._left = Leftover(Receipt.of(parameters), count_all_writes(parameters), trained)

    def release(self) -> None:
        """Forget the state after the last call."""
        self._left = None
        if self._trial.is_open:
            self._trial.forget()

    def check(self) -> None:
        """Raise `MegabatchError` if gradients or parameters have changed since the last call."""
        snapshot, self._left = self._left, None
        if snapshot is None:
            return
        parameters, change = self._wrapper.parameters, None
        if snapshot.are_trained != list(map(REQUIRES_GRAD, parameters)):
            change = "parameters were frozen or unfrozen"
        elif self._is_exact and snapshot.parameter_writes != count_all_writes(parameters):
            change = "parameters were written to, as optimizer.step() does,"
        elif not snapshot.gradients.holds(parameters, exact=self._is_exact):
            change = "gradients were dropped, replaced or written to, as zero_grad() and another accumulator do,"
        if change is not None:
            lost = MegabatchError(
                f"{change} between two calls of an update, which is lost; an update is open from its first "
                "forward_backward() to finalize(), so do that before or after, or discard() the update"
            )
            lost.loses_update = True
            raise lost
        self._left = snapshot
