"""The open update and its result.

While an update is open, each microbatch's total is divided by the weight that the first call announced. When the update
closes, one factor corrects this divisor to the weight of the whole update. For a single weighed call the factor is 1.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import attrgetter
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megabatch.core.call import CallAgreement, MicrobatchStep
from megabatch.core.contract import PAIR_NAME, WEIGHT_TOLERANCE, Term, accumulation_dtype, differentiable
from megabatch.core.divisors import AnnouncedDivisors, Divisors, weight_of
from megabatch.core.gradients import refuse_float16, separate_gradients
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError, MegabatchError, PlanError

# The message between devices has a fixed size, so that no rank can wait for a longer one.
MAX_TERMS = 16
# Numbers of a report before its totals: the fault, the counted and the returned weight, and a hash of the names.
FAULT, NAMES_HASH = 0, 3
HEAD_SIZE = 4
# Faults beside 1.0, which stands for weights that differ: other code changed the gradient between two calls,
# update_weight= of microbatch() is not the sum of its weights, and a loss was multiplied after scale().
TAKEN, MISCOUNTED, MULTIPLIED = 2.0, 3.0, 4.0
TOTAL, WEIGHT = attrgetter("total"), attrgetter("weight")
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
        reports: The report of each data and context rank, up to the totals of its differentiable terms, see
            `OpenUpdate._report`. [ranks, 4 + differentiable terms]
        announced: By term, the weight that `open` was told and the one that the losses returned.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    weight: Tensor
    finite: Tensor
    grad_norm: Tensor | None
    num_samples: int
    num_tokens: int
    num_microbatches: int
    reports: Tensor = field(repr=False)
    announced: dict[str, tuple[float, Tensor]] = field(default_factory=dict[str, tuple[float, Tensor]], repr=False)

    def __str__(self) -> str:
        """Format the update in one line. Wait for the device."""
        parts = [f"loss {float(self.loss):.6g} over weight {float(self.weight):.10g}"]
        if len(self.terms) > 1:
            parts += [f"{name} {float(value):.6g}" for name, value in self.terms.items()]
        # A loop of your own states no samples.
        if self.num_samples:
            parts += [f"{self.num_samples} samples", f"{self.num_tokens} tokens"]
        parts.append(f"{self.num_microbatches} microbatches")
        if self.grad_norm is not None:
            parts.append(f"grad_norm {float(self.grad_norm):.4g}")
        parts.append("finite" if bool(self.finite) else "NOT finite")
        return ", ".join(parts)

    def problem(self) -> MegabatchError | None:
        """Return an error that names the fault, or None. Missing weight is not a fault. Wait for the device."""
        if len(self.reports[:, NAMES_HASH].unique()) > 1:
            return LossContractError(
                "ranks differ in the names of the loss's terms, in which of them carry a gradient, in what they gave "
                "to finalize(), or in the FSDP or DDP modules that their forwards and backwards went through; give the "
                "same everywhere"
            )
        for rank, report in enumerate(self.reports.tolist()):
            problem = _problem_of_rank(f"data rank {rank} of {len(self.reports)}", *report)
            if problem is not None:
                return problem
        for name, (announced, returned) in self.announced.items():
            if bool(_differs(returned, announced)):
                return LossContractError(
                    f"open() was told the weight {announced:.10g} of {name!r} and the calls of the update returned "
                    f"{float(returned):.10g}, over all ranks; give every sample that was counted, and each once"
                )
        # Differentiable terms come first.
        totals = self.reports[:, HEAD_SIZE:].sum(0).tolist()
        for name, total in zip(self.terms, totals, strict=False):
            if len(totals) > 1 and math.isinf(float(self.terms[name])):
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


def _problem_of_rank(
    where: str, fault: float, counted: float, returned: float, names_hash: float, *totals: float
) -> MegabatchError | None:
    """Return an error that names the fault in the report of a rank, or None."""
    if fault == TAKEN:
        return MegabatchError(f"the gradient of {where} was dropped or written to between two calls of an update")
    if fault == MISCOUNTED:
        return LossContractError(
            f"update_weight is {counted:.10g} but the weights of its microbatches add up to {returned:.10g} on "
            f"{where}; count what the losses sum or average over, on this rank alone"
        )
    if fault == MULTIPLIED:
        return LossContractError(
            f"a loss was multiplied after scale() on {where}; call backward() on what scale() returns, and "
            "give it the GradScaler: scale(loss, scaler)"
        )
    if fault:
        return weights_differ(where, counted, returned)
    if math.isnan(returned):
        return LossContractError(f"a weight of the loss is negative or NaN on {where}; a weight counts, from 0")
    if not all(map(math.isfinite, totals)):
        return MegabatchError(f"the loss is not finite on {where}")
    return None


def _differs(returned: Tensor, announced: float) -> Tensor:
    return (returned - announced).abs() > WEIGHT_TOLERANCE * announced


def weights_differ(where: str, counted: float, returned: float) -> LossContractError:
    """Return the error for a counted weight that differs from the returned one."""
    return LossContractError(
        f"weigh counted {counted:.10g} from the data but the loss returned the weight {returned:.10g} on {where}; "
        "count what the loss sums (a causal shift never uses the label at position 0: count labels[:, 1:])"
    )


class OpenUpdate:
    """This rank's sums of the update that is being accumulated, and the divisors of its terms.

    Attributes:
        is_running: True while a call adds to the update.
        is_dropped: True once the update was dropped, which a loop of the user's may not know.
        is_taken: True if the gradient on this rank was changed between two calls.
        loss_scale: The scale of a GradScaler.
        total_factor: The smallest factor by which a total of the last microbatch was multiplied before its backward.
        taking_back: State that a microbatch adds outside of gradients: its name, and a function that undoes it.
        keeps_cut: The reason why a microbatch may not run in parts, if it may not.
    """

    is_running = False
    is_dropped = False
    is_taken = False
    loss_scale: float | Tensor = 1.0
    total_factor = 1.0
    keeps_cut: ClassVar[str | None] = None

    def __init__(self, wrapper: Wrapper) -> None:
        self._ranks, self._wrapper = wrapper.ranks, wrapper
        self._device = wrapper.device
        self._dtype = accumulation_dtype(wrapper.device)
        self._divisors = Divisors()
        self._hold_reduction: Callable[[str], None] = _hold_nothing
        # The terms of the microbatch before, which need no second check.
        self._checked_terms: object = None
        self._differentiable: set[str] = set()
        self._sums: dict[str, Term] = {}
        # The fault of the report: a number, or on a device a scalar.
        self._differ: Any = False
        self._counted = 0.0
        self.taking_back: list[tuple[str, Callable[[], object]]] = []
        self._num_calls = self.num_samples = self.num_tokens = self.num_microbatches = 0
        self._all_have_gradients = False

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

    def announce(self, weights: Mapping[str, float]) -> None:
        """Divide by these weights of the update by term, and not by those of its first call. Empty changes nothing."""
        if weights:
            self._divisors = AnnouncedDivisors(weights)

    def hold_reduction(self) -> None:
        """Reduce once, when the update closes, where the wrapper and its policy can."""
        self._hold_reduction = self._wrapper.hold_reduction

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
            raise MegabatchError(
                "finalize() was called inside of a call; call it after forward_backward() has returned"
            )

    def check_replaceable(self, weight: float) -> None:
        """Raise `PlanError` if ``weight`` cannot replace the divisor, since `open` was told another."""
        if self._divisors.announced:
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
        # Only new gradients can share memory.
        if not self._all_have_gradients:
            self._all_have_gradients = separate_gradients(self._wrapper.accumulating)
        return sums

    def objective(self, terms: Mapping[str, Term], step: MicrobatchStep) -> Tensor:
        """Return the scalar to differentiate: the sum of totals over their divisors, zero for a dummy microbatch."""
        names = differentiable(terms)
        terms_of_step = names, list(step.announced)
        if terms_of_step != self._checked_terms:
            self._differentiable |= set(names)
            self._divisors.check_terms(names, self.differentiable, step)
            self._checked_terms = terms_of_step
        refuse_float16((f"the total of {name!r}", terms[name].total.dtype) for name in names)
        factors = [self._wrapper.loss_factor / self._divisors.divisor_of(name) for name in names]
        self.total_factor = min(factors)
        if step.is_dummy:
            factors = [0.0] * len(names)
        scaled_totals = [terms[name].total * factor for name, factor in zip(names, factors, strict=True)]
        return reduce(torch.add, scaled_totals)

    def add(self, terms: Mapping[str, Term], step: MicrobatchStep) -> dict[str, Term]:
        """Add a microbatch's terms to the sums. Compare its weights with the counted ones. Return the terms, detached.

        A dummy microbatch adds only the names of its terms.
        """
        # A dummy adds 0, or NaN for a total that is not finite: so is then the gradient.
        if step.is_dummy:
            nothing = {name: Term(term.total.detach().to(self._dtype) * 0.0, 0.0) for name, term in terms.items()}
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
        carrying = self.differentiable
        if weight is not None and len(carrying) > 1:
            raise LossContractError(f"weight= replaces one divisor, but the loss has the terms {carrying}")
        # Differentiable terms come first, then the metrics.
        names = [*carrying, *sorted(self._sums.keys() - self._differentiable)]
        reports = self._gather_reports(names, weight, max_norm)  # [ranks, HEAD_SIZE + 2 * MAX_TERMS]
        end = HEAD_SIZE + 2 * len(names)
        totals, weights = reports[:, HEAD_SIZE:end].sum(0).reshape(2, -1)  # [terms], [terms]
        totals, weights = self.sums_over_ranks(names, totals, weights)
        if weight is not None:
            weights = torch.cat([torch.full_like(weights[:1], weight), weights[1:]])
        quotients = totals / weights
        terms = dict(zip(names, quotients.unbind(), strict=True))
        agree = ~reports[:, FAULT].any()
        if len(reports) > 1:
            agree = agree & (reports[:, NAMES_HASH] == reports[0, NAMES_HASH]).all()
        if len(carrying) == 1:
            loss = terms[carrying[0]]
        else:
            num_carrying = len(carrying)
            has_weight = weights[:num_carrying] > 0
            # NaN without any weight.
            loss = torch.where(has_weight, quotients[:num_carrying], 0.0).sum() / has_weight.any()
            # A total that is not finite and has no weight, and a total without a weight.
            agree = agree & torch.isfinite(totals[:num_carrying]).all() & ~torch.isinf(quotients[:num_carrying]).any()
        announced: dict[str, tuple[float, Tensor]] = {}
        for name, announced_weight in self._divisors.announced.items():
            returned = _returned_weight(name, names, weights)
            announced[name] = announced_weight, returned
            agree = agree & ~_differs(returned, announced_weight)
        divisor = weights[0] if carrying else torch.zeros_like(loss)
        update = Update(
            loss=loss,
            terms=terms,
            weight=divisor,
            finite=torch.isfinite(loss) & agree,
            grad_norm=None,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            num_microbatches=self.num_microbatches,
            reports=reports[:, : HEAD_SIZE + len(carrying)],
            announced=announced,
        )
        if self._device.type == "cpu":
            _raise_breach(update)
        return update, self._divisors.missing_factor(carrying, divisor, weight) if carrying else 0.0

    def _gather_reports(self, names: list[str], weight: float | None, max_norm: float | None) -> Tensor:
        """Return the reports of all ranks, with a hash of everything that must be the same on all."""
        holds_reduction = self._hold_reduction is not _hold_nothing
        settings = f"{self.differentiable} {weight} {max_norm} {self._divisors.announced} {holds_reduction}"
        # Only the CPU compares positions by itself.
        settings += f" {self._wrapper.collectives_digest}{self._ranks.position!r}"
        report = self._report(names, settings)
        return report[None] if self._ranks.is_alone else self._ranks.gather_report(report)

    def sums_over_ranks(self, names: Sequence[str], totals: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of totals and of weights over all ranks, [terms] each, from those that float64 adds."""
        return totals, weights

    def hear_errors(self) -> None:
        """Raise an error that another rank has sent meanwhile, where ranks do not run their microbatches in step."""

    def report(self, update: Update) -> Update:
        """Return the closed update, without the numbers that other code did not tell."""
        return update

    def _report(self, names: list[str], settings: str) -> Tensor:
        """Return [fault, counted, returned, hash of names and settings; totals of terms; their weights; zeros]."""
        if len(names) > MAX_TERMS:
            raise LossContractError(f"the loss returned {len(names)} terms; at most {MAX_TERMS} are supported")
        returned = sum(self._sums[name].weight for name in self._differentiable)
        head = [
            TAKEN if self.is_taken else self._differ,
            self._counted,
            returned,
            float(zlib.crc32("\n".join([*names, settings]).encode())),
        ]
        terms = [self._sums[name] for name in names]
        values = [*head, *map(TOTAL, terms), *map(WEIGHT, terms)]
        num_zeros = 2 * (MAX_TERMS - len(names))
        if self._device.type == "cpu":
            return torch.tensor([*map(float, values), *[0.0] * num_zeros], dtype=self._dtype, device="cpu")
        return F.pad(torch.stack(list(map(self._scalar, values))), (0, num_zeros))

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


def _raise_breach(update: Update) -> None:
    """Raise the problem of an update if its loss breaks the contract, or other code took its gradient."""
    problem = update.problem()
    if isinstance(problem, LossContractError):
        raise problem
    if problem is not None and bool((update.reports[:, FAULT] == TAKEN).any()):
        raise problem


def _returned_weight(name: str, names: list[str], weights: Tensor) -> Tensor:
    """Return the weight of a term, 0 if there is none. A weight without a name belongs to the only term."""
    if name in names:
        return weights[names.index(name)]
    return weights[0] if names and name == PAIR_NAME else weights.new_zeros(())


def _hold_nothing(policy: str) -> None:
    """Let the wrapper reduce with each call."""
