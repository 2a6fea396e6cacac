"""Updates whose samples lie in one row on each of several ranks, and which rank is said to be at fault."""

import copy
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, loss, losses
from megabatch.batching.packed_row import OneRow
from megabatch.batching.samples import Deferred
from tests.unit.test_rows import model_of, samples, uncut

LENGTHS = (3, 7, 5, 9, 2, 6, 4, 8, 11)


AXES = {"hsdp": ("dp_replicate", "dp_shard"), "hsdp-foreign": ("copies", "parts"), "fsdp1-hybrid": ("copies", "parts")}


def mesh_of(wrapper: str, world: int) -> DeviceMesh:
    if wrapper in AXES:
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=AXES[wrapper])
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


def wrapped(model: nn.Module, wrapper: str, mesh: DeviceMesh) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1-hybrid":
        return FullyShardedDataParallel(
            model, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD, use_orig_params=True,
            device_id=torch.device("cpu"),
        )  # fmt: skip
    for block in model.get_submodule("transformer.h").children():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_job(name: str) -> dict[str, Any]:
    """The job "what:wrapper:world:sync": "gradient", "fault" of each rank in turn, or "dummy microbatch"."""
    what, wrapper, world, sync = name.split(":")
    mesh = mesh_of(wrapper, int(world))
    plain = model_of("gpt2")
    model = wrapped(copy.deepcopy(plain), wrapper, mesh)
    known = mesh if wrapper == "hsdp" else None
    gradient = GradientAccumulator(model, mesh=known, max_microbatch_tokens=16, sync=sync, collate=OneRow())
    if what == "dummy microbatch":
        return {"most": most_tokens(gradient)}
    mine = samples(LENGTHS)[dist.get_rank() :: int(world)]
    if what == "fault":
        return {"problems": [problem(gradient, mine, rank) for rank in range(int(world))]}
    gradient.forward_backward(mine, losses.next_token)
    update = gradient.finalize()
    found = [whole(each.grad) for each in model.parameters()]
    pairs = zip(found, uncut(plain, samples(LENGTHS)), strict=True)
    return {
        "error": max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm()),
        "tokens": update.num_tokens,
        "padding": gradient.last_plan.padding if gradient.last_plan else math.nan,
    }


def most_tokens(gradient: GradientAccumulator) -> int:
    """Of a microbatch, where the rank with fewer stands in for its last microbatch of a long sample and short ones."""
    lengths = (15, 8, 1, 1, 1, 1) if dist.get_rank() == 0 else (16, 16, 16)
    given, seen = samples(lengths), list[int]()
    given[1], given[-1] = given[-1], given[1]  # the last sample is the long one of its microbatch
    lengths = [len(each["input_ids"]) for each in given]

    @loss(weigh=losses.count_targets)
    def noted(model: Any, microbatch: Any) -> Any:
        seen.append(microbatch["input_ids"].numel())
        return losses.next_token(model, microbatch)

    gradient.forward_backward(Deferred(given.__getitem__, lengths), noted)
    gradient.finalize()
    assert len(seen) == 3
    return max(seen)


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def problem(gradient: GradientAccumulator, mine: list[Any], rank: int) -> str:
    """What an update says in which one rank has a loss that is not finite."""

    @loss(weigh=losses.count_targets)
    def broken(model: Any, microbatch: Any) -> Any:
        total, weight = losses.next_token(model, microbatch)
        return total * (math.nan if dist.get_rank() == rank else 1.0), weight

    gradient.forward_backward(mine, broken)
    return str(gradient.finalize().problem())
