"""Timeline: when one update of a start went forward and backward and waited, on every rank; a line in timeline.jsonl.

Marks are times of the host where it computes, else events on the stream of the device that does: nothing waits for the
device inside the update, and no tensor is touched. A mark says what begins; its span lasts until the next one.
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch

from megabatch import JointLoss, Learner, Plan
from megabatch.losses import LossFunction
from megabatch.train.callbacks.autograd_hooks import around_backward, in_place_of, now, total_of
from megabatch.train.callbacks.jsonl_log import Journal
from megabatch.train.checkpoints.mid_update import Call, InCalls
from megabatch.train.runtime.ranks import Ranks

FILE_NAME = "timeline.jsonl"
RECORDED = 3  # update of a start: the first two make what stays, and measure memory
MOST_RANKS, MOST_MICROBATCHES = 64, 256  # that are told apart
IDLE, FORWARD, BACKWARD, REDUCE, STEP = "idle", "forward", "backward", "reduce", "step"
DUMMY, REST, END = "dummy microbatch", "rest", "end"  # REST: microbatches beyond those that are told apart


class Marks:
    """What began when, on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kinds: list[str] = []
        self._times: list[Any] = []

    def add(self, kind: str) -> None:
        """Something begins now: on the device, where it comes to what was asked of it so far."""
        self._kinds.append(kind)
        self._times.append(now(self._device))

    def spans(self) -> tuple[list[str], list[float]]:
        """Kinds, and milliseconds at which each begins and the last one ends. Waits for the device."""
        if self._device.type == "cuda":
            self._times[-1].synchronize()
            starts = [float(self._times[0].elapsed_time(each)) for each in self._times]
        else:
            starts = [1000 * (each - self._times[0]) for each in self._times]
        return self._kinds[:-1], [round(each, 4) for each in starts]


class Timeline:
    """Records the third update of a start; see `update` and `add`.

    Of a pipeline it records nothing: its stages go forward and backward by a schedule of their own.
    """

    def __init__(self, folder: Path, learner: Learner, ranks: Ranks) -> None:
        self._learner, self._ranks = learner, ranks
        self._is_enabled = ranks.layout.pp == 1
        self._num_updates = self._num_microbatches = 0
        self._marks: Marks | None = None  # of the update that is recorded
        self.journal = Journal(folder / FILE_NAME, enabled=ranks.is_main)

    def watching(self, loss_fn: Any) -> Any:
        """The same loss, which marks when it is computed and when its backward begins and ends."""
        if not self._is_enabled or isinstance(loss_fn, JointLoss):
            return loss_fn

        def watched(model: Any, microbatch: Any) -> Any:
            return loss_fn(model, microbatch) if self._marks is None else self._marked(loss_fn, model, microbatch)

        return in_place_of(loss_fn, watched)

    def watching_calls(self, in_calls: InCalls) -> InCalls:
        """The same calls of an update; what comes after them is its end."""

        def watched(batch: Sequence[Any], call: Call) -> Plan:
            plan = in_calls(batch, call)
            if self._marks is not None:
                self._marks.add(REDUCE)
            return plan

        return watched

    @contextmanager
    def update(self) -> Generator[None, None, None]:
        """Surrounds the making of an update. Collective: ranks meet before the one that is recorded."""
        self._num_updates += 1
        steps_in_backward = self._learner.gradient.steps_in_backward  # where there is no step to be marked
        if not self._is_enabled or self._num_updates != RECORDED or steps_in_backward:
            yield
            return
        self._ranks.barrier()
        self._marks = marks = Marks(self._ranks.device)
        optimizer = self._learner.optimizer
        hooks = [
            optimizer.register_step_pre_hook(marking(marks, STEP)),
            optimizer.register_step_post_hook(marking(marks, END)),
        ]
        marks.add(IDLE)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def add(self, step: int, plan: Plan, *, is_whole: bool) -> None:
        """Write what was recorded of the update, unless it was begun again or not stepped. Collective."""
        marks, self._marks = self._marks, None
        if marks is None:
            return
        spans = self._spans(marks, plan) if self._ranks.rank < MOST_RANKS else None
        told = [each for each in map(json.loads, self._ranks.gather(json.dumps(spans))) if each is not None]
        if is_whole:
            device, size = self._ranks.device.type, self._ranks.size
            self.journal.append({"step": step, "device": device, "num_ranks": size, "sync": plan.sync, "ranks": told})

    def _spans(self, marks: Marks, plan: Plan) -> dict[str, Any]:
        kinds, starts_ms = marks.spans()
        if self._ranks.size > 1:
            kinds = reducing(kinds, with_each=plan.sync != "last")
        return {"kinds": kinds, "ms": starts_ms}

    def _marked(self, loss_fn: LossFunction, model: Any, microbatch: Any) -> Any:
        marks = cast(Marks, self._marks)
        self._num_microbatches += 1
        if self._num_microbatches > MOST_MICROBATCHES:
            if self._num_microbatches == MOST_MICROBATCHES + 1:
                marks.add(REST)
            return loss_fn(model, microbatch)
        is_dummy = self._learner.gradient.is_counting is False
        marks.add(DUMMY if is_dummy else FORWARD)
        returned = loss_fn(model, microbatch)
        total = total_of(returned)
        if total is not None:
            kind = DUMMY if is_dummy else BACKWARD
            around_backward(total, partial(marks.add, kind), partial(marks.add, IDLE))
        return returned


def marking(marks: Marks, kind: str) -> Callable[..., None]:
    """A hook that marks what begins, whatever else it is told."""

    def hook(*_: Any) -> None:
        marks.add(kind)

    return hook


def reducing(kinds: Sequence[str], *, with_each: bool) -> list[str]:
    """The kinds, where what follows a backward is a reduction: after the last one of all, or after each of them."""
    named = list(kinds)
    for place, (before, kind) in enumerate(pairwise(kinds), start=1):
        is_last = kinds[place + 1 : place + 2] == [REDUCE]
        if kind == IDLE and before in (BACKWARD, DUMMY) and (with_each or is_last):
            named[place] = REDUCE
    return named
