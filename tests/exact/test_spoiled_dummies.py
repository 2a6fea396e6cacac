"""A rank without samples repeats one whose loss is not finite: the update says so, and the next repeats another."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, loss
from tests.exact.launch import of_ranks

SPOILS = 1  # the rank with the sample
Sample = dict[str, Tensor]


def samples_of(rank: int, seed: int, *, spoils: bool = False) -> list[Sample]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    rows = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return [{"x": row, "spoils": torch.tensor(spoils)} for row in rows]


class Squares:
    """Squares of outputs, which are infinite for a sample that spoils, once ``is_on``."""

    def __init__(self) -> None:
        self.is_on = True

    def total(self, model: Any, samples: Sample) -> Tensor:
        spoiled = torch.where(samples["spoils"], math.inf if self.is_on else 1.0, 1.0)
        return (model(samples["x"]).square().sum(-1) * spoiled).sum()

    def late(self, model: Any, microbatch: Sample) -> tuple[Tensor, int]:
        return self.total(model, microbatch), len(microbatch["x"])


def other_loss(model: Any, microbatch: Sample) -> tuple[Tensor, int]:
    return model(microbatch["x"]).abs().sum(), len(microbatch["x"])


def counted(function: Any) -> Any:
    """Return the loss with its weight counted from the data."""
    return loss(weigh=lambda microbatch: len(microbatch["x"]))(lambda model, microbatch: function(model, microbatch))


def new_model(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, dtype=torch.float64)
    return DistributedDataParallel(model) if wrapper == "ddp" else model


def error(model: nn.Module, calls: list[tuple[Any, list[Sample]]]) -> float:
    """The largest difference from the gradient of all samples, by plain torch."""
    plain = new_model("plain")
    total = torch.zeros((), dtype=torch.float64)
    for loss_fn, samples in calls:
        batch = {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}
        total = total + loss_fn(plain, batch)[0]
    (total / sum(len(samples) for _, samples in calls)).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    differences: list[float] = []
    for accumulated, expected in pairs:
        assert accumulated.grad is not None
        assert expected.grad is not None
        differences.append(float((accumulated.grad - expected.grad).abs().max()))
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def run_job(name: str) -> list[tuple[bool, str, float]]:
    """The job "wrapper:weighed:case:world:": of each update after the first, its verdict and its error."""
    wrapper, kind, case, *_ = name.split(":")
    rank, world = dist.get_rank(), dist.get_world_size()
    squares = Squares()
    loss_fn, other = squares.late, other_loss
    if kind == "weighed":
        loss_fn, other = counted(squares.late), counted(other_loss)
    model = new_model(wrapper)
    gradient = GradientAccumulator(model, micro_batch_size=2)
    squares.is_on = case == "at once"
    spoiled = samples_of(rank, 0, spoils=rank == SPOILS)
    if case == "at once":
        gradient.forward_backward(samples_of(rank, 1), other)
    gradient.forward_backward(spoiled, loss_fn)
    assert bool(gradient.finalize().finite) == (case == "later")
    squares.is_on = True
    found = []
    for seed in (2, 3):
        calls = []
        if case == "at once":
            gradient.forward_backward(samples_of(rank, seed), other)
            calls = [(other_loss, [each for index in range(world) for each in samples_of(index, seed)])]
        gradient.forward_backward([] if rank == SPOILS else samples_of(rank, seed), loss_fn)
        update = gradient.finalize()
        others = [each for index in range(world) if index != SPOILS for each in samples_of(index, seed)]
        found.append((bool(update.finite), str(update.problem()), error(model, [*calls, (squares.late, others)])))
    return found


JOBS = [f"{wrapper}:{kind}:{case}:{world}:"
        for wrapper in ("plain", "ddp") for kind in ("weighed", "late") for case in ("at once", "later")
        for world in (2, 3)]  # fmt: skip
results = of_ranks("tests.exact.test_spoiled_dummies:run_job", JOBS)


@pytest.mark.parametrize("job", JOBS)
def test_no_update_is_finite_with_a_gradient_that_is_not(results, job: str) -> None:
    for first, second in results(job):
        if "later" in job:
            assert tuple(first[:2]) == (False, f"the loss is not finite on data rank {SPOILS} of {job.split(':')[3]}")
        else:
            assert first[0]
            assert first[2] <= 1e-12
        assert second[0]
        assert second[2] <= 1e-12
