"""An update whose microbatches run in a loop of the user's: loop, data, model call, loss and backward are theirs.

This module applies the sync policy, counts microbatches and weights, and divides. Before its backward,
`LoopMicrobatch.scale` divides the loss by the weight of the update. For a loss that is not scaled, `finalize` divides
the gradient.
"""

import contextlib
import math
import weakref
from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.core.agreement import first_failure
from megabatch.core.call import CallAgreement, MicrobatchStep
from megabatch.core.contract import (
    PAIR_NAME,
    WEIGHT_TOLERANCE,
    CoupledLoss,
    Term,
    accumulation_dtype,
    describe_missing_gradient,
    terms_of,
    weight_on_device,
)
from megabatch.core.gradients import autocasts_to_float16, separate_gradients
from megabatch.core.guard import CallGuard, ErrorGuard
from megabatch.core.update import MISCOUNTED, MULTIPLIED, OpenUpdate, Update, add_terms
from megabatch.core.wrapper import Wrapper, policies_of_call
from megabatch.errors import LossContractError, MegabatchError, PlanError, require_count
from megabatch.inspection.error_kinds import agreeing
from megabatch.loops.backward_count import BackwardCount
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.loss_nodes import (
    cross_entropy_weight,
    is_mean_cross_entropy,
    is_mean_reduction,
    last_divisor,
)
from megabatch.torch_private.operations import pytree, without_subclasses
from megabatch.torch_private.optimizers import scaler_state

SUM, MEAN, DIVIDED = "sum", "mean", "divided"  # kinds of a loss
UNSCALED = "loss that was not scaled"  # the name of the term; ranks compare names, so all scale or none does
Writes = tuple[weakref.ref[Tensor], int]  # a tensor, and the number of writes to it
UNKNOWN = -1.0  # a weight in a message
SAY = "give sum_over= or mean_over= for each microbatch, or update_weight= or divided=True for the update"


class LossWeight(NamedTuple):
    """The kind of a microbatch's loss, and the amount of this rank's data that it covers."""

    kind: str | None = None  # SUM, MEAN or DIVIDED; None if it is not said yet
    value: float | Tensor | None = None  # a tensor only on a device; None if only the update's is known

    @property
    def is_zero(self) -> bool:
        """True if the microbatch is known to count nothing. A weight on a device is not read."""
        return not isinstance(self.value, Tensor) and self.value == 0


class LoopRequest(NamedTuple):
    """The report of this rank at the start of a microbatch."""

    of: int
    weight: LossWeight
    update_weight: float | None  # of this rank, in all its microbatches


class LoopAgreement(NamedTuple):
    """The ranks' agreement on an update."""

    of: int
    weight: float | None  # over all ranks; None if it is not known before the last microbatch
    divisor: float  # of every loss: the weight, or a guess that finalize() corrects


def read_request(
    of: int, sum_over: float | Tensor | None, mean_over: float | Tensor | None, update_weight: float | Tensor | None,
    divided: bool,
) -> LoopRequest:  # fmt: skip
    """Return the arguments of `microbatch`, checked. Raises `PlanError`."""
    weight, total_weight = read_loss_weight(sum_over, mean_over), None
    if divided and weight.kind == SUM and weight.is_zero:
        weight = LossWeight(DIVIDED, 0.0)
    elif divided and (weight.kind is not None or update_weight is not None):
        raise PlanError(
            "divided=True says that the loss is divided already by the update's weight over all ranks; leave it, or "
            "sum_over, mean_over and update_weight, out"
        )
    if update_weight is not None:
        total_weight = float(read_weight("update_weight", update_weight, waits=True))
        weight = LossWeight(SUM) if weight.kind is None else weight
    return LoopRequest(
        require_count("of", of, least=0), weight if weight.kind or not divided else LossWeight(DIVIDED), total_weight
    )


def read_loss_weight(sum_over: float | Tensor | None, mean_over: float | Tensor | None) -> LossWeight:
    """Return the weight that one of the two arguments gives. Raises `PlanError` for both."""
    if sum_over is not None and mean_over is not None:
        raise PlanError("sum_over and mean_over are both given; a loss is a sum or a mean, so leave one out")
    if mean_over is not None:
        return LossWeight(MEAN, read_weight("mean_over", mean_over))
    return LossWeight() if sum_over is None else LossWeight(SUM, read_weight("sum_over", sum_over))


