"""Samples in one row over several ranks: the gradient is that of samples apart, and a fault is its own rank's."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, loss, losses
from megabatch.batching.deferred import Deferred
from megabatch.batching.packed_row import OneRow
from tests.exact.launch import of_ranks
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
    gradient = GradientAccumulator(model, mesh=known, max_microbatch_tokens=16, sync=sync, batching=OneRow())
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
    """Return the most tokens of a microbatch; one rank repeats its last, of a long sample and short ones."""
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
    """Return the verdict of an update in which one rank has a loss that is not finite."""

    @loss(weigh=losses.count_targets)
    def broken(model: Any, microbatch: Any) -> Any:
        total, weight = losses.next_token(model, microbatch)
        return total * (math.nan if dist.get_rank() == rank else 1.0), weight

    gradient.forward_backward(mine, broken)
    return str(gradient.finalize().problem())


GRADIENTS = ["gradient:ddp:2:last", "gradient:ddp:3:every", "gradient:fsdp2:2:every", "gradient:hsdp:4:replica_last"]
FAULTS = ["fault:ddp:2:last", "fault:hsdp:4:replica_last", "fault:hsdp-foreign:4:every", "fault:fsdp1-hybrid:4:every"]
DUMMY = "dummy microbatch:ddp:2:last"
results = of_ranks("tests.exact.test_rows:run_job", [*GRADIENTS, *FAULTS, DUMMY])


@pytest.mark.slow
@pytest.mark.parametrize("job", GRADIENTS)
def test_the_gradient_is_that_of_samples_apart(results, job: str) -> None:
    for found in results(job):
        assert found["error"] <= 1e-12
        assert found["tokens"] == sum(LENGTHS)
        assert found["padding"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("job", FAULTS)
def test_a_fault_is_its_own_ranks(results, job: str) -> None:
    world = int(job.split(":")[2])
    for found in results(job):
        assert found["problems"] == [f"the loss is not finite on data rank {rank} of {world}" for rank in range(world)]


@pytest.mark.slow
def test_a_stand_in_holds_no_more_than_a_microbatch(results) -> None:
    assert max(found["most"] for found in results(DUMMY)) <= 16
