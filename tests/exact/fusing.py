"""Cells whose linear layers add to their gradients themselves; what is added is counted."""

from collections.abc import Generator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megabatch import GradientAccumulator
from megabatch.wrappers import fusing
from tests.exact import harness, models
from tests.exact.cells import Cell
from tests.exact.spikes import PLACES, Spikes
from tests.exact.wrappers import Wrapped

ADDS = torch.ops.aten.addmm_.default


class Additions(TorchDispatchMode):
    """Counts products that are added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented
        self.number += function is ADDS
        return function(*args, **(kwargs or {}))


class FusedRun(harness.CellRun):
    """A cell whose layers are, as the variant says, computed again in backward or out of memory in it."""

    def __init__(self, cell: Cell, variant: str) -> None:
        self.variant = variant
        super().__init__(cell)

    def _new_model(self, dtype: Any) -> nn.Module:
        return models.small_lm(dtype) if self.model_kind == "language" else super()._new_model(dtype)

    def _wrapped(self, model: nn.Module) -> Wrapped:
        if self.variant.startswith("checkpoint"):
            for block in models.blocks(model):
                recompute(block, use_reentrant=self.variant.endswith("reentrant"))
        if self.variant == "spike":
            self.spikes = Spikes(model, PLACES["tokens" if self.model_kind == "tokens" else "small"])
        return super()._wrapped(model)


def recompute(block: nn.Module, *, use_reentrant: bool) -> None:
    """Let a module's forward run again in backward."""
    forward = block.forward
    if isinstance(block, nn.Linear):  # its own is to be replaced
        return
    block.forward = lambda inputs: checkpoint(forward, inputs, use_reentrant=use_reentrant)


def run_job(name: str) -> dict[str, Any]:
    """The job "variant:evidence:case:wrapper:world:sync"."""
    variant, evidence, case, wrapper, world, sync = name.split(":")
    fusing.MIN_ELEMENTS = 1
    cell = Cell.parse(f"{evidence}:{wrapper}:{world}:{sync}:{case}:list:weigh:two-samples:forward_backward:no-clip")
    this = FusedRun(cell, variant)
    gradient = GradientAccumulator(
        this.model, mesh=this.mesh, micro_batch_size=2, sync=sync, fuse_accumulation=variant != "apart"
    )
    num_fused: list[int] = []
    for calls in this.updates():
        if this.same_dtype is not None:
            this.copy_weights()
        if variant == "spike":
            this.spikes.set({1: ("backward", 1)})
        with Additions() as additions:
            for call in calls:
                gradient.forward_backward(this.batch(call), this.loss_fn())
        update = gradient.finalize()
        harness.judge(this, update, calls, None)
        num_fused.append(additions.number)
    found = this.found
    return {"gradient": found.gradient, "parameter": found.parameter, "wrong": found.wrong,
            "tolerance": 1e-12 if evidence == "float64" else cell.tolerance, "fused": num_fused,
            "microbatches": update.num_microbatches, "left": list(leftovers(this.model))}  # fmt: skip


def leftovers(model: Wrapped) -> Generator[str]:
    """Layers whose forward is still replaced."""
    for each in model if isinstance(model, list) else [model]:
        for name, module in each.named_modules():
            if type(module) is nn.Linear and "forward" in vars(module):
                yield name
