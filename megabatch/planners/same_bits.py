"""`SameBits`: gradients, norms and losses whose bits do not depend on the number of ranks.

A microbatch has the same bits wherever it runs, so two things remain. The cut follows from the update's samples alone:
`fill` cuts the update and finds the same microbatches again in a rank's share. And every sum is exact, so that its
order does not matter. Losses and weights are added in parts of 32 bits. Gradients are added in float64, whose 53 bits
hold sums of float32's 24 unless their exponents are 25 or more apart.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn, optim

from megabatch.batching.packed_row import OneRow
from megabatch.batching.shared_prefix import SharedPrefix
from megabatch.core.call import CallAgreement, MicrobatchPlanner, MicrobatchStep, PreparedBatch
from megabatch.core.contract import WEIGHT_TOLERANCE, LossHooks, Term
from megabatch.core.extension import Extension
from megabatch.core.samples import Batch, Batching, Samples
from megabatch.core.update import MAX_TERMS, OpenUpdate
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, MicrobatchLimit, PlanError
from megabatch.inspection import random_state
from megabatch.planning.balancing import fill
from megabatch.planning.plan import Plan, check_lengths, priced
from megabatch.torch_private.classes import is_dtensor

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
DTYPES = (torch.float32, torch.bfloat16)  # of parameters whose sums float64 holds
# Steps that read one element of a parameter at a time. With bfloat16 a CPU steps the last few elements of a tensor by
# other instructions, which round the products of some of them at other places.
WIDE_ONLY = (optim.SGD, optim.ASGD, optim.RMSprop, optim.Adagrad)
ELEMENTWISE = (
    *WIDE_ONLY, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Rprop, optim.Adadelta,
)  # fmt: skip
GRIDS = (2.0**72, 2.0**40, 2.0**8, 2.0**-24, 2.0**-56, 2.0**-88)  # a sum's parts are multiples of these
WEIGHT_GRID = 2.0**-30  # announced weights are rounded to multiples, which float64 adds exactly up to 2**23


def check_settings(wrapper: Wrapper, batching: Batching, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to add gradients in. Raises `PlanError` if the bits would depend on the number of ranks."""
    ranks, problem = wrapper.ranks, ""
    dtypes = {parameter.dtype for parameter in wrapper.parameters} - set(DTYPES)
    if wrapper.is_pipeline or ranks.num_all > ranks.degree:
        problem = "the model is split over ranks (tp, cp or pp), which changes its sums; use data ranks alone"
    elif isinstance(batching, OneRow | SharedPrefix):
        problem = f"{type(batching).__name__} computes the samples of a rank together; leave batching= out"
    elif accumulate_dtype not in (None, torch.float64):
        problem = f"accumulate_dtype is {accumulate_dtype}, whose sums depend on their order; leave it out"
    elif dtypes:
        problem = f"a parameter is {min(map(str, dtypes))}, whose sums float64 rounds; train in float32 or bfloat16"
    elif any(getattr(module, "sparse", False) is True for model in wrapper.models for module in model.modules()):
        problem = "an embedding has sparse gradients; set sparse=False"
    if problem:
        raise PlanError(f"SameBits and {problem}, or leave SameBits out")
    return torch.float64


def check_optimizer(wrapper: Wrapper, optimizer: torch.optim.Optimizer) -> None:
    """Raise `PlanError` for an optimizer whose step has other bits if it is given other shards."""
    inner: Any = optimizer
    while hasattr(inner, "optimizer"):  # of LowBits and of Accelerate's wrapper
        inner = inner.optimizer
    name, reason = type(inner).__name__, None
    if wrapper.device.type == "cpu" and any(param_group.get("fused") for param_group in inner.param_groups):
        reason = "is fused on a CPU, where its bits depend on the size of a shard; give fused=False"
    elif not any(is_dtensor(parameter) and parameter.placements[-1].is_shard() for parameter in wrapper.parameters):
        return
    elif type(inner) not in ELEMENTWISE:  # a subclass may step otherwise
        reason = "may step a shard to other bits than a whole parameter; use torch.optim.AdamW, or DDP"
    elif type(inner) in WIDE_ONLY and any(parameter.dtype == torch.bfloat16 for parameter in wrapper.parameters):
        reason = "rounds the last elements of a bfloat16 shard in another way; use torch.optim.AdamW, or DDP"
    if reason is not None:
        raise PlanError(f"SameBits and {name} {reason}, or leave SameBits out")


