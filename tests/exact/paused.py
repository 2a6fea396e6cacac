"""Updates that are saved between two calls, and go on in another accumulator of another model of the same weights."""

import io
import warnings
from typing import Any

import torch
import torch.distributed as dist

from megabatch import GradientAccumulator
from tests.exact import harness, oracle
from tests.exact.cells import Cell


def carried(state: Any) -> Any:
    """The state that a file would give back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run_job(name: str) -> dict[str, Any]:
    """The job "evidence:wrapper:case:loss:clip:world:sync": every update saved after each of its calls but the last."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo and about one rank
        evidence, wrapper, case, loss, clip, world, sync = name.split(":")
        values = (evidence, wrapper, world, sync, case, "list", loss, "two-samples", "forward_backward", clip)
        cell = Cell.parse(":".join(values))
        if cell.world == 1 and wrapper == "plain":
            dist.destroy_process_group()
        this, whole = harness.CellRun(cell), harness.CellRun(cell)
        num_paused, different = 0, 0.0
        for calls in this.updates():
            undisturbed = whole_update(whole, calls)
            num_paused += paused_update(this, calls)
            different = max(different, oracle.worst_error(this.gradients(), undisturbed)[0])
    return {**this.found.row, "num_paused": num_paused, "different": different}


def whole_update(this: harness.CellRun, calls: list[harness.Call]) -> harness.Tensors:
    """The gradient of an update that is not saved on the way."""
    gradient = accumulator(this)
    for index, call in enumerate(calls):
        gradient.forward_backward(this.batch(call), this.loss_fn(index))
    gradient.finalize(max_norm=harness.MAX_NORM[this.cell.clip])
    return this.gradients()


def paused_update(this: harness.CellRun, calls: list[harness.Call]) -> int:
    """An update that changes hands between its calls; how often."""
    gradient = accumulator(this)
    num_paused = 0
    for index, call in enumerate(calls):
        if index:
            state = carried(gradient.state_dict())
            num_paused += bool(state)
            again = harness.CellRun(this.cell)
            this.model, this.parameters = again.model, again.parameters
            gradient = accumulator(this)
            gradient.load_state_dict(state)
        gradient.forward_backward(this.batch(call), this.loss_fn(index))
    harness.judge(this, gradient.finalize(max_norm=harness.MAX_NORM[this.cell.clip]), calls, None)
    return num_paused


def accumulator(this: harness.CellRun) -> GradientAccumulator:
    return GradientAccumulator(this.model, mesh=this.mesh, sync=this.cell.sync, **this.bound(this.updates()))
