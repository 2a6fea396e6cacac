"""Times of an update: the timeline of one, ranks that are slow for long, and the traces of a profiler.

`Timeline` and `RankTiming` see forwards and backwards from outside of the wrapper, before the wait for what DDP still
sends. Times are of the host where it computes, else events on the stream of the device that does: nothing waits for the
device inside the update, and no tensor is touched.
"""

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.profiler import ProfilerActivity, profile

from megabatch import CostModel, Plan
from megabatch.train.context import Callback, Callbacks, ForwardBackward, RunContext
from megabatch.train.data.updates import Updates
from megabatch.train.records.metrics import at_its_place, predict_seconds
from megabatch.train.runtime.files import TIMELINE, JsonlFile, check_own_path, replace_text
from megabatch.train.runtime.plugins import in_place_of
from megabatch.train.runtime.ranks import Ranks

# The first two updates allocate optimizer states and measure memory.
RECORDED = 3
# Ranks and microbatches that are told apart.
MOST_RANKS, MOST_MICROBATCHES = 64, 256
IDLE, FORWARD, BACKWARD, REDUCE, STEP = "idle", "forward", "backward", "reduce", "step"
# REST stands for microbatches beyond those that are told apart.
DUMMY, REST, END = "dummy microbatch", "rest", "end"

# A rank is slow that was slow in so many of the last updates.
WINDOW, SLOW_IN = 10, 8
# Factor of the mean of ranks, and of what their samples explain.
SLOW = 1.3
# Lines of ranks that are found at once.
MOST_LINES = 8

# Updates of a start whose reading is timed.
LOOKED_AT = 5
# Share of their time, and seconds of each, above which a run warns.
MUCH_READING, LEAST_READING = 0.05, 0.01

# Operations in a profiler's table, the longest first.
NUM_OPERATIONS = 30


def now(device: torch.device) -> Any:
    """Return the host's time, or an event on the GPU's stream. Nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def call_around_backward(returned: Any, begins: Callable[[], object] | None, ends: Callable[[], object]) -> None:
    """Call these when the backward of a loss's result begins and when it ends."""
    total = total_of(returned)
    if total is None:
        return

    def begin(_: Tensor) -> None:
        if begins is not None:
            begins()
        # Before what a wrapper asks for later.
        cast(Any, Variable)._execution_engine.queue_callback(ends)

    total.register_hook(begin)


def total_of(returned: Any) -> Tensor | None:
    """Return the first total with a gradient of a loss's result, or None. The library refuses a wrong result."""
    pairs = list(cast(Mapping[str, Any], returned).values()) if isinstance(returned, Mapping) else [returned]
    totals = [cast(Sequence[Any], pair)[0] for pair in pairs if isinstance(pair, tuple | list) and pair]
    return next((total for total in totals if isinstance(total, Tensor) and total.requires_grad), None)


class Timeline(Callback):
    """Record the third update of a start in timeline.jsonl, and leave. Ranks meet before it.

    It records no pipeline: its stages go forward and backward by a schedule of their own.
    """

    def __init__(self, context: RunContext) -> None:
        self._file = context.open_log(TIMELINE)
        self._num_updates = 0

    def before_update(self, context: RunContext) -> None:
        """Count updates, and hand over to a `Recording` of the third."""
        self._num_updates += 1
        if self._num_updates == RECORDED:
            recording = Recording(context, self._file)
            context.callbacks = Callbacks(
                [recording if callback is self else callback for callback in context.callbacks.all]
            )