def read_weight(name: str, value: float | Tensor, *, waits: bool = False) -> float | Tensor:
    """Return a weight as a number, or as a scalar on its device unless ``waits``. Raises `PlanError` for others."""
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type != "cpu" and not waits:
        return weight_on_device(value)
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        description = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise PlanError(f"{name} is {description}; give one number, what the loss is summed or averaged over") from None
    if not 0 <= number < math.inf:
        raise PlanError(f"{name} is {number}; a weight must be finite and not negative")
    return number


def agree_on_loop(
    wrapper: Wrapper, request: LoopRequest | None, failure: Exception | None
) -> tuple[LoopRequest, LoopAgreement]:
    """Agree with the other ranks on an update. This takes one message between hosts, and none for a single rank.

    ``failure`` is an error of this rank, in place of a request. It is raised on all ranks, so that none is left
    waiting.
    """
    ranks, message = wrapper.ranks, [1.0, 0.0, 0.0, UNKNOWN, UNKNOWN]
    if request is not None and failure is None:
        of_update, of_first = request.update_weight, request.weight.value
        of_update = UNKNOWN if of_update is None else of_update
        of_first = of_first if isinstance(of_first, float) else UNKNOWN
        message = [0.0, float(request.of), float(request.weight.kind == DIVIDED), of_update, of_first]
    rows = ranks.exchange_numbers(message)
    if any(row[0] for row in rows):
        raise first_failure(ranks, failure)
    numbers = [int(row[1]) for row in rows]
    if len(set(numbers)) > 1:
        counts = ", ".join(map(str, numbers[: ranks.degree]))
        raise PlanError(
            f"of= is {counts} on data ranks 0 to {ranks.degree - 1}; give the same number: a rank with fewer "
            "microbatches, or none, repeats any of its samples with sum_over=0"
        )
    if not numbers[0]:
        raise PlanError("of= is 0; an update has at least one microbatch, which may repeat a sample with sum_over=0")
    if len({(row[2], row[3] < 0) for row in rows}) > 1:
        raise PlanError("update_weight= or divided= is given on some ranks and not on others; give the same on all")
    # Without a request its failure was raised above.
    assert request is not None
    of, (*_, is_divided, stated, first) = request.of, map(list, zip(*rows[: ranks.num_weighing], strict=True))
    weights = [UNKNOWN]
    if is_divided[0]:
        weights = [1.0]
    elif UNKNOWN not in stated:
        weights = stated
    elif of == 1:
        weights = first
    if UNKNOWN not in weights:
        weight = math.fsum(weights)
        return request, LoopAgreement(of, weight, weight or 1.0)
    guess = 0.0 if UNKNOWN in first else of * math.fsum(first)
    # A division by a power of two is exact, so that the guess costs no digits.
    return request, LoopAgreement(of, None, 2.0 ** round(math.log2(guess)) if guess else 1.0)


def check_first(gradient: Any, wrapper: Wrapper, index: int) -> None:
    """Raise an error if no update of `microbatch` can begin."""
    if wrapper.is_pipeline:
        raise PlanError("a pipeline runs the microbatches of a call together; use forward_backward, not microbatch")
    gradient.planner.check_goes_with("microbatch(), whose loop makes its own cut")
    if gradient.open_update is not None:
        raise MegabatchError("microbatch() was entered in an update of other calls; finalize() it before")
    if index != 0:
        raise MegabatchError(f"microbatch {index} was entered when no update is open; begin with microbatch 0")


def open_loop(
    wrapper: Wrapper, watch: CallGuard, errors: ErrorGuard, policy: str,
    request: LoopRequest | None, failure: MegabatchError | None,
) -> "LoopUpdate":  # fmt: skip
    """Return a new update of `microbatch`, on which the ranks have agreed."""
    wrapper.ranks.position.verb = "microbatch()"
    # A forward without a backward leaves weights gathered, perhaps those before the step.
    wrapper.reshard()
    try:
        wrapper.check_unchanged()
    except MegabatchError as error:
        failure = failure or error
    with agreeing():
        request, agreement = agree_on_loop(wrapper, request, failure)
    return LoopUpdate(wrapper, watch, errors, policy, request, agreement)


