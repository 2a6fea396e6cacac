"""The open update and its result.

While an update is open, each microbatch's total is divided by the weight that the first call announced. When the update
closes, one factor corrects this divisor to the weight of the whole update. For a single weighed call the factor is 1.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.core.call import CallAgreement, MicrobatchStep
from megabatch.core.contract import (
    PAIR_NAME,
    WEIGHT_TOLERANCE,
    Term,
    accumulation_dtype,
    differentiable,
)
from megabatch.core.divisors import Divisors, ToldDivisors, weight_of
from megabatch.core.gradients import refuse_float16, separate_gradients
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError, MegabatchError, PlanError

MAX_TERMS = 16  # the message between devices has a fixed size, so that no rank can wait for a longer one
# Codes in a report, in place of the flag "weights differ" (1.0):
TAKEN = 2.0  # other code changed the gradient between two calls
MISCOUNTED = 3.0  # update_weight= of microbatch() is not the sum of its weights
MULTIPLIED = 4.0  # a loss was multiplied after scale()
NOT_OPEN = (
    "finalize() was called and no update is open: call forward_backward(), or run a loop of microbatch(), before, and "
    "again if it raised"
)


@dataclass(frozen=True)
class Update:
    """The result of an update, over all ranks. Tensors are scalars on the model's device.

    Attributes:
        loss: The quotient that was differentiated: the sum of totals over the sum of weights, added over the
            differentiable terms.
        terms: The quotient of each term and metric, by name.
        weight: The divisor of the totals. With several differentiable terms, that of the first.
        finite: Bool. True if the losses are finite (and with ``max_norm`` the gradients), all ranks agree, and there is
            weight. Step the optimizer only then.
        grad_norm: 2-norm of the gradient before clipping. None unless ``max_norm`` was given.
        num_samples: Samples of all ranks.
        num_tokens: Tokens of all ranks, without padding.
        num_microbatches: Microbatches of each rank, with dummy microbatches.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    weight: Tensor
    finite: (
        Tensor  # bool: losses (and with max_norm gradients) are finite, ranks agree, there is weight; step only then
    )
    grad_norm: Tensor | None
    num_samples: int
    num_tokens: int
    num_microbatches: int
    reports: Tensor = field(repr=False)  # [ranks, 4 + terms]: each rank's report, see OpenUpdate._report
    told: dict[str, tuple[float, Tensor]] = field(
        default_factory=dict[str, tuple[float, Tensor]], repr=False
    )  # by term: the weight that open() was told, and the one that the losses returned

    def __str__(self) -> str:
        """Format the update in one line. Wait for the device."""
        known = (
            f"{self.num_samples} samples, {self.num_tokens} tokens, " if self.num_samples else ""
        )  # not in own loops
        counts = f"{known}{self.num_microbatches} microbatches"
        norm = "" if self.grad_norm is None else f", grad_norm {float(self.grad_norm):.4g}"
        terms = "".join(f", {name} {float(value):.6g}" for name, value in self.terms.items() if len(self.terms) > 1)
        verdict = "finite" if bool(self.finite) else "NOT finite"
        return f"loss {float(self.loss):.6g} over weight {float(self.weight):.10g}{terms}, {counts}{norm}, {verdict}"

    def problem(self) -> MegabatchError | None:
        """Return an error that names the fault, or None. Missing weight is not a fault. Wait for the device."""
        reports = self.reports.tolist()
        if len({names_hash for _, _, _, names_hash, *_ in reports}) > 1:
            return LossContractError(
                "ranks differ in the names of the loss's terms, in which of them carry a gradient, in what they gave "
                "to finalize(), or in the FSDP or DDP modules that their forwards and backwards went through; give the "
                "same everywhere"
            )
        for rank, (differ, counted, returned, _, *totals) in enumerate(reports):
            where = f"data rank {rank} of {len(reports)}"
            if differ == TAKEN:
                return MegabatchError(
                    f"the gradient of {where} was dropped or written to between two calls of an update"
                )
            if differ == MISCOUNTED:
                return LossContractError(
                    f"update_weight is {counted:.10g} but the weights of its microbatches add up to {returned:.10g} on "
                    f"{where}; count what the losses sum or average over, on this rank alone"
                )
            if differ == MULTIPLIED:
                return LossContractError(
                    f"a loss was multiplied after scale() on {where}; call backward() on what scale() returns, and "
                    "give it the GradScaler: scale(loss, scaler)"
                )
            if differ:
                return weights_differ(where, counted, returned)
            if not all(map(math.isfinite, totals)):
                return MegabatchError(f"the loss is not finite on {where}")
        for name, (announced, returned) in self.told.items():
            if bool(_differs(returned, announced)):
                return LossContractError(
                    f"open() was told the weight {announced:.10g} of {name!r} and the calls of the update returned "
                    f"{float(returned):.10g}, over all ranks; give every sample that was counted, and each once"
                )
        num_own = self.reports.shape[1] - 4  # differentiable terms, which come first
        for name, total in zip(self.terms, self.reports[:, 4:].sum(0).tolist() if num_own > 1 else (), strict=False):
            if math.isinf(float(self.terms[name])):
                return LossContractError(
                    f"the term {name!r} has the weight 0 in this update and the total {total:.6g}, which nothing "
                    "divides; return a total of 0 where there is nothing to count, or count what it sums"
                )
        if self.grad_norm is not None and not torch.isfinite(self.grad_norm):
            return MegabatchError(f"the loss is finite but the norm of the gradient is {float(self.grad_norm)}")
        return None

    def with_norm(self, norm: Tensor) -> "Update":
        """Return the update with the norm of its gradient."""
        return replace(self, grad_norm=norm, finite=self.finite & torch.isfinite(norm).to(self.finite.device))