class OptimizerCheck(Extension):
    """Refuses an optimizer whose step would have other bits on another number of ranks.

    Args:
        wrapper: The wrapper of the model.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def reserve_for(self, gradient: Any, optimizer: torch.optim.Optimizer) -> None:
        check_optimizer(self._wrapper, optimizer)


def check_modules(models: Sequence[nn.Module]) -> None:
    """Raise `PlanError` for modules whose outputs depend on which microbatches ran before on the rank."""
    for layer in (module for model in models for module in model.modules() if module.training):
        is_norm = isinstance(layer, nn.SyncBatchNorm) or "SpectralNorm" in type(layer).__name__
        if is_norm or getattr(layer, "track_running_stats", False):
            raise PlanError(
                f"SameBits and {type(layer).__name__} keeps statistics of its own rank's microbatches; call "
                "eval() on it, use another norm, or leave SameBits out"
            )
        # A dropout whose mask follows from the sample alone would be the same on any rank.
        if isinstance(layer, DROPOUTS) and layer.p > 0:
            raise PlanError(
                f"SameBits and {type(layer).__name__}(p={layer.p:g}) draws its mask by rank, not by sample; set p "
                "to 0, call eval() on it, or leave SameBits out"
            )


@dataclass(frozen=True)
class SameBitsPlanner(MicrobatchPlanner):
    """Splits a rank's samples as if it held the whole update, in ascending order of length."""

    def plan(self, samples: Samples) -> Plan:
        lengths = samples.lengths
        check_lengths(lengths, self.max_microbatch_tokens)
        if samples.kinds() is not None:
            raise PlanError(
                "SameBits and samples differ in their keys or in sizes that are not padded, and the sampler cuts "
                "by length alone; give all samples the same keys and sizes, or leave SameBits out"
            )
        sync, reason = self.choice
        plan = Plan(tuple(self._fill(lengths)), tuple(lengths), tuple(range(len(lengths))), sync, reason)
        return plan if self.cost is None else priced(plan, self.cost)

    def _fill(self, lengths: Sequence[int]) -> list[tuple[int, ...]]:
        return fill(lengths, max_rows=self.micro_batch_size, max_tokens=self.max_microbatch_tokens)

    def lowered(self, bound: MicrobatchLimit | None) -> MicrobatchPlanner:
        if bound is None:
            return self
        raise PlanError(
            f"SameBits and the limit was lowered to {bound.samples} samples and {bound.tokens} tokens; another "
            "cut has other bits: give the lower limit to the accumulator and to the sampler, and start again"
        )

    def check_announced(self, weights: dict[str, float]) -> None:
        if not all(weight.is_integer() for weight in weights.values()):
            self.check_goes_with(f"open() was told weights that are no whole numbers, {weights}")

    def check_goes_with(self, feature: str) -> None:
        raise PlanError(f"SameBits and {feature}; leave one of the two out")

    def prepare(self, batch: Batch, hooks: LossHooks, user_plan: Plan | None = None) -> PreparedBatch:
        """Prepare a call. Weights that are no whole numbers are rounded, so that their sum is exact."""
        prepared = super().prepare(batch, hooks, user_plan)
        cut = list(filter(None, prepared.plan.microbatches))
        if user_plan is not None and cut != self._fill(prepared.plan.lengths):
            raise PlanError("SameBits and plan= is not the cut of these samples; leave plan= out")
        # The divisor is a sum over ranks too, and must not depend on its order.
        weights = [{name: _rounded(weight) for name, weight in weights.items()} for weights in prepared.weights]
        for before, after in zip(prepared.weights, weights, strict=True):
            for name, weight in before.items():
                if abs(after[name] - weight) > WEIGHT_TOLERANCE / 2 * weight:
                    raise PlanError(
                        f"SameBits and a sample has the weight {weight:.3g}, which no multiple of 2**-30 is near "
                        "enough; multiply the weights and totals of all samples, or leave SameBits out"
                    )
        sums = {name: sum(weight[name] for weight in weights) for name in prepared.weight_sums}
        return replace(prepared, weights=tuple(weights), weight_sums=sums)

    def check_call(self, wrapper: Wrapper, plan: Plan, loss_fn: object) -> None:
        """Compare the shares of all ranks, and look for modules that keep statistics. Collective.

        Raises `PlanError` on all ranks if they do not hold whole microbatches of the update, and for a `JointLoss`.
        """
        if hasattr(loss_fn, "run_call"):
            raise PlanError(
                "SameBits and a JointLoss, which couples the samples of a rank in their order; leave one of the two out"
            )
        check_modules(wrapper.models)
        if wrapper.ranks.is_alone:
            return
        limits = (self.micro_batch_size, self.max_microbatch_tokens)
        local_microbatches = [tuple(plan.lengths_of(rows)) for rows in plan.microbatches]
        # Lengths tell the microbatches apart; samples of equal length are interchangeable for the cut.
        reports: list[tuple[object, list[tuple[int, ...]]]] = wrapper.ranks.exchange_objects(
            (limits, local_microbatches)
        )
        # The order of ranks and microbatches is free, so both sides are sorted.
        microbatches = sorted(microbatch for _, rank_microbatches in reports for microbatch in rank_microbatches)
        lengths = sorted(length for microbatch in microbatches for length in microbatch)
        expected = [tuple(lengths[item] for item in group) for group in self._fill(lengths)]
        if microbatches != sorted(expected) or any(rank_limits != limits for rank_limits, _ in reports):
            raise PlanError(
                f"SameBits and the ranks hold {len(microbatches)} microbatches that are not the {len(expected)} of the "
                "whole update; deal samples with UpdateSampler(same_bits=True), the accumulator's limit and the "
                "lengths that it measures"
            )