class LoopUpdate(OpenUpdate):
    """An update whose microbatches a loop of the user's runs, in the order of their index."""

    def __init__(
        self, wrapper: Wrapper, watch: CallGuard, errors: ErrorGuard, policy: str,
        request: LoopRequest, agreement: LoopAgreement,
    ) -> None:  # fmt: skip
        super().__init__(wrapper)
        self.divisor, self.of = agreement.divisor, agreement.of
        self.wrapper, self._watch, self._errors = wrapper, watch, errors
        self._policies = policies_of_call(policy, self.of)
        self._scaler: torch.amp.GradScaler | None = None
        self._scaler_state: tuple[Any, ...] = ()
        self._saw_float16 = False  # a forward of the microbatch that runs was under autocast to float16
        self.backwards: BackwardCount  # of the microbatch that runs
        self._is_scaled: bool | None = None  # losses are scaled; None before the first
        self._is_seen = True  # every loss is known, so that the update's can be reported
        self._num_done = 0
        self._writes: list[Writes | None] = []  # to gradients, before the microbatch that runs
        self._parameter_writes: list[Writes | None] = []
        self._told_weight: float | Tensor = 0.0  # of this rank's microbatches so far
        self._is_untold = False  # some microbatch did not tell its weight
        self._update_weight, self._is_divided = request.update_weight, request.weight.kind == DIVIDED
        known = {} if agreement.weight is None else {PAIR_NAME: agreement.weight}
        self.count_call(CallAgreement(agreement.of, 0, 0, known, None))
        self.divide_by(self.divisor)

    def check_can_add(self) -> None:
        raise MegabatchError("the update consists of microbatch(), and no call adds to it; finalize() it before")

    def check_next(self, index: int, of: int) -> None:
        """Raise `MegabatchError` unless this is the next microbatch of the update."""
        if self.is_running:
            raise MegabatchError("microbatch() was entered inside of another microbatch(); leave one before the next")
        if of != self.of:
            raise MegabatchError(f"of= is {of} and was {self.of} when the update began; give the same until finalize()")
        if self._num_done == self.of:
            raise MegabatchError(
                f"microbatch {index} was entered after the last of {self.of}; finalize() the update before the next"
            )
        if index != self._num_done:
            raise MegabatchError(
                f"microbatch {index} of {self.of} was entered where {self._num_done} is next; run each index from 0 "
                f"once and in order, or discard() the update; for {self._num_done} at the end of an epoch, give their "
                "number as of="
            )

    def check_complete(self) -> None:
        """Raise `MegabatchError` unless every microbatch has run."""
        if self.is_running or self._num_done < self.of:
            raise MegabatchError(
                f"finalize() was called after {self._num_done} of {self.of} microbatches; run all of them before"
            )
        self._check_scaler()

    def hear_errors(self) -> None:
        """Raise the error of another rank whose loop has failed, instead of waiting for it."""
        self._errors.check()

    @contextlib.contextmanager
    def run(self, index: int, request: LoopRequest) -> Generator["LoopMicrobatch"]:
        """Surround one microbatch by what its wrapper needs."""
        wrapper, is_last = self.wrapper, index == self.of - 1
        if index and request.update_weight not in (None, self._update_weight):
            raise MegabatchError(
                f"update_weight= is {request.update_weight:.10g} and was {self._update_weight} when the update began; "
                "give the same until finalize()"
            )
        if index and (request.weight.kind == DIVIDED) != self._is_divided:
            raise MegabatchError("divided= changed within an update; give the same until finalize()")
        self._watch.check()
        wrapper.check_unchanged()
        # A wrapper may free gradients in its backward.
        self._watch.enter(is_new=index == 0)
        weight = request.weight
        if weight.kind is None and self._update_weight is not None:
            # The first microbatch has said that losses are sums.
            weight = LossWeight(SUM)
        part = LoopMicrobatch(self, index, weight)
        self._writes = _writes(parameter.grad for parameter in wrapper.accumulating)
        self._parameter_writes = _writes(wrapper.parameters)
        self._saw_float16, self.is_running = False, True
        self.backwards = BackwardCount(wrapper)
        hooks = [model.register_forward_pre_hook(self._note_autocast) for model in wrapper.models]
        try:
            with wrapper.microbatch(self._policies[index], last=is_last):
                wrapper.is_counting = not weight.is_zero
                try:
                    yield part
                finally:
                    wrapper.is_counting = None
                if self.is_dropped:
                    return
                self._check_backward(part)
        finally:
            self.is_running = False
            self.backwards.close()
            for hook in hooks:
                hook.remove()
        self._count()

    def _note_autocast(self, *_: object) -> None:
        self._saw_float16 |= autocasts_to_float16()

    def _check_backward(self, part: "LoopMicrobatch") -> None:
        """Raise `MegabatchError` unless the body of a microbatch ran a backward, and scaled as the one before did."""
        where = f"microbatch {part.index} of {self.of}"
        if part.scaled:
            _check_seeds(where, part.seeds)
            if part.seeds[0].device.type != "cpu":  # else it is read
                self.compare_seed(part.seeds[0])
        if self.backwards.number > 1 and not part.took_divisor:
            raise MegabatchError(
                f"{where} ran {self.backwards.number} backwards that add to the model's gradients; add the losses "
                "before scale(), and run one backward"
            )
        self._check_gradients(where, may_write_often=part.took_divisor)
        is_scaled = part.scaled or part.took_divisor
        if self._is_scaled not in (None, is_scaled):
            raise MegabatchError(f"{where} and the one before differ in whether the loss is scaled; scale all, or none")
        self._is_scaled = is_scaled
        if not part.scaled:
            self._is_seen = False
            self._count_unseen(part, where)

    def _count(self) -> None:
        """Count a microbatch that has run, and note its gradients."""
        self._num_done += 1
        if self._num_done == self.of:
            self._finish_weights()
        # Only new gradients can share memory.
        if not self._all_have_gradients:
            self._all_have_gradients = separate_gradients(self.wrapper.accumulating)
        self._watch.leave(self.total_factor)

    def divide_by(self, divisor: float) -> None:
        """Set the divisor of a single term, before its first microbatch. `close` corrects it to the weight."""
        self._divisors.by_term = {PAIR_NAME: divisor}

    def add_weight(self, weight: float | Tensor) -> None:
        """Add to the weight of the only term."""
        (name,) = self._sums
        add_terms(self._sums, {name: Term(self._scalar(0.0), weight)})

    def compare_weight(self, counted: float) -> None:
        """Compare this rank's weights with what it told beforehand. `close` reports a difference."""
        (term,) = self._sums.values()
        self._counted = counted
        self._note_fault((abs(term.weight - counted) > WEIGHT_TOLERANCE * counted) * MISCOUNTED)

    def compare_seed(self, seed: Tensor) -> None:
        """Compare the gradient of a loss that was scaled with 1. `close` reports a difference."""
        self._note_fault((seed != 1.0) * MULTIPLIED)

    def _note_fault(self, fault: float | Tensor) -> None:
        self._differ = torch.maximum(self._scalar(self._differ), self._scalar(fault))

    def check_unmoved(self, where: str) -> None:
        """Raise `LossContractError` if gradients have changed since the microbatch began."""
        before, after = self._writes, _writes(parameter.grad for parameter in self.wrapper.accumulating)
        # FSDP2 makes some parameters in the first forward, so that the list after is longer.
        if not self.wrapper.replaces_gradients and (
            _have_changed(before, after[: len(before)]) or any(after[len(before) :])
        ):
            raise LossContractError(
                f"gradients changed in the body before {where} was given to scale(). Leave zero_grad() out, which "
                "finalize() makes needless. If the loss runs its own backward, divide it by divisor before, and leave "
                "scale() out"
            )

    def _check_gradients(self, where: str, *, may_write_often: bool) -> None:
        """Raise `MegabatchError` unless one backward, and nothing else, has changed the gradients, as far as they show.

        A wrapper that reduces in backward writes to gradients itself, and FSDP2 keeps them elsewhere until then.
        """
        wrapper, is_last = self.wrapper, self._num_done == self.of - 1
        before, after = self._writes, _writes(parameter.grad for parameter in wrapper.accumulating)
        if not wrapper.replaces_gradients and _have_changed(self._parameter_writes, _writes(wrapper.parameters)):
            raise MegabatchError(f"parameters were written to in {where}; call optimizer.step() after finalize()")
        pairs = [] if wrapper.replaces_gradients or wrapper.forwards_meet else list(zip(before, after, strict=True))
        if any(old and not new for old, new in pairs):
            raise MegabatchError(f"gradients were dropped in {where}; leave zero_grad() out, finalize() does that")
        has_run = _have_changed(before, after)
        if wrapper.forwards_meet:
            has_run = not is_last or any(after)
        if not has_run:
            raise MegabatchError(
                f"{where} ended without a backward, or with one that reached no parameter; call loss.backward() once "
                "in the body of microbatch()"
            )
        reduces = is_last or self._policies[self._num_done] == "every"
        if may_write_often or (type(wrapper) is not Wrapper and reduces):
            return
        both = [(old, new) for old, new in pairs if old and new]
        if any(old[0]() is not new[0]() for old, new in both):
            raise MegabatchError(f"gradients were replaced in {where}; leave zero_grad() out, finalize() does that")
        times = max((new[1] - old[1] for old, new in both), default=0)
        if times > 1:
            raise MegabatchError(
                f"a gradient was written to {times} times in {where}, as by several backwards or by clip_grad_norm_; "
                "add the losses, run one backward, and clip by finalize(max_norm=). Checkpoint shared layers with "
                "use_reentrant=False"
            )

    def _count_unseen(self, part: "LoopMicrobatch", where: str) -> None:
        """Count the weight of a loss that was not given to `scale`."""
        kind, value = part.weight
        if kind is None:
            raise LossContractError(f"the loss of {where} is not said to be a sum, a mean or divided; {SAY}")
        if kind == MEAN:
            raise LossContractError(
                f"the loss of {where} is a mean, which nothing weighs; differentiate scale(loss) of what microbatch() "
                "yields"
            )
        if part.took_divisor:
            self.add_unseen(PAIR_NAME, self.tell_weight(kind, value))
            return
        if part.weight.is_zero or isinstance(value, Tensor):
            shown = "a weight on a device, which may be 0" if isinstance(value, Tensor) else "the weight 0"
            raise LossContractError(
                f"{where} has {shown}, and its loss was not scaled by that; differentiate scale(loss) of what "
                "microbatch() yields"
            )
        self.divide_by(self.wrapper.loss_factor)
        self.add_unseen(UNSCALED, self.tell_weight(kind, value))

    def tell_weight(self, kind: str, value: float | Tensor | None) -> float | Tensor:
        """Count the weight of a microbatch, and return it."""
        # Each microbatch has an equal part of the weight 1.
        if kind == DIVIDED:
            return 1 / (self.wrapper.ranks.num_weighing * self.of)
        if value is None:
            self._is_untold = True
            return 0.0
        self._told_weight = self._told_weight + value
        return value

    def _finish_weights(self) -> None:
        """Compare the weights of the microbatches with that of the update, or add what they did not tell."""
        update_weight = self._update_weight
        if update_weight is None:
            return
        if self._is_untold:
            self.add_weight(update_weight - self._told_weight)
        else:
            self.compare_weight(update_weight)

    def multiply(self, loss: Tensor, scaler: torch.amp.GradScaler | None) -> Tensor:
        """Multiply the loss by the scale of a GradScaler, and note the scale."""
        if self._is_scaled is not None and scaler is not self._scaler:
            raise MegabatchError("scale() was given another GradScaler than before in this update; give one in all")
        if self._saw_float16 and (scaler is None or not scaler.is_enabled()):
            raise MegabatchError(
                "the model ran under autocast to float16, in which small gradients are 0, and scale() was given no "
                "GradScaler; call scale(loss, scaler), or autocast to bfloat16"
            )
        if scaler is None:
            return loss
        self._check_scaler()
        scaled = torch.as_tensor(scaler.scale(loss))
        if self._scaler is None:
            self._scaler, self._scaler_state = scaler, scaler_state(scaler)
            self.loss_scale = torch.as_tensor(scaler.scale(loss.new_ones((), dtype=accumulation_dtype(loss.device))))
        return scaled

    def _check_scaler(self) -> None:
        """Raise `MegabatchError` if the GradScaler has unscaled, stepped or changed its scale within the update."""
        if self._scaler is not None and scaler_state(self._scaler) != self._scaler_state:
            raise MegabatchError(
                "the GradScaler was used before finalize(), and its gradient is not yet that of the update; call "
                "unscale_(), step() and update() after finalize()"
            )

    def drops(self, weight: LossWeight) -> bool:
        """Return True for a loss that counts nothing because this rank's weight of the whole update is 0."""
        return weight.value is None and self._update_weight == 0

    def report(self, update: Update) -> Update:
        """Return the update as it is known: a loss that was not given to `scale` is NaN."""
        if self._is_seen:
            return update
        return replace(update, loss=torch.full_like(update.loss, math.nan), terms={})


