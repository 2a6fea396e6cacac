"""Errors for what would give other bits on another number of ranks."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megabatch import CostModel, GradientAccumulator, JointLoss, Learner, UpdateSampler, loss
from megabatch.batching.packed_row import OneRow
from megabatch.errors import MicrobatchLimit
from megabatch.planners import Auto, Rows, SameBits
from tests.unit.failures.table import Failure


def made(model: nn.Module | None = None, rows: int = 2, **settings: Any) -> GradientAccumulator:
    return GradientAccumulator(nn.Linear(2, 2) if model is None else model, planner=SameBits(Rows(rows)), **settings)


def sampler(**settings: Any) -> UpdateSampler:
    return UpdateSampler([2, 4], global_batch_size=2, **settings)


def of_an_accumulator(call: Callable[[GradientAccumulator], object]) -> Callable[[], object]:
    return lambda: call(made())


def step_fused(gradient: GradientAccumulator) -> None:
    Learner(gradient.model, torch.optim.AdamW(gradient.model.parameters(), fused=True), gradient)


def run(model: nn.Module) -> None:
    add(made(model), torch.ones(3, 2))


def add(gradient: GradientAccumulator, x: torch.Tensor) -> None:
    gradient.forward_backward({"x": x}, lambda model, each: (model(each["x"]).sum(), len(each["x"])))


def weigh_little() -> None:
    announced = loss(weigh=lambda each: 1e-4)(lambda model, each: (model(each["x"]).sum(), 1e-4))
    made().forward_backward({"x": torch.ones(3, 2)}, announced)


def couple(gradient: GradientAccumulator) -> None:
    joint = JointLoss(lambda model, batch: model(batch["x"]), lambda x: (x.sum(), 3))
    gradient.forward_backward({"x": torch.ones(3, 2)}, joint)


def enter_microbatch(gradient: GradientAccumulator) -> None:
    with gradient.microbatch(0, of=1):
        pass


def give_a_plan(gradient: GradientAccumulator) -> None:
    batch = {"x": torch.ones(3, 2)}
    other = made(rows=1).plan(batch)
    gradient.forward_backward(batch, lambda model, each: (model(each["x"]).sum(), len(each["x"])), plan=other)


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "same_bits of float64": ("torch.float64", lambda: made(nn.Linear(2, 2).double())),
    "same_bits in float32": (
        "accumulate_dtype is torch.float32", lambda: made(accumulate_dtype=torch.float32),
    ),
    "same_bits of a row": ("OneRow", lambda: made(batching=OneRow())),
    "same_bits of sparse gradients": (
        "sparse gradients", lambda: made(nn.Embedding(4, 4, sparse=True)),
    ),
    "same_bits of a fused optimizer": ("AdamW is fused on a CPU", of_an_accumulator(step_fused)),
    "same_bits of a dropout": (
        "Dropout(p=0.5) draws its mask", lambda: run(nn.Sequential(nn.Linear(2, 2), nn.Dropout())),
    ),
    "same_bits of running statistics": (
        "BatchNorm1d keeps statistics", lambda: run(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    ),
    "same_bits of spectral norms": (
        "_SpectralNorm keeps statistics", lambda: run(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))),
    ),
    "same_bits of small weights": ("the weight 0.0001, which no multiple", weigh_little),
    "same_bits with another plan": ("plan=", of_an_accumulator(give_a_plan)),
    "same_bits of a JointLoss": ("JointLoss", of_an_accumulator(couple)),
    "same_bits in a loop of one's own": ("microbatch()", of_an_accumulator(enter_microbatch)),
    "same_bits and a lower limit": (
        "the limit was lowered to 1 samples", of_an_accumulator(lambda each: each.lower_limit(MicrobatchLimit(1, 9))),
    ),
}  # fmt: skip
FAILURES = {name: Failure(f"SameBits and … {seen}", each) for name, (seen, each) in REFUSED.items()}
FAILURES |= {
    "same_bits of a measured limit": Failure(
        "SameBits has the limit Auto … Rows(...) or Tokens(...)",
        lambda: SameBits(Auto()),  # pyright: ignore[reportArgumentType]
    ),
    "an argument of earlier versions": Failure(
        "same_bits= is no argument … give planner=SameBits(",
        lambda: GradientAccumulator(nn.Linear(2, 2), micro_batch_size=2, same_bits=True),
    ),
    "speeds without a limit": Failure("dealt single samples", lambda: sampler(speeds=[1.0], dp_rank=0, dp_degree=1)),
    "speeds that are one number": Failure(
        "speeds is 1.0 … one number for each", lambda: sampler(speeds=1.0, micro_batch_size=2, dp_rank=0, dp_degree=1)
    ),
    "a cost that is no number": Failure(
        "cost has seconds_per_token=nan … finite",
        lambda: sampler(cost=CostModel(seconds_per_token=math.nan), dp_rank=0, dp_degree=1),
    ),
    "speeds of other ranks": Failure(
        "speeds has 2 numbers for 1 ranks",
        lambda: sampler(speeds=[1.0, 1.0], micro_batch_size=2, dp_rank=0, dp_degree=1),
    ),
    "a sampler with same_bits alone": Failure("neither of micro_batch_size", lambda: sampler(same_bits=True)),
    "a sampler of a measured limit": Failure(
        "max_microbatch_tokens is 'auto' … whole number",
        lambda: sampler(same_bits=True, max_microbatch_tokens="auto"),  # pyright: ignore[reportArgumentType]
    ),
    "a sampler of a longer sample": Failure(
        "sample 1 has 4 tokens", lambda: sampler(same_bits=True, max_microbatch_tokens=3)
    ),
}
