"""The wrappers of the tables: their worlds, the axes of their ranks, and how a model is wrapped. Plain torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.exact import models

Wrapped = nn.Module | list[nn.Module]
Wrap = Callable[..., Wrapped]  # of a model and the mesh
Tensors = dict[str, Tensor | None]
TENSOR_DEGREE = 2
SYNCS = ("auto", "last", "every", "replica_last")


def _axes(world: int) -> dict[str, int]:
    return {"dp": world}


def _hybrid_axes(world: int) -> dict[str, int]:
    return {"dp_replicate": 2 if world % 2 == 0 else 1, "dp_shard": world // 2 if world % 2 == 0 else world}


def _tensor_axes(world: int) -> dict[str, int]:
    return {"dp": world // TENSOR_DEGREE, "tp": TENSOR_DEGREE}


def _three_axes(world: int) -> dict[str, int]:
    return {"dp_replicate": 2, "dp_shard": world // 4, "tp": TENSOR_DEGREE}


def _plain(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return model


def _ddp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def _sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in models.blocks(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _replicated(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in models.blocks(model):
        replicate(block, mesh=mesh)
    return replicate(model, mesh=mesh)


def _fsdp1(model: nn.Module, mesh: DeviceMesh, strategy: ShardingStrategy) -> nn.Module:
    blocks = models.blocks(model)
    return FullyShardedDataParallel(
        model, device_mesh=mesh, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu"),
        auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
    )  # fmt: skip


def _both(wrap: Wrap, model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    return [wrap(half, mesh) for half in models.halves(model)]


def _unlike(first: Wrap, second: Wrap, model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    body, head = models.halves(model)
    return [first(body, mesh), second(head, mesh)]


def _tensor(model: nn.Module, mesh: DeviceMesh, data: Wrap = _plain, sequence: bool = False) -> nn.Module:
    """Tensor parallelism, then a wrapper over the other axes."""
    parallelize_module(model, mesh["tp"], _tensor_plan(model, sequence))
    rest = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tp")
    return data(model, mesh[rest[0]] if len(rest) == 1 else mesh[rest])


def _tensor_plan(model: nn.Module, sequence: bool) -> dict[str, Any]:
    """Styles by module. Between the blocks a sequence stays a DTensor: its length need not divide by the ranks."""
    shared = {"input_layouts": Shard(1)} if sequence else {}
    split = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
    first, second = ColwiseParallel(**shared), RowwiseParallel(**split)
    language = isinstance(model, models.SmallLM)
    if language:
        block = dict.fromkeys(("query", "key", "value", "up"), first) | {"out": second, "down": second}
        plan: dict[str, Any] = {f"blocks.*.{name}": style for name, style in block.items()}
        plan["head"] = ColwiseParallel(**shared, output_layouts=Replicate())
    else:
        plan = {"blocks.0": first, "blocks.1": second}
    if sequence:
        norms = ("blocks.*.norm_attention", "blocks.*.norm_up", "norm") if language else ("norm_in", "norm_out")
        plan |= dict.fromkeys(norms, SequenceParallel(use_local_output=False))
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), **split)
    if sequence and not language:
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),), "use_local_output": True}
        plan["head"] = PrepareModuleInput(**whole)
    return plan


def _only_hybrid(seen: str) -> dict[str, str]:
    why = f"sync is 'replica_last', which is for HSDP, and the model has {seen}"
    change = "leave sync out, or shard with fully_shard over a mesh of two axes (dp_replicate, dp_shard)"
    return {"replica_last": f"{why}; {change}"}


@dataclass(frozen=True)
class Wrapper:
    """One way to wrap a model."""

    wrap: Wrap
    worlds: tuple[int, ...]
    axes: Callable[[int], dict[str, int]] = _axes  # mesh axes and their ranks, by world size
    needs_mesh: bool = False  # the accumulator has to be told the axes
    averages: str = "never"  # when it divides by its ranks, which is exact for powers of two: "never", "once", "always"
    several: bool = False  # a list of models
    integer: str = "tokens"  # its model of integers
    refused: Mapping[str, str] = field(default_factory=lambda: _only_hybrid("no wrapper"))  # the error, by sync

    def data_degree(self, world: int) -> int:
        """The number of its ranks with different samples."""
        return world // self.axes(world).get("tp", 1)


DDP = partial(Wrapper, averages="once", refused=_only_hybrid("DistributedDataParallel"))
SHARDED = partial(Wrapper, _sharded, refused=_only_hybrid("FSDP2 without replicas"))
HYBRID = partial(Wrapper, _sharded, refused={})
REPLICATED = partial(Wrapper, refused=_only_hybrid("replicate"))
FSDP1 = partial(Wrapper, refused=_only_hybrid("FSDP1"))
SEVERAL = partial(Wrapper, several=True)
UNLIKE = (
    "the models are wrapped in ways that do not go together (FSDP2 without replicas, DistributedDataParallel); "
    "wrap all alike, over the same ranks"
)
TENSOR = partial(Wrapper, axes=_tensor_axes, needs_mesh=True)
SHARDED_TENSOR = partial(TENSOR, refused=SHARDED.keywords["refused"])
WRAPPERS: dict[str, Wrapper] = {
    "plain": Wrapper(_plain, (1, 2, 3, 4)),
    "ddp": DDP(_ddp, (1, 2, 3, 4)),
    "fsdp2": SHARDED((1, 2, 3, 4)),
    "ddp-find-unused": DDP(partial(_ddp, find_unused_parameters=True), (2, 3)),
    "ddp-static-graph": DDP(partial(_ddp, static_graph=True), (2, 3), averages="always"),
    "ddp-bucket-view": DDP(partial(_ddp, gradient_as_bucket_view=True), (2, 3)),
    "hsdp": HYBRID((2, 3, 4), _hybrid_axes),
    "replicate": REPLICATED(_replicated, (2, 3, 4)),
    "fsdp1": FSDP1(partial(_fsdp1, strategy=ShardingStrategy.FULL_SHARD), (2, 3)),
    "fsdp1-grad-op": FSDP1(partial(_fsdp1, strategy=ShardingStrategy.SHARD_GRAD_OP), (2, 3)),
    "fsdp1-no-shard": FSDP1(partial(_fsdp1, strategy=ShardingStrategy.NO_SHARD), (2, 3), averages="always"),
    "fsdp1-hybrid": FSDP1(partial(_fsdp1, strategy=ShardingStrategy.HYBRID_SHARD), (4,), _hybrid_axes),
    "several": SEVERAL(partial(_both, _plain), (1, 2)),
    "several-ddp": DDP(partial(_both, _ddp), (2, 3), several=True),
    "several-fsdp2": SEVERAL(partial(_both, _sharded), (2, 3), refused=SHARDED.keywords["refused"]),
    "several-half": SEVERAL(partial(_unlike, _sharded, _plain), (2, 3), refused=SHARDED.keywords["refused"]),
    "several-unlike": SEVERAL(partial(_unlike, _sharded, _ddp), (2,), refused=dict.fromkeys(SYNCS, UNLIKE)),
    "tp": TENSOR(_tensor, (2, 4)),
    "tp-sp": TENSOR(partial(_tensor, sequence=True), (2, 4), integer="scaled"),
    "fsdp2-tp": SHARDED_TENSOR(partial(_tensor, data=_sharded), (4,)),
    "fsdp2-tp-sp": SHARDED_TENSOR(partial(_tensor, data=_sharded, sequence=True), (4,), integer="scaled"),
    "replicate-tp": TENSOR(partial(_tensor, data=_replicated), (4,), refused=_only_hybrid("replicate")),
    "hsdp-tp": TENSOR(partial(_tensor, data=_sharded), (8,), axes=_three_axes, refused={}),  # three axes
}


def mesh_of(wrapper: str, world: int, device_type: str = "cpu") -> DeviceMesh:
    """The mesh of a wrapper's axes; one for all jobs of a process group."""
    axes = WRAPPERS[wrapper].axes(world)
    return _mesh(dist.group.WORLD, tuple(axes), tuple(axes.values()), device_type)


