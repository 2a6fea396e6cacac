"""Cost of a microbatch, measured in the updates that run anyway; loaded only for ``cost="measure"``."""

import math
import time
from collections import deque
from collections.abc import Generator
from dataclasses import asdict, replace
from typing import Any

import torch

from megabatch.core.call import MicrobatchPlanner, MicrobatchStep
from megabatch.core.extension import Extension
from megabatch.core.update import Update
from megabatch.core.wrapper import Wrapper
from megabatch.errors import PlanError
from megabatch.planning.limit_search import TimedMicrobatch, cost_in_use
from megabatch.planning.plan import CostModel, Plan

MAX_SHAPES = 64  # the newest shapes of microbatches are fitted
MAX_WAITING = 256  # microbatches that a GPU has not finished; older ones are forgotten


class CostMeter(Extension):
    """Times the microbatches of a run, and fits the cost of one.

    No message is sent and nothing is waited for: a GPU's events are read when their update is over, or later. Each rank
    has its own cost.

    Args:
        wrapper: The wrapper of the model.
        planner: Splits samples by the cost.

    Raises:
        PlanError: Where no cost can be measured, or none decides the split.
    """

    def __init__(self, wrapper: Wrapper, planner: MicrobatchPlanner) -> None:
        if wrapper.device.type not in ("cpu", "cuda"):
            raise PlanError(f'cost="measure" and a device of type {wrapper.device.type!r}; give a CostModel')
        if not planner.batching.has_rows:
            raise PlanError('cost="measure" and OneRow, which packs samples by their tokens alone; leave cost out')
        if wrapper.ranks.num_all > wrapper.ranks.degree:
            raise PlanError(
                'cost="measure" and ranks along cp, tp or pp, which must split their samples alike and would measure '
                "different costs; give a CostModel, or leave cost out"
            )
        self._device = wrapper.device if wrapper.device.type == "cuda" else None
        # DDP and FSDP may wait for other ranks in the last backward of a call.
        self._may_wait = type(wrapper) is not Wrapper and not wrapper.ranks.is_alone
        self._seconds: dict[tuple[int, int], float] = {}  # the least, by rows and the tokens of the longest
        self._host_seconds = 0.0 if self._device is None else math.inf  # the least that a GPU's launches have taken
        self._waiting: deque[tuple[tuple[int, int], Any, Any]] = deque(maxlen=MAX_WAITING)  # shape, two events
        self._num_updates = 0
        self.cost: CostModel | None = None  # None until it is known

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_waiting": deque[Any](maxlen=MAX_WAITING)}  # events have no copy

    def attach(self, gradient: Any) -> None:
        gradient.planner.check_goes_with('cost="measure"')

    def surround_steps(self, steps: Generator[MicrobatchStep], call: Any) -> Generator[MicrobatchStep]:
        """Yield the steps of a call, and time what is done with each: its forward and backward."""
        if call.is_new:  # this call also checks the loss, so that its time is not that of a microbatch
            yield from steps
            return
        prepared, plan = call.prepared, call.prepared.plan
        num_timed = len(plan.microbatches) - (self._may_wait and plan.sync in ("last", "replica_last"))
        for step in steps:
            index, before, start = step.index, self._record(), time.perf_counter()
            yield step
            seconds, after = time.perf_counter() - start, self._record()
            is_usual = index < num_timed and index not in prepared.parts
            del step  # with its microbatch, before the next is made
            if is_usual:
                self._note(_shape(plan, index), seconds, before, after)

    def after_finalize(self, gradient: Any, update: Update) -> None:
        """Split the next update by the cost of now. Once known, it changes in updates 4, 8, 16 and so on."""
        cost = self.end_update()
        if cost != gradient.planner.cost:
            gradient.planner = replace(gradient.planner, cost=cost)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.cost is None else {"cost": asdict(self.cost)}

    def load_state_dict(self, gradient: Any, state: dict[str, Any]) -> None:
        cost = state.pop("cost", None)
        if cost is not None:
            self.cost = CostModel(**cost)
            gradient.planner = replace(gradient.planner, cost=self.cost)

    def end_update(self) -> CostModel | None:
        """Return the cost of now, None until it is known."""
        while self._waiting and self._waiting[0][2].query():  # never waits
            shape, before, after = self._waiting.popleft()
            self._keep(shape, before.elapsed_time(after) / 1000)
        self._num_updates += 1
        if self.cost is None or self._num_updates & (self._num_updates - 1) == 0:
            timed = [TimedMicrobatch(*shape, seconds) for shape, seconds in self._seconds.items()]
            self.cost = cost_in_use(timed, self._host_seconds) or self.cost
        return self.cost

    def _record(self) -> Any:
        """Return an event of this moment on the GPU."""
        if self._device is None:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _note(self, shape: tuple[int, int], seconds: float, before: Any, after: Any) -> None:
        if self._device is None:
            self._keep(shape, seconds)
            return
        self._host_seconds = min(self._host_seconds, seconds)
        self._waiting.append((shape, before, after))

    def _keep(self, shape: tuple[int, int], seconds: float) -> None:
        """Keep the least time of a shape, since other work of the machine only adds time."""
        self._seconds[shape] = min(seconds, self._seconds.pop(shape, math.inf))
        if len(self._seconds) > MAX_SHAPES:
            del self._seconds[next(iter(self._seconds))]


def _shape(plan: Plan, index: int) -> tuple[int, int]:
    """Return the rows of a planned microbatch, and the tokens of the longest, at least 1."""
    lengths = plan.row_lengths(plan.microbatches[index])
    return len(lengths), max(1, *lengths)