def _differs(returned: Tensor, told: float) -> Tensor:
    return (returned - told).abs() > WEIGHT_TOLERANCE * told


def weights_differ(where: str, counted: float, returned: float) -> LossContractError:
    """Return the error for a counted weight that differs from the returned one."""
    return LossContractError(
        f"weigh counted {counted:.10g} from the data but the loss returned the weight {returned:.10g} on {where}; "
        "count what the loss sums (a causal shift never uses the label at position 0: count labels[:, 1:])"
    )


class OpenUpdate:
    """This rank's sums of the update that is being accumulated, and the divisors of its terms."""

    is_running = False  # a microbatch of it runs
    is_dropped = False
    loss_scale: float | Tensor = 1.0  # of a GradScaler
    keeps_cut: ClassVar[str | None] = None  # why a microbatch may not run in parts

    def __init__(self, wrapper: Wrapper) -> None:
        self._ranks, self._wrapper = wrapper.ranks, wrapper
        self._device = wrapper.device
        self._dtype = accumulation_dtype(wrapper.device)
        self._divisors = Divisors()
        self._is_held = False  # the wrapper is to reduce once, at the end
        self._hold_reduction: Callable[[str], None] = _hold_nothing
        self._checked_terms: object = None  # of the microbatch before
        self._differentiable: set[str] = set()  # names of the terms that have carried a gradient
        self._sums: dict[str, Term] = {}
        self._differ: Any = False  # a bool, or a scalar on the device; one of the codes above in a loop of the user's
        self.is_taken = False  # True if the gradient on this rank was changed between two calls
        # State that a microbatch adds outside of gradients: its name, and a function that undoes it after a failure.
        self.taking_back: list[tuple[str, Callable[[], object]]] = []
        self._counted = 0.0
        self._num_calls = self.num_samples = self.num_tokens = self.num_microbatches = 0
        self._all_have_gradients = False
        self.total_factor = 1.0  # by which the last total was multiplied before its backward

    @property
    def has_calls(self) -> bool:
        """True once a call has begun to add to the update."""
        return self._num_calls > 0

    @property
    def sums(self) -> dict[str, Term]:
        """This rank's sums so far, by name of the term."""
        return self._sums.copy()

    @property
    def differentiable(self) -> list[str]:
        """Names of the terms that have carried a gradient, sorted."""
        return sorted(self._differentiable)

    @property
    def divisors(self) -> Mapping[str, float]:
        """The divisor of each term that has one already."""
        return self._divisors.by_term

    def tell(self, weights: Mapping[str, float]) -> None:
        """Divide by weights of the whole update, by term, which its first call does not know. Empty: not told."""
        if weights:
            self._divisors = ToldDivisors(weights)

    def hold_reduction(self) -> None:
        """Reduce once, when the update closes, where the wrapper and its policy can."""
        self._is_held, self._hold_reduction = True, self._wrapper.hold_reduction

    @property
    def can_add(self) -> bool:
        """True if a call can add to the update."""
        return not self.is_running

    def check_can_add(self) -> None:
        """Raise `MegabatchError` if no call can add to the update."""
        if self.is_running:
            raise MegabatchError(
                "forward_backward() or microbatch() was called inside the loss of another call; finish one before the "
                "next"
            )

    def check_complete(self) -> None:
        """Raise `MegabatchError` if the update cannot close."""
        if self.is_running:
            raise MegabatchError(NOT_OPEN)

    def check_replaceable(self, weight: float) -> None:
        """Raise `PlanError` if ``weight`` cannot replace the divisor, which was told before."""
        if self._divisors.told:
            raise PlanError(f"weight is {weight:.10g}, but open() was told the weight before; leave one of them out")

    def begin_call(self, policy: str, num_microbatches: int) -> None:
        """Prepare the wrapper for the microbatches of a call. Collective."""
        policy, _, _ = policy.partition(":")
        self._hold_reduction(policy)
        if num_microbatches:
            self._wrapper.begin_call(policy)

    def count_call(self, call: CallAgreement) -> None:
        """Add the plan of the next call to the counts and the announced weights."""
        if not call.num_microbatches:
            return
        self._num_calls += 1
        self._checked_terms = None
        self._divisors.add_call(call.weights)
        self.num_samples += call.num_samples
        self.num_tokens += call.num_tokens
        self.num_microbatches += call.num_microbatches

    def backward(self, terms: Mapping[str, Term], step: MicrobatchStep) -> dict[str, Term]:
        """Differentiate one microbatch and add its sums. Return them, detached.

        If the microbatch fails, everything except its gradient is undone.
        """
        objective = self.objective(terms, step)
        before = self._sums.copy(), self._differ, self._counted
        self.taking_back.clear()
        try:
            sums = self.add(terms, step)
            step.differentiate(objective)
        except Exception:
            self._sums, self._differ, self._counted = before
            for _, take_back in self.taking_back:
                take_back()
            raise
        if not self._all_have_gradients:  # only new gradients can share memory
            separate_gradients(self._wrapper.accumulating)
            self._all_have_gradients = all(each.grad is not None for each in self._wrapper.accumulating)
        return sums

    def objective(self, terms: Mapping[str, Term], step: MicrobatchStep) -> Tensor:
        """Return the scalar to differentiate: the sum of totals over their divisors, zero for a dummy microbatch."""
        names = differentiable(terms)
        terms_of_step = names, list(step.announced)
        if terms_of_step != self._checked_terms:
            self._differentiable |= set(names)
            self._divisors.check_terms(names, self.differentiable, step)
            self._checked_terms = terms_of_step
        if any(terms[name].total.dtype == torch.float16 for name in names):
            refuse_float16((f"the total of {name!r}", terms[name].total.dtype) for name in names)
        factors = [self._wrapper.loss_factor / (weight_of(self._divisors.by_term, name) or 1.0) for name in names]
        self.total_factor = min(factors)
        if step.is_dummy:
            factors = [0.0] * len(names)
        parts = [terms[name].total * factor for name, factor in zip(names, factors, strict=True)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum()

    def add(self, terms: Mapping[str, Term], step: MicrobatchStep) -> dict[str, Term]:
        """Add a microbatch's terms to the sums. Compare its weights with the counted ones. Return the terms, detached.

        A dummy microbatch adds only the names of its terms.
        """
        if step.is_dummy:
            nothing = {name: Term(self._scalar(0.0), 0.0) for name in terms}
            add_terms(self._sums, nothing)
            return nothing
        detached = {name: Term(term.total.detach().to(self._dtype), term.weight) for name, term in terms.items()}
        add_terms(self._sums, detached)
        for name in differentiable(terms):
            counted, returned = weight_of(step.announced, name), terms[name].weight
            if counted is None:
                continue
            differ = abs(returned - counted) > WEIGHT_TOLERANCE * counted
            if isinstance(returned, float) and differ and self._ranks.is_alone:
                raise weights_differ(f"microbatch {step.index}", counted, returned)
            self._differ = differ | self._differ
            self._counted += counted
        return detached

    def add_unseen(self, name: str, weight: float | Tensor) -> None:
        """Count a microbatch that was differentiated by other code, with a total that is not known."""
        self._differentiable.add(name)
        add_terms(self._sums, {name: Term(self._scalar(0.0), weight)})

    def close(self, weight: float | None, max_norm: float | None) -> tuple[Update, float | Tensor | None]:
        """Return the update, and the missing factor of its gradient (None: none is missing; 0.0: there is no weight).

        ``weight`` replaces the divisor. ``max_norm`` is only compared with the other ranks'. This sends one small
        message between devices. On the CPU, raises `LossContractError` if counted and returned weights differ.
        """
        own = sorted(self._differentiable)
        if weight is not None and len(own) > 1:
            raise LossContractError(f"weight= replaces one divisor, but the loss has the terms {own}")
        names = [*own, *sorted(self._sums.keys() - self._differentiable)]
        rest = f"{own} {weight} {max_norm} {self._divisors.told} {self._is_held}"
        rest += f" {self._wrapper.collectives_digest}"
        rest += repr(self._ranks.position)  # which only the CPU compares by itself
        report = self._report(names, rest)
        rows = report[None] if self._ranks.is_alone else self._ranks.gather_report(report)  # [ranks, 4 + 2 * MAX_TERMS]
        totals, weights = rows[:, 4 : 4 + 2 * len(names)].sum(0).reshape(2, -1)  # [terms], [terms]
        totals, weights = self.sums_over_ranks(names, totals, weights)
        if weight is not None:
            weights = torch.cat([torch.full_like(weights[:1], weight), weights[1:]])
        num_own = len(own)  # differentiable terms come first, then the metrics
        quotients = totals / weights
        each = quotients.unbind()
        agree = ~rows[:, 0].any()
        if len(rows) > 1:
            agree = agree & (rows[:, 3] == rows[0, 3]).all()
        if num_own == 1:
            loss = each[0]
        else:
            has_weight = weights[:num_own] > 0
            loss = torch.where(has_weight, quotients[:num_own], 0.0).sum() / has_weight.any()  # NaN without any weight
            # A total that is not finite and has no weight, and a total without a weight.
            agree = agree & torch.isfinite(totals[:num_own]).all() & ~torch.isinf(quotients[:num_own]).any()
        told = {name: (known, _returned_weight(name, names, weights)) for name, known in self._divisors.told.items()}
        for known, returned in told.values():
            agree = agree & ~_differs(returned, known)
        whole = weights[0] if num_own else torch.zeros_like(loss)
        update = Update(
            loss=loss,
            terms=dict(zip(names, each, strict=True)),
            weight=whole,
            finite=torch.isfinite(loss) & agree,
            grad_norm=None,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            num_microbatches=self.num_microbatches,
            reports=rows[:, : 4 + num_own],
            told=told,
        )
        problem = update.problem() if self._device.type == "cpu" else None
        if problem is not None and (isinstance(problem, LossContractError) or bool((rows[:, 0] == TAKEN).any())):
            raise problem
        return update, self._divisors.missing_factor(own, whole, weight) if own else 0.0

    def sums_over_ranks(
        self, names: Sequence[str], totals: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the sums of totals and of weights over all ranks, [terms] each; given are those that float64 adds."""
        return totals, weights

    def hear_errors(self) -> None:
        """Raise an error that another rank has told meanwhile, where ranks do not run their microbatches in step."""

    def report(self, update: Update) -> Update:
        """Return the closed update as far as it is known."""
        return update

    def _report(self, names: list[str], rest: str) -> Tensor:
        """Return [weights differ, counted, returned, hash of names and rest; totals of terms; their weights; zeros]."""
        if len(names) > MAX_TERMS:
            raise LossContractError(f"the loss returned {len(names)} terms; at most {MAX_TERMS} are supported")
        returned = sum(self._sums[name].weight for name in self._differentiable)
        head = [
            TAKEN if self.is_taken else self._differ,
            self._counted,
            returned,
            float(zlib.crc32("\n".join([*names, rest]).encode())),
        ]
        totals, weights = [self._sums[name].total for name in names], [self._sums[name].weight for name in names]
        values, num_zeros = [*head, *totals, *weights], 2 * (MAX_TERMS - len(names))
        if self._device.type == "cpu":
            return torch.tensor([*map(float, values), *[0.0] * num_zeros], dtype=self._dtype, device="cpu")
        return F.pad(torch.stack([self._scalar(value) for value in values]), (0, num_zeros))

    def _scalar(self, value: float | Tensor) -> Tensor:
        # torch.full, since copying a number from the host would wait for the device.
        if isinstance(value, Tensor):
            return value.to(self._device, self._dtype)
        return torch.full((), value, dtype=self._dtype, device=self._device)


def add_terms(sums: dict[str, Term], terms: Mapping[str, Term]) -> None:
    """Add named terms to named sums."""
    for name, term in terms.items():
        before = sums.get(name)
        sums[name] = term if before is None else Term(before.total + term.total, before.weight + term.weight)


def _returned_weight(name: str, names: list[str], weights: Tensor) -> Tensor:
    """Return the weight of a term, 0 if there is none. A weight without a name belongs to the only term."""
    if name == PAIR_NAME and name not in names and names:
        name = names[0]
    return weights[names.index(name)] if name in names else weights.new_zeros(())


def _hold_nothing(policy: str) -> None:
    """Let the wrapper reduce with each call."""
