"""Stragglers: what each rank's forwards and backwards of an update have taken, and a rank that is slow for long.

Measured is a rank's own work, as far as that can be seen from outside of the wrapper: from the first forward to the end
of the last backward, before the wait for what DDP still sends. Nothing waits for a device, and no tensor is touched.
"""

import os
import socket
from collections import deque
from statistics import fmean
from typing import Any

import torch

from megabatch import JointLoss, Learner, Plan
from megabatch.train.callbacks.autograd_hooks import around_backward, in_place_of, now, total_of
from megabatch.train.callbacks.metrics import Sums
from megabatch.train.model.wrap import Wrapper
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
        """A span begins, and has no length until it ends."""
        self._spans.append((now(self._device), None))

    def end(self) -> None:
        """The last span ends here, if it does not end later."""
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


class Work:
    """Measures this rank's own work in each update, where ranks do not wait for each other inside of it."""

    def __init__(self, learner: Learner, ranks: Ranks, wrapper: Wrapper) -> None:
        self._learner, self._spans = learner, Spans(ranks.device)
        self._is_enabled = ranks.size > 1 and wrapper.name == "ddp" and ranks.layout.pp == 1
        self._plan: Plan | None = None  # of the call whose span is the last one

    def watching(self, loss_fn: Any) -> Any:
        """The same loss, by which it is seen when forwards begin and backwards end."""
        if not self._is_enabled or isinstance(loss_fn, JointLoss):
            return loss_fn

        def watched(model: Any, microbatch: Any) -> Any:
            if self._learner.gradient.open_update is None:  # what is measured to choose a bound is in no update
                return loss_fn(model, microbatch)
            self._begin()
            returned = loss_fn(model, microbatch)
            total = total_of(returned)
            if total is not None:
                around_backward(total, nothing, self._spans.end)
            return returned

        return in_place_of(loss_fn, watched)

    def take(self) -> float | None:
        """Seconds of the update that has ended; None where they are not measured."""
        seconds, self._plan = self._spans.take(), None
        return seconds if self._is_enabled else None

    def _begin(self) -> None:
        """A forward begins: a span of its own, unless the microbatch before it in its call was not reduced."""
        plan, before = self._learner.gradient.last_plan, self._plan
        self._plan = plan
        if plan is None or plan is not before or plan.sync != "last":
            self._spans.begin()


class Stragglers:
    """Looks back at some updates for ranks that were slow in most of them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._said = ranks, set[int]()
        self._recent: deque[list[float | None]] = deque(maxlen=WINDOW)  # of each rank, where it was slow, how slow

    def add(self, sums: Sums) -> None:
        """Take in an update, if it was measured."""
        if len(sums.measured) > 1 and all(sums.measured):
            self._recent.append(slow_ones(sums))

    def words(self) -> list[str]:
        """What is to be said after an update: of each rank once. Collective, where there is something."""
        columns = [[times for times in of_rank if times is not None] for of_rank in zip(*self._recent, strict=True)]
        slow = [rank for rank, times in enumerate(columns) if len(times) >= SLOW_IN and rank not in self._said]
        if not slow:
            return []
        self._said |= set(slow)
        processes = self._ranks.gather(f"process {os.getpid()} on {socket.gethostname()}")  # all have the same sums
        when = f"in {SLOW_IN} or more of the last {len(self._recent)} updates"
        return [slow_text(rank, processes[rank], fmean(columns[rank]), when) for rank in slow[:MOST_LINES]]


def slow_ones(sums: Sums) -> list[float | None]:
    """Of each rank how many times the mean it took, where that is slow; more than its samples explain."""
    mean, explained = fmean(sums.measured), fmean(sums.predicted) or 1.0
    times = [(own / mean, predicted / explained) for own, predicted in zip(sums.measured, sums.predicted, strict=True)]
    return [own if own > SLOW * max(1.0, predicted) else None for own, predicted in times]


def slow_text(rank: int, process: str, times: float, when: str) -> str:
    """What is said of a rank that is slow, and where to look."""
    return (
        f"rank {rank} ({process}) takes {times:.1f} times the mean of the ranks in forward and backward, {when}, for "
        "which its samples are no reason; look for other work on its cores, or a device that is hot or shared "
        "(docs/troubleshooting.md)"
    )


def nothing() -> None:
    """Done when a backward begins."""
