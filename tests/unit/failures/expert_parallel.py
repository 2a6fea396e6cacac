"""Errors of experts on ranks of their own, on two ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, verify
from megabatch.pipeline import Pipeline
from megabatch.planners import Rows, SameBits
from tests.exact.expert_parallel import SIZES, SummedBlock, dispatched, shard_sparse, spread
from tests.exact.experts import samples, unbalanced
from tests.exact.sparse import SparseLM, sparse_lm
from tests.exact.tiny import tiny
from tests.unit.failures.table import told


def mesh_of(*sizes: int, names: tuple[str, ...] = ("dp", "ep")) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def spread_over(*sizes: int, names: tuple[str, ...] = ("dp", "ep"), seed: int = 0) -> SparseLM:
    model = sparse_lm()
    with torch.no_grad():
        model.blocks[0].experts += seed
    return spread(model, mesh_of(*sizes, names=names)[names[-1]])


def accumulated(model: nn.Module, **settings: Any) -> str:
    limit = {} if "planner" in settings else {"micro_batch_size": 2}
    return told(lambda: GradientAccumulator(model, **limit, **settings))


def other_copies() -> str:
    return accumulated(spread_over(2, 1, seed=dist.get_rank()), mesh=mesh_of(2, 1))


def data_parallel() -> nn.Module:
    """DDP that is given its experts afterwards, since its constructor refuses DTensors itself."""
    wrapped = DistributedDataParallel(sparse_lm())
    spread(wrapped.module, mesh_of(1, 2)["ep"])
    return wrapped


def of_transformers(axis: str, *, times: int = 1, shares: bool = False) -> nn.Module:
    """A model whose experts transformers has dealt out along an axis, to ranks that share samples or do not."""
    mesh = mesh_of(1, 2, names=("dp", axis))[axis]
    model = tiny("mixtral", **SIZES)
    for _ in range(times):
        model = dispatched(model, mesh, sharing=mesh if shares else None)
    return model


def transformers_mesh() -> Any:
    from transformers.distributed.utils import TransformersDeviceMesh

    return TransformersDeviceMesh(mesh_of(2, 1, names=("fsdp", "tp")), mesh_of(1, 2, names=("efsdp", "ep")))


def with_dtensor(names: tuple[str, ...], placement: Any) -> nn.Module:
    model = spread_over(1, 2)
    mesh = mesh_of(1, 2, names=names)[names[1]]
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [placement]))
    return model


def with_attribute(name: str, value: object) -> nn.Module:
    model = spread_over(1, 2)
    setattr(model.blocks[0], name, value)
    return model


def alone() -> nn.Module:
    """Experts over a mesh of this process."""
    return spread(sparse_lm(), DeviceMesh("cpu", [dist.get_rank()], mesh_dim_names=("ep",)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mesh = mesh_of(1, 2, names=("efsdp", "ep"))
        self.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh["ep"], [Shard(0)]))
        fully_shard(self, mesh=mesh["efsdp"])


class Layer(nn.Module):
    """A layer whose gate is sharded over the ranks of its experts, or whose experts have no copies elsewhere."""

    def __init__(self, *, experts: int, has_gate: bool) -> None:
        super().__init__()
        mesh = mesh_of(2 // experts, 1, experts, names=("x", "efsdp", "ep"))
        self.inner = nn.Module()
        self.inner.weight = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh["ep"], [Shard(0)]))
        if has_gate:
            self.inner.gate = nn.Parameter(torch.ones(3))
        fully_shard(self.inner, mesh=mesh["efsdp"])
        self.head = nn.Linear(3, 3)
        fully_shard(self, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))


def two_meshes() -> nn.Module:
    layer = nn.Sequential(Experts(), nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(layer[1], mesh=mesh_of(2, 1, names=("y", "fsdp"))["fsdp"])
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)))
    assert isinstance(layer, FSDPModule)
    return layer


def staged() -> str:
    def shape(*_: object) -> torch.Tensor:
        return torch.empty(1, device="meta")

    mesh = mesh_of(1, 2, names=("dp", "pp"))
    return told(lambda: Pipeline([spread_over(1, 2)], mesh, boundary=shape, output=shape))


def other_forwards() -> str:
    """One rank calls the model once more."""

    def twice(model: nn.Module, batch: Any) -> Any:
        for _ in range(dist.get_rank()):
            unbalanced(model, batch)
        return unbalanced(model, batch)

    gradient = GradientAccumulator(spread_over(1, 2), micro_batch_size=2)
    return told(lambda: gradient.forward_backward(samples(0, 2), twice))


def summed(model: nn.Module) -> str:
    """Ranks that share samples, of which the mesh says that they do not."""
    gradient = GradientAccumulator(model, micro_batch_size=2)
    return told(lambda: gradient.forward_backward(samples(0, 2), unbalanced))


BESIDE = "PlanError: mesh axis 'cp' has 2 ranks beside 'ep'"
CASES: dict[str, tuple[Callable[[], str], str]] = {
    "in DDP": (lambda: accumulated(data_parallel()), "in DistributedDataParallel"),
    "not whole": (lambda: accumulated(with_dtensor(("dp", "ep"), Replicate())), "'head.weight' is R"),
    "another DTensor": (lambda: accumulated(with_dtensor(("dp", "tp"), Shard(0))), "('tp',)"),
    "beside cp": (lambda: accumulated(spread_over(2, 1, names=("cp", "ep"))), BESIDE),
    "beside pp": (staged, "a stage has experts"),
    "another mesh": (lambda: accumulated(spread_over(1, 2), mesh=mesh_of(2, 1)), "other ranks along 'ep'"),
    "some processes": (lambda: accumulated(alone()), "on 1 of 2 processes"),
    "experts alone": (lambda: accumulated(Experts()), "every parameter is an expert"),
    "two meshes": (lambda: accumulated(two_meshes()), "different meshes"),
    "no copies": (lambda: accumulated(Layer(experts=1, has_gate=False)), "'inner.weight' is on 1 ranks"),
    "with a gate": (lambda: accumulated(Layer(experts=2, has_gate=True)), "'inner.gate' is no expert"),
    "a mesh of others": (
        lambda: accumulated(shard_sparse(sparse_lm(), 2), mesh=DeviceMesh("cpu", [dist.get_rank()],
                                                                          mesh_dim_names=("dp",))),
        "1 data ranks",
    ),
    "shared samples": (lambda: accumulated(with_attribute("_tp_size", 2)), "tp_size=2"),
    "one batch": (lambda: accumulated(of_transformers("ep", shares=True)), "but 2 ranks share their samples"),
    "sums": (lambda: summed(spread(sparse_lm(), mesh_of(1, 2)["ep"], SummedBlock)), "of 'blocks.1', as if"),
    "sums in FSDP2": (lambda: summed(shard_sparse(sparse_lm(), 2, kind=SummedBlock)), "of 'blocks.1', as if"),
    "sent twice": (lambda: accumulated(of_transformers("ep", times=2)), "sent twice … 'model.layers.0.mlp.experts'"),
    "sent twice along tp": (lambda: accumulated(of_transformers("tp", times=2, shares=True)), "sent twice"),
    "all samples along tp": (lambda: accumulated(of_transformers("tp")), "different samples along ('tp',)"),
    "another name": (lambda: accumulated(spread_over(1, 2, names=("dp", "expert"))), "('expert',) … 'ep'"),
    "another name in FSDP2": (
        lambda: accumulated(shard_sparse(sparse_lm(), 2, axis="expert")), "different meshes … 'ep'"
    ),
    "a mesh of transformers": (
        lambda: accumulated(shard_sparse(sparse_lm(), 2), mesh=transformers_mesh()), "mesh is a TransformersDeviceMesh"
    ),
    "a capacity": (lambda: accumulated(with_attribute("capacity_factor", 1.25)), "capacity_factor is 1.25"),
    "same bits": (lambda: accumulated(spread_over(1, 2).float(), planner=SameBits(Rows(2))), "SameBits"),
    "other copies": (other_copies, "'blocks.0.experts'"),
    "another sync": (lambda: accumulated(spread_over(1, 2), sync="replica_last"), "has expert parallelism"),
    "verified": (lambda: told(lambda: verify(spread_over(1, 2), unbalanced, samples(0, 2))), "on ranks of their own"),
    "other forwards": (other_forwards, "ranks call other submodules"),
}  # fmt: skip
JOBS: dict[str, tuple[Callable[[], str], list[str]]] = {
    f"experts on ranks of their own: {name}": (run, [seen, seen]) for name, (run, seen) in CASES.items()
}