class Recording(Callback):
    """Mark what begins when in one update. A span lasts until the next mark."""

    def __init__(self, context: RunContext, file: JsonlFile) -> None:
        context.ranks.barrier()
        self._file, self._learner, self._loss_fn = file, context.learner, context.loss_fn
        self._device, self._num_microbatches = context.ranks.device, 0
        # Names and beginnings of spans.
        self._marks: list[tuple[str, Any]] = []
        optimizer = context.learner.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(self._marking(STEP)),
            optimizer.register_step_post_hook(self._marking(END)),
        ]
        context.loss_fn = in_place_of(self._loss_fn, self._compute_loss)
        self._mark(IDLE)

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Mark what comes after the last backward."""
        forward_backward(batch)
        self._mark(REDUCE)

    def after_update(self, context: RunContext) -> None:
        """Write the line, unless the update was begun again or not stepped. Collective."""
        context.loss_fn, context.callbacks = self._loss_fn, context.callbacks.without(self)
        for hook in self._hooks:
            hook.remove()
        ranks, plan = context.ranks, context.plan
        spans = self._spans(plan, ranks) if ranks.rank < MOST_RANKS else None
        announced = [span for span in ranks.gather(spans) if span is not None]
        if context.values["finite"] and "skipped_samples" not in context.row:
            row = {"step": context.step, "device": ranks.device.type, "num_ranks": ranks.size, "sync": plan.sync}
            self._file.append({**row, "ranks": announced})

    def _mark(self, kind: str) -> None:
        """Mark that something begins now: on a GPU, when it gets to what was asked of it so far."""
        self._marks.append((kind, now(self._device)))

    def _marking(self, kind: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            self._mark(kind)

        return hook

    def _compute_loss(self, model: Any, microbatch: Any, **divisor: Any) -> Any:
        """Compute the loss, and mark when it is computed and when its backward begins and ends."""
        self._num_microbatches += 1
        if self._num_microbatches > MOST_MICROBATCHES:
            if self._num_microbatches == MOST_MICROBATCHES + 1:
                self._mark(REST)
            return self._loss_fn(model, microbatch, **divisor)
        forward, backward = (DUMMY, DUMMY) if self._learner.gradient.is_counting is False else (FORWARD, BACKWARD)
        self._mark(forward)
        returned = self._loss_fn(model, microbatch, **divisor)
        call_around_backward(returned, partial(self._mark, backward), partial(self._mark, IDLE))
        return returned

    def _spans(self, plan: Plan, ranks: Ranks) -> dict[str, Any]:
        """Return the kinds, and milliseconds at which each begins and the last one ends. Waits for the device."""
        kinds, times = [kind for kind, _ in self._marks[:-1]], [mark for _, mark in self._marks]
        if self._device.type == "cuda":
            times[-1].synchronize()
            starts_ms = [float(times[0].elapsed_time(time_)) for time_ in times]
        else:
            starts_ms = [1000 * (time_ - times[0]) for time_ in times]
        if ranks.size > 1:
            kinds = name_reductions(kinds, with_each=plan.sync != "last")
        return {"kinds": kinds, "ms": [round(start, 4) for start in starts_ms]}


def name_reductions(kinds: Sequence[str], *, with_each: bool) -> list[str]:
    """Return the kinds, with the wait after the last backward, or after each, named a reduction."""
    named = list(kinds)
    for place, (before, kind) in enumerate(pairwise(kinds), start=1):
        is_last = kinds[place + 1 : place + 2] == [REDUCE]
        if kind == IDLE and before in (BACKWARD, DUMMY) and (with_each or is_last):
            named[place] = REDUCE
    return named


class LoadingCheck(Callback):
    """Say once, after the first updates of a start, that reading samples takes time that other processes can hide."""

    def __init__(self, updates: Updates) -> None:
        self._most_workers, self._num_updates = updates.max_workers, 0
        self._read = self._all = 0.0

    def after_update(self, context: RunContext) -> None:
        """Add up the seconds, but for those of the first update, which also makes what stays; then leave."""
        self._num_updates += 1
        if self._num_updates > 1:
            self._read += context.reading_seconds
            self._all += time.perf_counter() - context.started
        if self._num_updates < LOOKED_AT:
            return
        context.callbacks = context.callbacks.without(self)
        if self._read > max(MUCH_READING * self._all, LEAST_READING * (LOOKED_AT - 1)):
            context.console.warn(
                f"nothing was computed in {self._read / self._all:.0%} of {LOOKED_AT - 1} updates, while samples were "
                f"read; data.num_workers = {min(2, self._most_workers)} reads them in other processes, to the same bits"
            )


class RankTiming(Callback):
    """Measure each rank's own work under DDP, where ranks wait for each other only at the end. Collective."""

    def __init__(self, context: RunContext) -> None:
        self._learner, self._ranks = context.learner, context.ranks
        self._spans, self._loss_fn = Spans(context.ranks.device), context.loss_fn
        # Plan of the call whose span is the last one.
        self._plan: Plan | None = None
        self._slow_ranks = SlowRanks(context.ranks)
        context.loss_fn = in_place_of(self._loss_fn, self._compute_loss)

    def after_update(self, context: RunContext) -> None:
        """Exchange the seconds, add them to the row, and warn of a rank that is slow for long."""
        # The measured cost of a slow rank would explain its seconds, so one cost predicts those of all.
        cost = context.updates.dealing.cost or CostModel() if context.config.update.cost == "measure" else None
        ranks, seconds = self._ranks, [self._spans.take(), predict_seconds(context.plan, cost)]
        self._plan = None
        numbers = ranks.sum_of_data([number for part in seconds for number in at_its_place(part, ranks)])
        measured, predicted = numbers[: ranks.dp_degree], numbers[ranks.dp_degree :]
        context.rank_seconds = measured, predicted
        if len(measured) > 1 and all(measured):
            context.row["measured_slowest_over_mean"] = max(measured) * len(measured) / sum(measured)
            context.row["slowest_rank"] = max(range(len(measured)), key=measured.__getitem__)
            self._slow_ranks.add(measured, predicted)
        for line in self._slow_ranks.warnings():
            context.console.warn(line)

    def _compute_loss(self, model: Any, microbatch: Any, **divisor: Any) -> Any:
        """Compute the loss, in a span that ends with its backward."""
        gradient = self._learner.gradient
        # A measurement for the microbatch limit belongs to no update.
        if gradient.open_update is None:
            return self._loss_fn(model, microbatch, **divisor)
        plan, before = gradient.last_plan, self._plan
        self._plan = plan
        if plan is None or plan is not before or plan.sync != "last":
            # A span of its own, unless the microbatch before it in its call was not reduced.
            self._spans.begin()
        returned = self._loss_fn(model, microbatch, **divisor)
        call_around_backward(returned, None, self._spans.end)
        return returned