class SameBitsUpdate(OpenUpdate):
    """Adds totals and weights exactly. Refuses random numbers, which would depend on the number of ranks."""

    keeps_cut = "SameBits refuses another cut, which has other bits"

    def __init__(self, wrapper: Wrapper) -> None:
        super().__init__(wrapper)
        self._parts: dict[str, Tensor] = {}  # by term: of the total and of the weight, [2, len(GRIDS)]
        self._random = random_state.note(self._device)

    def count_call(self, call: CallAgreement) -> None:
        super().count_call(call)
        self._random = random_state.note(self._device)

    def add(self, terms: Mapping[str, Term], step: MicrobatchStep) -> dict[str, Term]:
        if not self._random.same_as(random_state.note(self._device)):
            raise MegabatchError(
                "SameBits and the loss draws random numbers, which differ by the number of ranks; set dropout to "
                "0, or leave SameBits out"
            )
        # The sums of the parent stay, for messages; these parts give the update's numbers.
        detached = super().add(terms, step)
        for name, (total, weight) in {} if step.is_dummy else detached.items():
            parts = parts_of(torch.stack([self._scalar(total), self._scalar(weight)]))
            self._parts[name] = self._parts[name] + parts if name in self._parts else parts
        return detached

    def sums_over_ranks(
        self, names: Sequence[str], totals: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the totals and weights of all ranks, exactly. Collective; the message has a fixed size."""
        # A rank without a term sends zeros, so that all messages have one shape.
        local_parts = torch.zeros(MAX_TERMS, 2, len(GRIDS), dtype=self._dtype, device=self._device)
        for index, name in enumerate(names):
            if name in self._parts:
                local_parts[index] = self._parts[name]
        # This sum is exact, whatever the order.
        parts = self._ranks.gather_on_device(local_parts.flatten()).sum(0).view_as(local_parts)
        totals, weights = parts[: len(names)].sum(-1).unbind(1)
        return totals, weights


def parts_of(values: Tensor) -> Tensor:
    """Split float64 numbers into parts whose sums are exact: [n] -> [n, len(GRIDS)], which add up to the number.

    Each part is a multiple of its grid and at most half of the next larger one, 2**31 of its own. So float64 adds 2**21
    of them without rounding. What is left below the finest grid is dropped. A number that is not finite stays so.
    """
    grids = torch.tensor(GRIDS, dtype=values.dtype).to(values.device, non_blocking=True)
    rounded = torch.round(values[:, None] / grids) * grids  # [n, len(GRIDS)]
    return torch.cat([rounded[:, :1], rounded[:, 1:] - rounded[:, :-1]], dim=1)


def _rounded(weight: float) -> float:
    return round(weight / WEIGHT_GRID) * WEIGHT_GRID if math.isfinite(weight) else weight
