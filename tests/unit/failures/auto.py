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

from megabatch import GradientAccumulator, JointLoss, MegabatchError, PlanError
from megabatch.autotune import memory
from megabatch.batching.samples import Deferred
from tests.exact.spikes import Spikes
from tests.unit.failures.pipeline import pipeline
from tests.unit.failures.table import SAMPLES, Failure, here, linear, squares, told

PROFILED = (
    "a profiler runs, and memory is measured with torch's own; start it after the bound is chosen, or give "
    "max_microbatch_tokens= or micro_batch_size="
)
MISCOUNTED = (
    "sample 1 of Deferred has 1 tokens, but lengths says 2; give the length that is counted when the sample is loaded, "
    "or measured=False"
)
GIVE_A_BOUND = "give max_microbatch_tokens= or micro_batch_size="
OUT_OF_MEMORY = "(OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.)"
AUTO = f'and max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
NOT_YET = (
    'max_microbatch_tokens is "auto" and the first forward_backward() or tune() chooses the bound, from the '
    "loss and its samples; call one of them before, or give max_microbatch_tokens="
)


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
    gradient = auto(memory_bytes=2**40)
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
    "a plan before the bound is chosen": Failure(PlanError, NOT_YET, lambda: auto().plan(SAMPLES)),
    "a loop before the bound is chosen": Failure(PlanError, NOT_YET, lambda: next(auto().microbatches(SAMPLES))),
    "memory beside a bound": Failure(
        PlanError,
        'memory_bytes is for max_microbatch_tokens="auto", and a bound is given; leave one out',
        lambda: auto(micro_batch_size=1, memory_bytes=1),
    ),
    "memory that is no number": Failure(
        PlanError, "memory_bytes is '20GiB'; expected a positive number", lambda: auto(memory_bytes="20GiB")
    ),
    "a bound for a joint loss": Failure(
        PlanError,
        f"a JointLoss keeps representations of all samples, so that one microbatch does not tell what fits, {AUTO}",
        lambda: auto().forward_backward(SAMPLES, JointLoss(squares, squares)),
    ),
    "no memory": Failure(
        PlanError,
        "one sample of 1 tokens needs 0.00 GiB, and parameters, gradients and states leave 0.00 GiB of the 0.00 GiB "
        "that may be used; give more memory, shorten it, shard the model or recompute activations",
        lambda: auto(memory_bytes=1000).forward_backward(SAMPLES, squares),
    ),
    "a sample that alone does not fit": Failure(
        MegabatchError,
        "this process ran out of memory when it measured a sample of 1 tokens, the longest; shorten it, checkpoint "
        f"activations, or shard the model over more ranks {OUT_OF_MEMORY}",
        lambda: short(0),
    ),
    "samples that do not fit, though they should": Failure(
        MegabatchError,
        "this process ran out of memory when it measured 4 samples of 1 tokens, the longest; give "
        f"max_microbatch_tokens=2 {OUT_OF_MEMORY}",
        lambda: short(4),
    ),
    "a loss that writes to parameters": Failure(
        MegabatchError,
        "the loss wrote to parameter 'bias' while it was measured, which cannot be taken back; make the model anew, "
        f"and {GIVE_A_BOUND}",
        lambda: auto().forward_backward(SAMPLES, writing),
    ),
    "a device that cannot be measured": Failure(
        PlanError,
        f"memory of a device of type 'meta' cannot be measured for \"auto\"; {GIVE_A_BOUND}",
        lambda: auto(linear().to("meta")),
    ),
    "a profiler that runs": Failure(
        PlanError,
        PROFILED,
        profiled,
    ),
    "a longer sample beside gradients": Failure(
        PlanError,
        "a sample of 40 tokens comes in a later call of an update, when there are gradients beside which nothing is "
        "measured, and the bound that was chosen is 7; give the longest sample to the first call or to tune(), "
        "or give max_microbatch_tokens=",
        later,
    ),
    "a model on two devices": Failure(
        PlanError,
        f"the model has parameters on cpu and meta, of which the memory of one is measured, {AUTO}",
        lambda: auto(on_two_devices()),
    ),
    "what does not run with one sample": Failure(
        PlanError,
        "one sample of 1 tokens alone does not run (ValueError: Expected more than 1 value per channel when training, "
        f"got input size torch.Size([1, 1])); mend that, or for what needs several samples {GIVE_A_BOUND}",
        lambda: auto(in_batches()).forward_backward(SAMPLES, squares),
    ),
    "a system that does not tell of a process": Failure(
        PlanError,
        f'this system does not say what memory a process uses, for "auto"; {GIVE_A_BOUND}',
        lambda: untold(memory.resident_bytes),
    ),
    "a system that does not tell what is free": Failure(
        PlanError,
        f'this system does not say what memory is free, for "auto"; {GIVE_A_BOUND}',
        lambda: untold(memory.free_bytes),
    ),
}
IN_A_GROUP = {
    "a bound for a pipeline": Failure(
        PlanError,
        f"a Pipeline runs the microbatches of a call together, so that one does not tell what fits, {AUTO}",
        lambda: auto(pipeline()),
    ),
    "a bound for a static graph": Failure(
        PlanError,
        f"DDP with static_graph=True keeps the graph of its first backward, which would be measured, {AUTO}",
        lambda: auto(DistributedDataParallel(linear(), static_graph=True)),
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


NO_KEY = (
    "one sample of 1 tokens alone does not run (KeyError: 'x'); mend that, or for what needs several samples "
    f"{GIVE_A_BOUND}"
)
JOBS = {  # what each of two ranks is told
    name: (work, [f"PlanError: data rank 1 of 2: {text}", f"PlanError: {text}"])
    for name, work, text in (
        ("a longest sample that cannot be loaded", miscounted, MISCOUNTED),
        ("a profiler that runs on one rank", profiled_on_one, PROFILED),
        ("a loss that fails on one rank", lambda: failing_on_one(lambda model: model), NO_KEY),
        ("a loss that fails on one rank, DDP", lambda: failing_on_one(DistributedDataParallel), NO_KEY),
    )
}
