"""Bounds that cannot be chosen."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from megabatch import GradientAccumulator, JointLoss, MegabatchError
from megabatch.autotune import memory
from megabatch.batching.deferred import Deferred
from megabatch.planners import Auto
from tests.exact.spikes import Spikes
from tests.unit.failures.pipeline import pipeline
from tests.unit.failures.table import SAMPLES, Failure, here, linear, squares, told

PROFILED = "a profiler runs"
MISCOUNTED = "sample 1 of … has 1 tokens … says 2"
OUT_OF_MEMORY = "OutOfMemoryError"
AUTO = 'max_microbatch_tokens … "auto"'
NOT_YET = 'max_microbatch_tokens … "auto" … forward_backward() … tune()'


def auto(model: nn.Module | None = None, **settings: Any) -> GradientAccumulator:
    return GradientAccumulator(linear() if model is None else model, **settings)


def writing(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    with torch.no_grad():
        model.bias.add_(1)
    return squares(model, microbatch)


def short(forward: int) -> None:
    """Memory runs out in a forward, counted from the first that is measured."""
    model = linear()
    Spikes(model, ("",)).set({forward: ("forward", 0)})
    auto(model).forward_backward(SAMPLES, squares)


def profiled() -> None:
    with profile():
        auto().forward_backward(SAMPLES, squares)


def later() -> None:
    """A longer sample where there are gradients already."""
    gradient = auto(planner=Auto(memory_bytes=2**40))
    for length in (4, 40):
        gradient.forward_backward([{"x": torch.ones(length, 1, dtype=torch.float64)}], squares)


def on_two_devices() -> nn.Module:
    return nn.Sequential(linear(), linear().to("meta"))


def in_batches() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()


def untold(ask: Callable[[], float]) -> None:
    """On a system that has no such files."""
    with patch.object(memory, "PROC", Path("nowhere")):
        ask()


FAILURES = {
    "a plan before the bound is chosen": Failure(NOT_YET, lambda: auto().plan(SAMPLES)),
    "memory beside a bound": Failure(
        "planner= and micro_batch_size=", lambda: auto(micro_batch_size=1, planner=Auto(memory_bytes=1))
    ),
    "memory that is no number": Failure("memory_bytes … '20GiB'", lambda: Auto(memory_bytes="20GiB")),
    "a bound for a joint loss": Failure(
        f"JointLoss … {AUTO}", lambda: auto().forward_backward(SAMPLES, JointLoss(squares, squares))
    ),
    "no memory": Failure(
        "of 1 tokens … needs 0.00 GiB … leave 0.00 GiB … the 0.00 GiB",
        lambda: auto(planner=Auto(memory_bytes=1000)).forward_backward(SAMPLES, squares),
    ),
    "a sample that alone does not fit": Failure("of 1 tokens", lambda: short(0), MegabatchError),
    "a loss that writes to parameters": Failure(
        "'bias'", lambda: auto().forward_backward(SAMPLES, writing), MegabatchError
    ),
    "a device that cannot be measured": Failure("'meta' … \"auto\"", lambda: auto(linear().to("meta"))),
    "a profiler that runs": Failure(PROFILED, profiled),
    "a longer sample beside gradients": Failure("of 40 tokens … is 7", later),
    "a model on two devices": Failure(f"{AUTO}", lambda: auto(on_two_devices())),
    "what does not run with one sample": Failure(
        "of 1 tokens … ValueError … than 1 value … torch.Size … [1, 1]",
        lambda: auto(in_batches()).forward_backward(SAMPLES, squares),
    ),
    "a system that does not tell of a process": Failure('"auto"', lambda: untold(memory.resident_bytes)),
    "a system that does not tell what is free": Failure('"auto"', lambda: untold(memory.free_bytes)),
}
IN_A_GROUP = {
    "a bound for a pipeline": Failure(f"{AUTO}", lambda: auto(pipeline())),
    "a bound for a static graph": Failure(
        f"DDP … static_graph=True … {AUTO}", lambda: auto(DistributedDataParallel(linear(), static_graph=True))
    ),
}


def miscounted() -> str:
    """The longest sample, which one rank alone has, is not as long as was told."""
    batch = Deferred(SAMPLES.__getitem__, [1, here(2, 1), 1, 1])
    return told(lambda: auto(DistributedDataParallel(linear())).forward_backward(batch, squares))


def profiled_on_one() -> str:
    with here(profile, contextlib.nullcontext)():
        return told(lambda: auto().forward_backward(SAMPLES, squares))


def failing_on_one(wrap: Callable[[nn.Module], nn.Module]) -> str:
    def failing(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        return squares(model, here({}, microbatch))

    return told(lambda: auto(wrap(linear())).forward_backward(SAMPLES, failing))


NO_KEY = "of 1 tokens … KeyError … 'x'"
JOBS = {  # what each of two ranks is told
    name: (work, [f"PlanError: data rank 1 of 2: {text}", f"PlanError: {text}"])
    for name, work, text in (
        ("a longest sample that cannot be loaded", miscounted, MISCOUNTED),
        ("a profiler that runs on one rank", profiled_on_one, PROFILED),
        ("a loss that fails on one rank", lambda: failing_on_one(lambda model: model), NO_KEY),
        ("a loss that fails on one rank, DDP", lambda: failing_on_one(DistributedDataParallel), NO_KEY),
    )
}
