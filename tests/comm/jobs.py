"""Counts of one update on a rank, in the steady state: the third update."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, loss
from tests.comm.counting import Collectives

WIDTH = 48  # a layer is 18,816 bytes, far larger than a message
BUCKET_MB = 0.01  # so that DDP makes several buckets


class Layers(nn.Module):
    """Three layers, and a buffer as batch norm has one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("running", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x + self.running


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def squares(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(microbatch["x"]) ** 2).sum(), len(microbatch["x"])


def wrapped(wrapper: str) -> nn.Module:
    torch.manual_seed(0)
    model = Layers().double()
    if wrapper == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks[:2]:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return model


def _counted(update: Any, times: int = 3) -> dict[str, int]:
    for _ in range(times - 1):
        update()
    with Collectives() as collectives:
        update()
    return collectives.table()


def of_megabatch(name: str) -> dict[str, int]:
    """The job "wrapper:sync:microbatches:calls"."""
    wrapper, sync, microbatches, calls = name.split(":")
    model = wrapped(wrapper)
    gradient = GradientAccumulator(model, micro_batch_size=2, sync=sync)
    batch = {"x": torch.ones(2 * int(microbatches), WIDTH, dtype=torch.float64)}

    def update() -> None:
        for _ in range(int(calls)):
            gradient.forward_backward(batch, squares)
        assert gradient.finalize().num_microbatches == int(microbatches) * int(calls)

    return _counted(update)


def of_pytorch(name: str) -> dict[str, int]:
    """The job "pytorch:wrapper": one microbatch of a loop without megabatch."""
    model = wrapped(name.split(":")[1])
    x = torch.ones(2, WIDTH, dtype=torch.float64)

    def update() -> None:
        model.zero_grad()
        (model(x) ** 2).sum().backward()

    return _counted(update)


def of_model(name: str) -> dict[str, int]:
    """The job "model:wrapper": what the formulas need."""
    model = wrapped(name.split(":")[1])
    groups = sum(isinstance(module, FSDPModule) for module in model.modules())
    return {"gradient_bytes": sum(p.nbytes for p in Layers().double().parameters()), "groups": groups}


def run_job(name: str) -> dict[str, int]:
    """The job by its name."""
    kind = name.split(":")[0]
    return {"pytorch": of_pytorch, "model": of_model}.get(kind, of_megabatch)(name)
