"""The time of each rank's forwards and backwards, and a warning of a rank that is slow for long.

It measures a rank's own work, as seen from outside of the wrapper: from the first forward to the end of the last
backward, before the wait for what DDP still sends. Nothing waits for a device, and no tensor is touched.
"""

import os
import socket
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from megabatch import Plan
from megabatch.train.callbacks.metrics import at_its_place, predict_seconds
from megabatch.train.context import Callback, RunContext
from megabatch.train.runtime.autograd_hooks import around_backward, in_place_of, now, total_of
from megabatch.train.runtime.ranks import Ranks

WINDOW, SLOW_IN = 10, 8  # updates that are looked back at, and in how many of them a rank is slow that is spoken of
SLOW = 1.3  # times the mean of the ranks, and times what their samples explain
MOST_LINES = 8  # of ranks that are found at once


class Spans:
    """Spans of time on this rank: of the host's clock where that computes, else of the device's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []  # from, to

    def begin(self) -> None:
        """Begin a span, which has no length until it ends."""
        self._spans.append((now(self._device), None))

    def end(self) -> None:
        """End the last span here, unless it ends later."""
        start, end = self._spans[-1]
        if self._is_cuda and end is not None:
            end.record()  # once more, in place of a new event for each microbatch
        else:
            self._spans[-1] = (start, now(self._device))

    def take(self) -> float:
        """Seconds of all spans, which are forgotten. The host has waited for what the device did in them."""
        spans, self._spans = [each for each in self._spans if each[1] is not None], []
        if self._is_cuda:
            return sum(float(start.elapsed_time(end)) for start, end in spans) / 1000
        return sum(end - start for start, end in spans)


class RankTiming(Callback):
    """Measure each rank's own work under DDP, where ranks wait for each other only at the end. Collective."""

    def __init__(self, context: RunContext) -> None:
        self._learner, self._ranks = context.learner, context.ranks
        self._spans, self._loss_fn = Spans(context.ranks.device), context.loss_fn
        self._plan: Plan | None = None  # of the call whose span is the last one
        self._slow_ranks = SlowRanks(context.ranks)

        def timed(model: Any, microbatch: Any, **divisor: Any) -> Any:
            return self._compute_loss(model, microbatch, **divisor)

        context.loss_fn = in_place_of(self._loss_fn, timed)

    def after_update(self, context: RunContext) -> None:
        """Exchange the seconds, add them to the row, and warn of a rank that is slow for long."""
        ranks, seconds = self._ranks, [self._spans.take(), predict_seconds(context.plan)]
        self._plan = None
        numbers = ranks.sum_of_data([number for each in seconds for number in at_its_place(each, ranks)])
        measured, predicted = numbers[: ranks.dp_degree], numbers[ranks.dp_degree :]
        if len(measured) > 1 and all(measured):
            context.row["measured_slowest_over_mean"] = max(measured) * len(measured) / sum(measured)
            context.row["slowest_rank"] = max(range(len(measured)), key=measured.__getitem__)
            self._slow_ranks.add(measured, predicted)
        for line in self._slow_ranks.warnings():
            context.console.warn(line)

    def _compute_loss(self, model: Any, microbatch: Any, **divisor: Any) -> Any:
        """Compute the loss, in a span that ends with its backward."""
        gradient = self._learner.gradient
        if gradient.open_update is None:  # a measurement for the microbatch limit belongs to no update
            return self._loss_fn(model, microbatch, **divisor)
        plan, before = gradient.last_plan, self._plan
        self._plan = plan
        if plan is None or plan is not before or plan.sync != "last":
            self._spans.begin()  # of its own, unless the microbatch before it in its call was not reduced
        returned = self._loss_fn(model, microbatch, **divisor)
        total = total_of(returned)
        if total is not None:
            around_backward(total, do_nothing, self._spans.end)
        return returned


class SlowRanks:
    """Looks back at some updates for ranks that were slow in most of them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._said = ranks, set[int]()
        self._recent: deque[list[float | None]] = deque(maxlen=WINDOW)  # of each rank, where it was slow, how slow

    def add(self, measured: Sequence[float], predicted: Sequence[float]) -> None:
        """Take in the seconds of each rank in an update."""
        self._recent.append(slow_ones(measured, predicted))

    def warnings(self) -> list[str]:
        """Return a line for each rank that is found slow, once. Collective if there is one."""
        columns = [[times for times in of_rank if times is not None] for of_rank in zip(*self._recent, strict=True)]
        slow = [rank for rank, times in enumerate(columns) if len(times) >= SLOW_IN and rank not in self._said]
        if not slow:
            return []
        self._said |= set(slow)
        processes = self._ranks.gather(f"process {os.getpid()} on {socket.gethostname()}")  # all have the same sums
        when = f"in {SLOW_IN} or more of the last {len(self._recent)} updates"
        return [slow_text(rank, processes[rank], fmean(columns[rank]), when) for rank in slow[:MOST_LINES]]


def slow_ones(measured: Sequence[float], predicted: Sequence[float]) -> list[float | None]:
    """Return for each slow rank how many times the mean it took. A rank whose samples explain its time is not slow."""
    mean, explained = fmean(measured), fmean(predicted) or 1.0
    times = [(own / mean, expected / explained) for own, expected in zip(measured, predicted, strict=True)]
    return [own if own > SLOW * max(1.0, expected) else None for own, expected in times]


def slow_text(rank: int, process: str, times: float, when: str) -> str:
    """Return the warning of a slow rank, and where to look."""
    return (
        f"rank {rank} ({process}) takes {times:.1f} times the mean of the ranks in forward and backward, {when}, for "
        "which its samples are no reason; look for other work on its cores, or a device that is hot or shared "
        "(docs/troubleshooting.md)"
    )


def do_nothing() -> None:
    """Note the time when a backward begins."""
