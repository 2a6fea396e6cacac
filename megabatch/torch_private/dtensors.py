"""DTensor: its shards and its caches."""

from typing import Any, cast

import torch


def trial_of_dtensor() -> tuple[type, str]:
    """Return the class and the method with which DTensor tries an operation on tensors of the global shape."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def clear_mesh_caches() -> None:
    """Clear DTensor's caches, which hold meshes whose process groups are gone."""
    from torch.distributed.tensor import _redistribute, debug

    cast(Any, debug)._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    cast(Any, _redistribute)._gen_transform_infos.cache_clear()


def first_of_shard(tensor: Any) -> int | None:
    """Return the flat index of a shard's first number in the whole DTensor; None where a shard is not one range."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as offset_of

    kinds = [placement for placement in tensor.placements if not isinstance(placement, Replicate)]
    if any(type(kind) is not Shard or kind.dim != 0 for kind in kinds):
        return None
    _, offset = offset_of(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * (tensor.numel() // max(1, tensor.shape[0])) if offset else 0


def num_replicas(tensor: Any) -> int:
    """Return how many ranks of a DTensor's mesh hold the same shard."""
    from torch.distributed.tensor import Replicate

    sizes = [size for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
             if isinstance(placement, Replicate)]  # fmt: skip
    return int(torch.tensor(sizes).prod()) if sizes else 1