class LoopMicrobatch:
    """One microbatch of your own loop; `GradientAccumulator.microbatch` yields it."""

    def __init__(self, loop: LoopUpdate, index: int, weight: LossWeight) -> None:
        self.index, self.weight = index, weight
        self.scaled = self.took_divisor = False
        self.seeds: list[Tensor] = []  # the gradient that each backward gave the scaled loss
        self._loop = loop

    def scale(
        self, loss: Tensor, scaler: torch.amp.GradScaler | None = None, *,
        sum_over: float | Tensor | None = None, mean_over: float | Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the loss, divided so that the update's gradient is exact. Call ``backward`` on it as it is.

        Call this once in the body of `GradientAccumulator.microbatch`.

        Args:
            loss: The sum or the mean that you told ``microbatch``, a scalar.
            scaler: A GradScaler, which multiplies the result. Do not call ``scaler.scale`` yourself. Call
                ``scaler.unscale_`` or ``scaler.step`` after `finalize`, which clips to ``max_norm`` as if the gradient
                was not multiplied.
            sum_over: What the loss is a sum over, if only the forward tells.
            mean_over: What the loss is a mean over, if only the forward tells.

        Returns:
            A scalar that carries the gradient. Add nothing to it: another loss belongs into ``loss``.

        Raises:
            LossContractError: The loss is not what you said, or carries no gradient.
            MegabatchError: A second call in one microbatch.
        """
        loop, where = self._loop, f"the loss of microbatch {self.index} of {self._loop.of}"
        if isinstance(loss, CoupledLoss):
            raise LossContractError(f"{where} is a JointLoss, which needs all samples; give it to forward_backward()")
        if self.scaled or self.took_divisor:
            raise MegabatchError(f"{where} was divided before; call scale() or read divisor once in a microbatch")
        scale_weight = read_loss_weight(sum_over, mean_over)
        if scale_weight.kind is not None and self.weight.kind is not None and self.weight.value is not None:
            raise PlanError(f"the weight of {where} is given to microbatch() and to scale(); give it to one of them")
        if scale_weight.kind is not None and self.weight.kind == DIVIDED:
            raise PlanError(f"{where} is said to be divided, and scale() is given a weight; leave one out")
        kind, value = self.weight = self.weight if scale_weight.kind is None else scale_weight
        if kind is None:
            raise LossContractError(f"{where} is not said to be a sum, a mean or divided; {SAY}")
        loss = terms_of((loss, 0.0))[PAIR_NAME].total
        if not loss.requires_grad:
            raise LossContractError(f"{where} carries no gradient; {describe_missing_gradient()}")
        if loop.drops(self.weight):
            value = 0.0
            self.weight = LossWeight(kind, value)
        loop.check_unmoved(where)
        _check_kind(where, loss, self.weight, loop.of)
        total = _total(where, loss, self.weight)
        step = MicrobatchStep({}, self.index, {}, is_dummy=False)
        term = {PAIR_NAME: Term(total, loop.tell_weight(kind, value))}
        scaled = loop.objective(term, step)
        loop.add(term, step)
        scaled = loop.multiply(scaled, scaler)
        scaled.register_hook(self._note_backward)
        loop.backwards.watch()
        self.scaled = True
        return scaled.as_subclass(ScaledLoss)

    @property
    def divisor(self) -> float | Tensor:
        """The number by which to divide a sum, for a loss that divides itself or runs its own backward.

        It is the update's weight over all ranks, over their number where the wrapper averages. Read it instead of
        calling `scale`; the loss of the update is then unknown. It is infinite for a microbatch of weight 0, and a
        scalar tensor if the weight is one on a device.
        """
        (kind, value), loop = self.weight, self._loop
        if kind != SUM:
            kind_said = "not said" if kind is None else f"said to be {'a mean' if kind == MEAN else 'divided'}"
            raise LossContractError(
                f"divisor is for a loss that is a sum, and this one is {kind_said}; give it to scale()"
            )
        if self.scaled:
            raise MegabatchError(f"microbatch {self.index} of {loop.of} called scale() and reads divisor; use one")
        self.took_divisor = True
        divisor = loop.divisor / loop.wrapper.loss_factor
        if isinstance(value, Tensor):
            return torch.where(value > 0, divisor, math.inf)
        return math.inf if self.weight.is_zero or loop.drops(self.weight) else divisor

    def _note_backward(self, seed: Tensor) -> None:
        self.seeds.append(seed)


class ScaledLoss(Tensor):
    """A scaled loss, and what is computed from it. Its backward refuses another loss that was added undivided."""

    is_mixed = False  # another tensor that carries a gradient has entered

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward and args[0].is_mixed:
            raise MegabatchError(
                "another loss was added to what scale() returned, and it would not be divided; add the losses first, "
                "and give their sum to scale()"
            )
        with without_subclasses():
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.grad_fn is not None:
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if any(tensor.requires_grad and getattr(tensor, "is_mixed", True) for tensor in tensors):
                # An operation in place returns the scaled loss itself.
                result = result if isinstance(result, ScaledLoss) else result.as_subclass(ScaledLoss)
                result.is_mixed = True
        return result

    def __format__(self, format_spec: str) -> str:
        return format(self.as_subclass(Tensor), format_spec)


def _check_seeds(where: str, seeds: list[Tensor]) -> None:
    """Raise `MegabatchError` unless one backward ran, of the scaled loss itself."""
    if not seeds:
        raise MegabatchError(f"{where} ended without a backward of what scale() returned; call backward() on that")
    if len(seeds) > 1:
        raise MegabatchError(f"{where} ran {len(seeds)} backwards of what scale() returned; run one")
    if seeds[0].device.type == "cpu" and float(seeds[0]) != 1.0:
        raise MegabatchError(
            f"the loss of {where} was multiplied by {float(seeds[0]):.6g} after scale(); call backward() on what "
            "scale() returns, and give it the GradScaler: scale(loss, scaler)"
        )


def _check_kind(where: str, loss: Tensor, weight: LossWeight, of: int) -> None:
    """Raise `LossContractError` for a loss whose last operation shows that it is not what was said."""
    kind, value = weight
    # A repeated sample counts nothing, whatever its loss.
    if kind != MEAN and weight.is_zero:
        return
    divisor = last_divisor(loss)
    if of > 1 and kind != DIVIDED and divisor == of and value != of:
        raise LossContractError(
            f"{where} was divided by {of}, the number of microbatches; leave that out, since scale() divides it (a "
            f"constant of the loss is written * {1 / of:.3g})"
        )
    if kind == SUM and is_mean_reduction(loss) and value != 1:
        raise LossContractError(f"{where} is a mean and is said to be a sum; give mean_over=, or return the sum")
    counted = cross_entropy_weight(loss) if kind == MEAN and loss.device.type == "cpu" else None
    if counted is not None and isinstance(value, float) and abs(float(counted) - value) > WEIGHT_TOLERANCE * value:
        raise LossContractError(
            f"{where} is a cross-entropy that divided by {float(counted):.10g}, and mean_over is {value:.10g}; count "
            "what the mean is over"
        )


def _total(where: str, loss: Tensor, weight: LossWeight) -> Tensor:
    """Return the sum that belongs to the weight."""
    kind, value = weight
    if isinstance(value, Tensor):
        return torch.where(value > 0, loss * value if kind == MEAN else loss, 0.0)
    if not weight.is_zero:
        return loss * value if kind == MEAN and value is not None else loss
    if is_mean_cross_entropy(loss):  # 0 / 0, with a gradient of 0
        return torch.where(torch.zeros((), dtype=torch.bool, device=loss.device), loss, 0.0)
    if loss.device.type == "cpu" and not loss.isfinite():
        raise LossContractError(
            f"{where} is {float(loss.detach())} where its weight is 0, and its gradient may be NaN; if it divides by "
            "a count, divide by max(count, 1)"
        )
    return loss * 0.0


def _writes(tensors: Iterable[Tensor | None]) -> list[Writes | None]:
    """Return each tensor with its number of writes, by a weak reference, since a wrapper may free a gradient.

    `id` does not tell tensors apart: a new gradient may get the address of a dropped one.
    """
    return [None if tensor is None else (weakref.ref(tensor), count_writes(tensor)) for tensor in tensors]


def _have_changed(before: list[Writes | None], after: list[Writes | None]) -> bool:
    """Return True if any tensor is another one, or was written to."""
    return len(before) != len(after) or not all(map(_is_unchanged, before, after))


def _is_unchanged(before: Writes | None, after: Writes | None) -> bool:
    if before is None or after is None:
        return before is after
    return before[1] == after[1] and before[0]() is after[0]()  # == of references compares the tensors' values
