"""verify: is the cut gradient the uncut gradient, on this model, with this loss, on this batch?

A copy of the model in float64, dropout off, runs the batch whole and cut, sample by sample. Where the answers differ,
the cause is looked for and named: a module that mixes samples, a loss that divides, a count that does not fit.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from megabatch.batch import IGNORED_LABEL, Batch, Microbatch, Samples
from megabatch.contract import (
    WEIGHT_TOLERANCE,
    JointLoss,
    LossFunction,
    Term,
    counted_weights,
    differentiable,
    hooks_of,
    terms_of,
)
from megabatch.cut import plan
from megabatch.double import Float64WithoutDropout, float64_copy, in_float64
from megabatch.errors import PlanError
from megabatch.mixing import failing_module, mixing_module, terms_of_routers

# Below this share of the whole gradient a parameter's is nothing but rounding, and its error is measured by the whole.
NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    ok: bool
    worst: float  # largest relative error of a parameter's gradient
    errors: dict[str, float]  # parameter -> ||cut - uncut|| / ||uncut||
    causes: tuple[str, ...]  # in words; empty where nothing is wrong

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT exact"
        return "\n".join([f"{verdict}: worst relative error of a gradient {self.worst:.1e}", *self.causes])


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    micro_batch_size: int = 1,
    tolerance: float = 1e-9,
) -> Verification:
    """Compare the gradient of ``batch`` cut into microbatches with that of the batch whole.

    Runs in this process alone, on a float64 copy that stays in float64 (casts to a lower precision inside the model
    or the loss are undone) and in training mode, with dropout off. ``ok`` means that every parameter's relative error
    is within ``tolerance``, that totals and weights add up over the cut, and that there was something to compare.
    Raises `PlanError` for a model that is sharded or cut into stages and for a `JointLoss`, and `LossContractError` for
    a loss that returns no terms.
    """
    if isinstance(loss_fn, JointLoss):
        raise PlanError(
            "verify was given a JointLoss, which sees all samples at once however they are cut; compare it with the "
            "loss of all representations yourself"
        )
    witness = _Witness(float64_copy(model), loss_fn, batch, micro_batch_size)
    with Float64WithoutDropout():
        whole = witness.measure([witness.everything])
        try:
            cut = witness.measure(witness.microbatches)
        except Exception as error:  # a batch norm of one value, say
            return Verification(False, math.nan, {}, (witness.failure(error),))
        errors = _relative_errors(cut.gradients, whole.gradients)
        worst = _worst(errors)
        causes = tuple(witness.causes(whole, cut, wrong=not worst <= tolerance))
    return Verification(not causes, worst, errors, causes)


@dataclass(frozen=True)
class _Measured:
    gradients: dict[str, Tensor]
    sums: dict[str, Term]


class _Witness:
    """A model, a loss and a batch, and every question that is put to them."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, batch: Batch, micro_batch_size: int) -> None:
        samples = Samples(batch, part=hooks_of(loss_fn).prepare)
        self._collated = Samples(batch)
        if len(samples) < 2:
            raise PlanError(f"verify was given {len(samples)} samples; cutting needs at least 2")
        device = next(model.parameters()).device
        (cut,) = plan(samples.lengths, micro_batch_size=micro_batch_size)
        self.model = model
        self.loss_fn = loss_fn
        self.microbatches = [in_float64(samples.take(rows), device) for rows in cut.microbatches]
        self.everything = in_float64(samples.take(range(len(samples))), device)
        self.rows = len(samples)

    def measure(self, microbatches: list[Microbatch]) -> _Measured:
        """Gradient of the sum of totals over the sum of weights, by plain torch."""
        self.model.zero_grad(set_to_none=True)
        sums: dict[str, Term] = {}
        gradients: dict[str, dict[str, Tensor]] = {}  # of each term's total, since each has its own divisor
        for microbatch in microbatches:
            terms = terms_of(self.loss_fn(self.model, microbatch))
            for name in differentiable(terms):
                total, weight = terms[name]
                _add_gradient(gradients.setdefault(name, {}), self.model, total)
                before = sums.get(name, Term(torch.zeros(()), 0.0))
                sums[name] = Term(before.total + total.detach(), before.weight + weight)
        whole: dict[str, Tensor] = {}
        for name, of_term in gradients.items():
            for parameter, value in of_term.items():
                whole[parameter] = whole.get(parameter, 0.0) + value / max(float(sums[name].weight), 1e-300)
        return _Measured(whole, sums)

    def failure(self, error: Exception) -> str:
        """Why the batch runs whole and not cut."""
        name = failing_module(self.model, self.loss_fn, self.microbatches)
        where = "the loss" if name is None else f"module {name!r} ({type(self.model.get_submodule(name)).__name__})"
        return f"{where} runs on the batch whole and fails on a microbatch of it: {type(error).__name__}: {error}"

    def causes(self, whole: _Measured, cut: _Measured, *, wrong: bool) -> list[str]:
        """Why cutting changes the answer, or why there is no answer, in words."""
        unfit = self._unfit(whole, cut)
        if unfit is not None:
            return [unfit]
        differences = list(self._sums_that_differ(whole, cut))
        mixer = self._mixer() if wrong or differences else None
        found = [mixer] if mixer is not None else differences
        found += [*self._counts_that_differ(), *self._unused_targets()]
        found = found or list(self._share_of_own_loss(whole))
        if wrong and not found:
            found = ["the gradients differ, and neither the modules nor the sums of the loss show why"]
        return found

    def _unfit(self, whole: _Measured, cut: _Measured) -> str | None:
        """Why two gradients would prove nothing."""
        values = [*whole.gradients.values(), *cut.gradients.values()]
        totals = [total for total, _ in (*whole.sums.values(), *cut.sums.values())]
        if not all(bool(torch.isfinite(value).all()) for value in [*values, *totals]):
            return "the loss or its gradient is not finite on this batch; look at its samples and at the loss"
        if not any(bool(value.any()) for value in values):
            return (
                "there is nothing to compare: every gradient is zero; give a batch with targets and an unfrozen model"
            )
        repeated = self.measure([self.everything])
        if _worst(_relative_errors(repeated.gradients, whole.gradients)) > 0:
            return "the same batch gives another gradient the second time: the model or the loss draws random numbers"
        return None

    def _mixer(self) -> str | None:
        if not isinstance(self.everything, Mapping):
            return None
        name = mixing_module(self.model, self.loss_fn, dict(self.everything), self.rows)
        if name is None:
            return None
        return (
            f"module {name!r} ({type(self.model.get_submodule(name)).__name__}) mixes the samples of a microbatch: "
            "what it gives for one sample depends on the others, so cutting must change the answer"
        )

    def _sums_that_differ(self, whole: _Measured, cut: _Measured) -> Iterator[str]:
        parts = len(self.microbatches)
        for name in whole.sums:
            (total, weight), (cut_total, cut_weight) = whole.sums[name], cut.sums[name]
            no_sum = _apart(float(total), float(cut_total))
            of_routers = no_sum and name in terms_of_routers(self.model, self.loss_fn, self.everything)
            if of_routers:
                yield (
                    f"the total of {name!r} has in it a router loss over the batch: a product of means over tokens, "
                    "which every cut changes; give it as a named term with its own weight, and to be exact under every "
                    "cut as experts.sequence_balance"
                )
            if _apart(float(weight), float(cut_weight)):
                yield (
                    f"the weight of {name!r} is no count: {float(weight):.6g} for the batch whole, "
                    f"{float(cut_weight):.6g} added over its {parts} microbatches; it counts microbatches, or padding "
                    "(only labels are padded with -100), and not what is summed: return the number of targets"
                )
            if no_sum and not of_routers:
                yield (
                    f"the total of {name!r} is no sum: {float(total):.6g} for the batch whole, "
                    f"{float(cut_total):.6g} added over its {parts} microbatches; it is divided, perhaps to a mean, "
                    "or couples samples: return the sum"
                )

    def _counts_that_differ(self) -> Iterator[str]:
        weigh = hooks_of(self.loss_fn).weigh
        if weigh is None:
            return
        counted = counted_weights(weigh(self.everything))
        returned = {
            name: float(weight) for name, (_, weight) in terms_of(self.loss_fn(self.model, self.everything)).items()
        }
        for name, weight in counted.items():
            if name in returned and abs(weight - returned[name]) > WEIGHT_TOLERANCE * weight:
                yield f"weigh counts {weight:.10g} for {name!r} but the loss returns the weight {returned[name]:.10g}"

    def _unused_targets(self) -> Iterator[str]:
        """A label at position 0 that is counted but never summed, as after a causal shift."""
        labels = self.everything.get("labels") if isinstance(self.everything, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point() or labels.shape[1] < 2:
            return
        with_first, without = dict(self.everything), dict(self.everything)
        with_first["labels"], without["labels"] = labels.clone(), labels.clone()
        with_first["labels"][:, 0] = labels.clamp(min=0)[:, 0]
        without["labels"][:, 0] = IGNORED_LABEL
        try:
            with torch.no_grad():
                counted, ignored = (terms_of(self.loss_fn(self.model, each)) for each in (with_first, without))
        except Exception:  # a loss of one's own need not know labels that are ignored
            return
        for name in counted:
            if counted[name].total == ignored[name].total and counted[name].weight != ignored[name].weight:
                yield (
                    f"the weight of {name!r} counts the labels at position 0, which its total never uses; "
                    "count labels[:, 1:]"
                )

    def _share_of_own_loss(self, whole: _Measured) -> Iterator[str]:
        """A quotient that is a whole-numbered part of the mean that the model itself computes from the labels."""
        if len(whole.sums) != 1 or not isinstance(self.everything, Mapping) or "labels" not in self.everything:
            return
        collated = in_float64(self._collated.take(range(self.rows)), next(self.model.parameters()).device)
        with torch.no_grad():
            own = getattr(self.model(**collated), "loss", None) if self._takes_labels() else None
        if not isinstance(own, Tensor) or own.numel() != 1:
            return
        ((name, (total, weight)),) = whole.sums.items()
        share = float(own) * float(weight) / float(total) if float(total) else 0.0
        if share > 1.5 and not _apart(share, round(share)):
            yield (
                f"the total of {name!r} over its weight is exactly 1/{round(share)} of the model's own mean loss: "
                "it is divided, perhaps by a number of steps; return the sum, undivided"
            )

    def _takes_labels(self) -> bool:
        return "labels" in inspect.signature(self.model.forward).parameters


def _add_gradient(sums: dict[str, Tensor], model: nn.Module, total: Tensor) -> None:
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    values = cast(
        "tuple[Tensor | None, ...]",
        torch.autograd.grad(total, list(named.values()), retain_graph=True, allow_unused=True),
    )
    for (name, parameter), value in zip(named.items(), values, strict=True):
        sums[name] = sums.get(name, torch.zeros_like(parameter)) + (0.0 if value is None else value)


def _worst(errors: dict[str, float]) -> float:
    values = list(errors.values())
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _relative_errors(cut: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, float]:
    size = float(torch.stack([value.norm() for value in whole.values()]).norm()) if whole else 0.0
    floor = max(NEGLIGIBLE * size, 1e-300)
    return {name: _distance(cut[name], value) / max(float(value.norm()), floor) for name, value in whole.items()}


def _distance(one: Tensor, other: Tensor) -> float:
    return float(cast(Tensor, (one - other).norm()))


def _apart(one: float, other: float) -> bool:
    return abs(one - other) > 1e-9 * max(abs(one), abs(other))