class Spans:
    """Spans of time on this rank, each from a forward to the end of the last backward before ranks wait."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        # Beginning and end of each span.
        self._spans: list[tuple[Any, Any]] = []

    def begin(self) -> None:
        """Begin a span, which has no length until it ends."""
        self._spans.append((now(self._device), None))

    def end(self) -> None:
        """End the last span here, unless it ends later."""
        start, end = self._spans[-1]
        if self._is_cuda and end is not None:
            # Recorded once more, in place of a new event for each microbatch.
            end.record()
        else:
            self._spans[-1] = (start, now(self._device))

    def take(self) -> float:
        """Return the seconds of all spans, and forget them. The host has waited for what the device did in them."""
        spans, self._spans = [span for span in self._spans if span[1] is not None], []
        if self._is_cuda:
            return sum(float(start.elapsed_time(end)) for start, end in spans) / 1000
        return sum(end - start for start, end in spans)


class SlowRanks:
    """Looks back at some updates for ranks that were slow in most of them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._said = ranks, set[int]()
        self._recent: deque[list[float | None]] = deque(maxlen=WINDOW)

    def add(self, measured: Sequence[float], predicted: Sequence[float]) -> None:
        """Take in the seconds of each rank in an update. A rank whose samples explain its time is not slow."""
        mean, explained = fmean(measured), fmean(predicted) or 1.0
        times = [(ratio / mean, expected / explained) for ratio, expected in zip(measured, predicted, strict=True)]
        self._recent.append([ratio if ratio > SLOW * max(1.0, expected) else None for ratio, expected in times])

    def warnings(self) -> list[str]:
        """Return a line for each rank that is found slow, once. Collective if there is one."""
        columns = [[times for times in of_rank if times is not None] for of_rank in zip(*self._recent, strict=True)]
        slow = [rank for rank, times in enumerate(columns) if len(times) >= SLOW_IN and rank not in self._said]
        if not slow:
            return []
        self._said |= set(slow)
        processes = self._ranks.gather(f"process {os.getpid()} on {socket.gethostname()}")
        when = f"in {SLOW_IN} or more of the last {len(self._recent)} updates"
        return [slow_text(rank, processes[rank], fmean(columns[rank]), when) for rank in slow[:MOST_LINES]]


def slow_text(rank: int, process: str, times: float, when: str) -> str:
    """Return the warning of a slow rank, and where to look."""
    return (
        f"rank {rank} ({process}) takes {times:.1f} times the mean of the ranks in forward and backward, {when}, for "
        "which its samples are no reason; look for other work on its cores, or a device that is hot or shared "
        "(docs/troubleshooting.md)"
    )


class Profiler(Callback):
    """Write ``profile/update-N.json.gz``, for chrome://tracing or Perfetto, and a table ``update-N.txt`` beside it.

    A trace has a whole update, however many microbatches it has. An update that fails leaves nothing behind.
    """

    def __init__(self, context: RunContext) -> None:
        self._steps, self._folder = frozenset(context.config.run.profile_steps), context.folder / "profile"
        # Profile of the open update.
        self._profile: profile | None = None
        context.exits.callback(self._stop)

    def before_update(self, context: RunContext) -> None:
        """Start to record, if the update is one of those asked for."""
        if context.step + 1 in self._steps:
            # Read at the first profile; below 6, stderr has a line each.
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profile.__enter__()

    def after_update(self, context: RunContext) -> None:
        """Write what was recorded."""
        if self._profile is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            profiled = self._profile
            self._stop()
            # A trace is no reason to end a run on a full disk.
            with contextlib.suppress(OSError):
                self._write(profiled, context.step)

    def _stop(self) -> None:
        stopped, self._profile = self._profile, None
        if stopped is not None:
            stopped.__exit__(None, None, None)

    def _write(self, profiled: profile, step: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        check_own_path(self._folder)
        beside = self._folder / f"update-{step}.tmp.json.gz"
        beside.unlink(missing_ok=True)
        try:
            profiled.export_chrome_trace(str(beside))
            os.replace(beside, self._folder / f"update-{step}.json.gz")
        finally:
            beside.unlink(missing_ok=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        table = profiled.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=NUM_OPERATIONS)
        replace_text(self._folder / f"update-{step}.txt", table)
