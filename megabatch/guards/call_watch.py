"""The watch over calls: an update is lost if other code changes its gradients, and a new loss is tried.

All checks of gradients run on the host. They compare identities and write counts of tensors, never values.
"""

from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from megabatch.core.call import MicrobatchPlanner, MicrobatchStep, PreparedBatch
from megabatch.core.contract import ByLoss, LossHooks, Term, is_own, terms_of
from megabatch.core.extension import Call
from megabatch.core.guard import CallGuard
from megabatch.core.mesh import num_collectives
from megabatch.core.samples import Pad
from megabatch.core.wrapper import REQUIRES_GRAD, Wrapper
from megabatch.errors import MegabatchError
from megabatch.guards.attached_tensors import AttachedTensors
from megabatch.guards.loss_trial import NewLossTrial
from megabatch.guards.padded_targets import check_weights
from megabatch.guards.receipts import Receipt, check_unmoved, count_all_writes
from megabatch.inspection.error_kinds import is_out_of_memory


class Leftover(NamedTuple):
    """The state of gradients and parameters at the end of a call."""

    gradients: Receipt
    parameter_writes: list[int]
    are_trained: list[bool]


class CallWatch(CallGuard):
    """Checks that gradients stay unchanged between calls, and tries a new loss. A microbatch may run in parts."""

    def __init__(self, wrapper: Wrapper, padding: Pad) -> None:
        self._wrapper = wrapper
        self._trial = NewLossTrial(wrapper, padding)
        self._is_exact = not wrapper.replaces_gradients
        self._leftover: Leftover | None = None
        self._attached = AttachedTensors(wrapper)
        # Functions that count weights, and have counted no padding.
        self._compared: ByLoss[bool] = ByLoss()

    def is_new(self, loss_fn: Any) -> bool:
        """Return True for a loss that no call had before."""
        return self._trial.tried.get(loss_fn) is None

    def check(self) -> None:
        """Raise `MegabatchError` if gradients or parameters have changed since the last call."""
        leftover, self._leftover = self._leftover, None
        if leftover is None:
            return
        parameters, change = self._wrapper.parameters, None
        if leftover.are_trained != list(map(REQUIRES_GRAD, parameters)):
            change = "parameters were frozen or unfrozen"
        elif self._is_exact and leftover.parameter_writes != count_all_writes(parameters):
            change = "parameters were written to, as optimizer.step() does,"
        elif not leftover.gradients.holds(parameters, exact=self._is_exact):
            change = "gradients were dropped, replaced or written to, as zero_grad() and another accumulator do,"
        if change is not None:
            lost = MegabatchError(
                f"{change} between two calls of an update, which is lost; an update is open from its first "
                "forward_backward() to finalize(), so do that before or after, or discard() the update"
            )
            lost.loses_update = True
            raise lost
        self._leftover = leftover

    def check_weights(self, planner: MicrobatchPlanner, prepared: PreparedBatch, hooks: LossHooks) -> None:
        """Raise `LossContractError` for a weight that counts padding. Compare each function that counts once."""
        if hooks.weigh is None or not planner.adds_up or self._compared.get(hooks.weigh):
            return
        # A user's function may draw random numbers.
        if hooks.prepare is not None and not is_own(hooks.prepare):
            return
        if check_weights(prepared.samples, prepared.plan, hooks):
            self._compared.set(hooks.weigh, True)

    def enter(self, *, is_new: bool) -> None:
        """Forget the state after the last call, and note the state of the model before this one.

        ``is_new`` is True for the first call of a loss.
        """
        self.release()
        self._attached.note(looks_at_modules=is_new)
        if is_new:
            self._trial.begin()

    def run_step(self, gradient: Any, step: MicrobatchStep, call: Call) -> list[dict[str, Term]]:
        """Run one microbatch. If it does not fit in memory, run it again in parts. Return the sums of each part."""
        before = Receipt.of(self._wrapper.parameters)
        num_sent = 0 if self._wrapper.ranks.is_alone else num_collectives()
        call.opened.taking_back.clear()
        run = partial(self._forward_backward, call)
        try:
            return [run(step, before)]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            from megabatch.guards.oom_retry import OOMRetry

            run_in_parts = OOMRetry(call).prepare_parts(step, error, before, num_sent, run)
        # Out of the handler, which keeps the failed graph in memory.
        sums = run_in_parts()
        _plan_within(gradient, call)
        return sums

    def leave(self, total_factor: float = 1.0) -> None:
        """Note the state after a call. Raises `LossContractError` for a new loss that fails its trial."""
        self._attached.check(total_factor)
        if self._trial.is_open:
            self._trial.end()
        parameters = self._wrapper.parameters
        are_trained = list(map(REQUIRES_GRAD, parameters))
        self._leftover = Leftover(Receipt.of(parameters), count_all_writes(parameters), are_trained)

    def release(self) -> None:
        """Forget the state after the last call."""
        self._leftover = None
        if self._trial.is_open:
            self._trial.forget()

    def _forward_backward(self, call: Call, step: MicrobatchStep, before: Receipt | None = None) -> dict[str, Term]:
        """Run forward and backward of one microbatch. Return its sums. ``before`` may be a receipt of this moment."""
        if call.is_new or call.takes_divisor:
            return call.opened.backward(self._trial.compute_terms(call, step), step)
        return call.opened.backward(self._compute_terms(call, step, before), step)

    def _compute_terms(self, call: Call, step: MicrobatchStep, before: Receipt | None) -> dict[str, Term]:
        """Run the loss of an earlier call. It may not change gradients."""
        accumulating = self._wrapper.accumulating
        if before is None or before.parameters is not accumulating:
            before = Receipt.of(accumulating)
        terms = terms_of(call.loss_fn(call.model, step.microbatch))
        check_unmoved(self._wrapper, before)
        return terms


def _plan_within(gradient: Any, call: Call) -> None:
    """Plan later calls within what has fit in memory, after a microbatch has run in parts."""
    parts = call.prepared.parts
    gradient.last_plan = call.plan.in_parts(parts)
    parts_with_rows = list(filter(None, chain.from_iterable(parts.values())))
    if parts_with_rows:
        gradient.planner = gradient.planner.lowered(call.plan.bound_of(parts_with_rows))
