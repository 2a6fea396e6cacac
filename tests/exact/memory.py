"""Updates in which memory runs out, at every microbatch, in forward and backward, at several layers."""

from typing import Any

from torch import nn

from megabatch import GradientAccumulator
from tests.exact import harness, oracle
from tests.exact.cells import Cell
from tests.exact.spikes import PLACES, Spikes
from tests.exact.wrappers import Wrapped

NUM_MICROBATCHES = 4  # of the first update; each of two samples, or two of four
PHASES = ("forward", "backward")
DEPTHS = {  # which tries fail, counted from the microbatch; tries of parts come between
    "once": {0: 0},
    "in-second-call": {0: 0},
    "in-opened-call": {0: 0},
    "half-too": {0: 0, 1: -1},
    "other-half-too": {0: 0, 2: 1},
    "to-single-samples": {0: 0, 1: 1, 4: -1},
}

SECOND = ("in-second-call", "in-opened-call")


class SpikedRun(harness.CellRun):
    """A cell whose model runs out of memory."""

    def _wrapped(self, model: nn.Module) -> Wrapped:
        kind = "tokens" if self.model_kind == "tokens" else "small" if self.wrapper.several else "language"
        self.spikes = Spikes(model, PLACES[kind])
        return super()._wrapped(model)


def run_job(name: str) -> dict[str, Any]:
    """The job "evidence:loss:depth:phase:place:index:who:wrapper:world:sync"; ``who`` fails, "all" or one rank."""
    evidence, loss, depth, phase, place, index, who, wrapper, world, sync = name.split(":")
    cell = Cell.parse(f"{evidence}:{wrapper}:{world}:{sync}:C1:list:{loss}:two-samples:forward_backward:no-clip")
    this = SpikedRun(cell)
    (calls,) = this.updates()
    size = 4 if "half" in depth or "single" in depth else 2
    gradient = GradientAccumulator(this.model, mesh=this.mesh, micro_batch_size=size, sync=sync)
    cuts: list[Any] = []
    for update in range(2):  # in the second the cut is smaller from the beginning
        fails = update == 0 and who in ("all", str(this.rank))
        if depth == "in-opened-call":
            gradient.open(harness.told(this, calls * 2))
        if depth in SECOND:
            gradient.forward_backward(this.batch(calls[0]), this.loss_fn())
        this.spikes.set(_tries(depth, phase, int(place), int(index)) if fails else {})
        returned = gradient.forward_backward(this.batch(calls[0]), this.loss_fn())
        harness.judge(this, gradient.finalize(), calls * (1 + (depth in SECOND)), None)
        _judge_sums(this, returned, calls[0])
        assert gradient.last_plan is not None
        cuts.append([list(map(len, gradient.last_plan.microbatches)), gradient.last_plan.num_split])
    found = this.found
    return {"gradient": found.gradient, "parameter": found.parameter, "wrong": found.wrong, "tolerance": cell.tolerance,
            "failed": who in ("all", str(this.rank)), "size": size, "cuts": cuts,
            "learned": gradient.oom_limit}  # fmt: skip


def _tries(depth: str, phase: str, place: int, index: int) -> dict[int, tuple[str, int]]:
    return {index + later: (phase, (place + shift) % 4) for later, shift in DEPTHS[depth].items()}


def _judge_sums(this: harness.CellRun, returned: Any, call: harness.Call) -> None:
    """The sums of the call are of this rank's samples, each counted once."""
    expected = this.oracle_sums(this.reference, oracle.collate(call[this.rank]))
    for each, (total, weight) in expected.items():
        this.found.near(f"the weight of {each!r}", returned[each].weight, float(weight))
        this.found.near(f"the total of {each!r}", returned[each].total, float(total))
