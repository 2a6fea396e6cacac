"""Options of the wrappers, and frozen parameters: cells that are run with each of them."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.exact import harness, models
from tests.exact.cells import Cell

OPTIONS = {  # with the wrappers that have them
    "gradient_as_bucket_view": ("ddp",),
    "static_graph": ("ddp",),
    "find_unused_parameters": ("ddp",),
    "keep_unsharded": ("fsdp2",),
    "hsdp": ("fsdp2",),
    "frozen": ("plain", "ddp", "fsdp2"),
}
WORLDS = dict.fromkeys(OPTIONS, 2) | {"hsdp": 4}
CASES = ("C1", "short-tail", "calls-updates", "empty-update")


class OptionRun(harness.CellRun):
    """A cell with an option."""

    def __init__(self, cell: Cell, option: str) -> None:
        self.option = option
        super().__init__(cell)

    def _new_model(self, dtype: Any) -> nn.Module:
        model = super()._new_model(dtype)
        if self.option == "frozen":
            model.embedding.requires_grad_(False)
            model.head.bias.requires_grad_(False)
        return model

    def _wrapped(self, model: nn.Module) -> nn.Module:
        if self.option == "keep_unsharded":
            return _sharded(model, init_device_mesh("cpu", (self.cell.world,)), reshard_after_forward=False)
        if self.option == "hsdp":
            return _sharded(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))
        options = {self.option: True} if self.cell.wrapper == "ddp" and self.option != "frozen" else {}
        return harness.wrap(model, self.cell.wrapper, **options)


def _sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in models.blocks(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def run_job(name: str) -> dict[str, Any]:
    """The job "option:case:wrapper:world:sync"."""
    option, case, wrapper, world, sync = name.split(":")
    values = ("bits", wrapper, world, sync, case, "list", "weigh", "one-sample", "forward_backward", "no-clip")
    return harness.run(OptionRun(Cell.parse(":".join(values)), option))
