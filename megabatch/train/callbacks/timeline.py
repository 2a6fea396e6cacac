"""timeline.jsonl: when one update of each start went forward and backward and waited, on every rank.

Marks are times of the host where it computes, else events on the stream of the device that does: nothing waits for the
device inside the update, and no tensor is touched. A mark says what begins; its span lasts until the next one.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from megabatch import Plan
from megabatch.train.context import Callback, Callbacks, ForwardBackward, RunContext
from megabatch.train.runtime.autograd_hooks import around_backward, in_place_of, now, total_of
from megabatch.train.runtime.jsonl_file import JsonlFile
from megabatch.train.runtime.ranks import Ranks

FILE_NAME = "timeline.jsonl"
RECORDED = 3  # update of a start: the first two make what stays, and measure memory
MOST_RANKS, MOST_MICROBATCHES = 64, 256  # that are told apart
IDLE, FORWARD, BACKWARD, REDUCE, STEP = "idle", "forward", "backward", "reduce", "step"
DUMMY, REST, END = "dummy microbatch", "rest", "end"  # REST: microbatches beyond those that are told apart


class Marks:
    """Times at which something began, on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: list[str] = []
        self._times: list[Any] = []

    def add(self, kind: str) -> None:
        """Mark that something begins now: on a GPU, when it gets to what was asked of it so far."""
        self._kinds.append(kind)
        self._times.append(now(self._device))

    def spans(self) -> tuple[list[str], list[float]]:
        """Return the kinds, and milliseconds at which each begins and the last one ends. Waits for the device."""
        if self._device.type == "cuda":
            self._times[-1].synchronize()
            starts = [float(self._times[0].elapsed_time(each)) for each in self._times]
        else:
            starts = [1000 * (each - self._times[0]) for each in self._times]
        return self._kinds[:-1], [round(each, 4) for each in starts]


class Timeline(Callback):
    """Record the third update of a start, and leave. Ranks meet before it.

    It records no pipeline: its stages go forward and backward by a schedule of their own.
    """

    def __init__(self, context: RunContext) -> None:
        self._file = context.open_log(FILE_NAME)
        self._num_updates = 0

    def before_update(self, context: RunContext) -> None:
        """Count updates, and hand over to a `Recording` of the third."""
        self._num_updates += 1
        if self._num_updates == RECORDED:
            recording = Recording(context, self._file)
            context.callbacks = Callbacks([recording if each is self else each for each in context.callbacks.all])


class Recording(Callback):
    """Mark what begins when in one update."""

    def __init__(self, context: RunContext, file: JsonlFile) -> None:
        context.ranks.barrier()
        self._file, self._learner, self._loss_fn = file, context.learner, context.loss_fn
        self._marks, self._num_microbatches = Marks(context.ranks.device), 0
        optimizer = context.learner.optimizer
        self._hooks = [
            optimizer.register_step_pre_hook(marking(self._marks, STEP)),
            optimizer.register_step_post_hook(marking(self._marks, END)),
        ]

        def marked(model: Any, microbatch: Any, **divisor: Any) -> Any:
            return self._compute_loss(model, microbatch, **divisor)

        context.loss_fn = in_place_of(self._loss_fn, marked)
        self._marks.add(IDLE)

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Mark what comes after the last backward."""
        forward_backward(batch)
        self._marks.add(REDUCE)

    def after_update(self, context: RunContext) -> None:
        """Write the line, unless the update was begun again or not stepped. Collective."""
        context.loss_fn, context.callbacks = self._loss_fn, context.callbacks.without(self)
        for hook in self._hooks:
            hook.remove()
        ranks, plan = context.ranks, context.plan
        spans = self._spans(plan, ranks) if ranks.rank < MOST_RANKS else None
        told = [each for each in map(json.loads, ranks.gather(json.dumps(spans))) if each is not None]
        if context.values["finite"] and "skipped_samples" not in context.row:
            row = {"step": context.step, "device": ranks.device.type, "num_ranks": ranks.size, "sync": plan.sync}
            self._file.append({**row, "ranks": told})

    def _spans(self, plan: Plan, ranks: Ranks) -> dict[str, Any]:
        kinds, starts_ms = self._marks.spans()
        if ranks.size > 1:
            kinds = reducing(kinds, with_each=plan.sync != "last")
        return {"kinds": kinds, "ms": starts_ms}

    def _compute_loss(self, model: Any, microbatch: Any, **divisor: Any) -> Any:
        """Compute the loss, and mark when it is computed and when its backward begins and ends."""
        marks = self._marks
        self._num_microbatches += 1
        if self._num_microbatches > MOST_MICROBATCHES:
            if self._num_microbatches == MOST_MICROBATCHES + 1:
                marks.add(REST)
            return self._loss_fn(model, microbatch, **divisor)
        is_dummy = self._learner.gradient.is_counting is False
        marks.add(DUMMY if is_dummy else FORWARD)
        returned = self._loss_fn(model, microbatch, **divisor)
        total = total_of(returned)
        if total is not None:
            kind = DUMMY if is_dummy else BACKWARD
            around_backward(total, partial(marks.add, kind), partial(marks.add, IDLE))
        return returned


def marking(marks: Marks, kind: str) -> Callable[..., None]:
    """Return a hook that marks what begins."""

    def hook(*_: Any) -> None:
        marks.add(kind)

    return hook


def reducing(kinds: Sequence[str], *, with_each: bool) -> list[str]:
    """Return the kinds, with the wait after the last backward, or after each, named a reduction."""
    named = list(kinds)
    for place, (before, kind) in enumerate(pairwise(kinds), start=1):
        is_last = kinds[place + 1 : place + 2] == [REDUCE]
        if kind == IDLE and before in (BACKWARD, DUMMY) and (with_each or is_last):
            named[place] = REDUCE
    return named
