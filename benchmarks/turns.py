"""Several ways to one gradient in one process: how far they are apart, what each takes, in turns, and the result."""

import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import hardware, result

WARMUP = 2
TOLERANCES = {torch.bfloat16: 0.05, torch.float32: 1e-5}  # relative; rounding adds up over layers
Way = Callable[[], None]  # leaves a gradient, or does something to it


def gradients(model: nn.Module) -> list[Tensor]:
    """On the CPU, as a device may have no room for two."""
    return [each.grad.to("cpu", copy=True) for each in model.parameters() if each.grad is not None]


def difference(model: nn.Module, way: Way, expected: list[Tensor]) -> float:
    """Norm of the difference of a way's gradient over the norm of what is expected, a tensor at a time."""
    way()
    apart, whole = 0.0, 0.0
    for parameter, each in zip(model.parameters(), expected, strict=True):
        wanted = each.to(parameter.device, torch.float32, copy=True)
        whole += float(wanted.square().sum(dtype=torch.float64))
        apart += float(wanted.sub_(parameter.grad).square_().sum(dtype=torch.float64))
    return (apart / whole) ** 0.5


def medians(
    ways: Mapping[str, Way], repeats: int, clock: Callable[[], float] = hardware.seconds_now
) -> dict[str, dict[str, Any]]:
    """Milliseconds of each way by a clock of seconds, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(WARMUP + repeats):
        for name in list(ways)[:: -1 if repeat % 2 else 1]:
            start = clock()
            ways[name]()
            times[name].append(1000 * (clock() - start))
    return {
        name: {"ms": round(statistics.median(each[WARMUP:]), 3), "repeats_ms": [round(ms, 3) for ms in each[WARMUP:]]}
        for name, each in times.items()
    }


def write(
    measured: Callable[[], dict[str, Any]], said: Callable[[dict[str, Any]], str], out: Path | None, *, claim: str,
    not_measured: str | None,
) -> None:  # fmt: skip
    """Measure, print, and write it beside what it was measured with; status 1 where gradients disagree."""
    torch.set_num_threads(1)
    made_with = {**result.made_with(["transformers"]), **hardware.facts(), "threads": 1}
    found = {"claim": claim, **made_with, "not_measured": not_measured, **measured()}
    print(said(found), *[not_measured] * bool(not_measured), sep="\n")
    if out is not None:
        print(result.write(out, found))
    if not found["gradients_agree"]:
        sys.exit("the gradients disagree: the times above are of different updates")