@cache
def _mesh(group: dist.ProcessGroup, names: tuple[str, ...], sizes: tuple[int, ...], device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def wrap(model: nn.Module, wrapper: str, device_type: str = "cpu", **options: Any) -> Wrapped:
    """A model in its wrapper, over all ranks."""
    kind = WRAPPERS[wrapper]
    if kind.wrap is _plain:
        return model
    return kind.wrap(model, mesh_of(wrapper, dist.get_world_size(), device_type), **options)


def parameters_of(model: Wrapped) -> dict[str, nn.Parameter]:
    """Parameters of one model or several, by the names they had before they were wrapped."""
    named = (pair for each in (model if isinstance(model, list) else [model]) for pair in each.named_parameters())
    return {name.replace("_fsdp_wrapped_module.", "").removeprefix("module."): each for name, each in named}


def whole(model: Wrapped, tensors: Tensors, shapes: dict[str, torch.Size]) -> Tensors:
    """The whole of tensors that are sharded as parameters are. FSDP1's are pieces that no DTensor describes."""
    has_pieces = isinstance(model, FullyShardedDataParallel) and model.sharding_strategy != ShardingStrategy.NO_SHARD
    if not has_pieces:
        return {name: None if each is None else full(each).clone() for name, each in tensors.items()}
    parts: list[Any] = [None] * model.process_group.size()
    dist.all_gather_object(parts, tensors, group=model.process_group)
    return {name: _joined([part[name] for part in parts], shapes[name]) for name in tensors}


def _joined(pieces: list[Tensor | None], shape: torch.Size) -> Tensor | None:
    """Pieces in the order of ranks; None where one is missing."""
    found = [piece.flatten() for piece in pieces if piece is not None]
    return torch.cat(found).reshape(shape) if sum(map(len, found)) == shape.numel() else None


def is_part_of_a_sum(tensor: Tensor | None) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def full(tensor: Tensor) -> Tensor:
    """The whole of what may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
