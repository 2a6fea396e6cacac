"""A world of many ranks in this process, which is the first of them: nothing is sent, and nobody else is there."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor._redistribute import (
    _gen_transform_infos,  # pyright: ignore[reportPrivateUsage]
    clear_redistribute_planner_cache,
)
from torch.distributed.tensor.debug import _clear_sharding_prop_cache  # pyright: ignore[reportPrivateUsage]
from torch.testing._internal.distributed.fake_pg import FakeStore

from megabatch.errors import PlanError, require_count
from megabatch.wrappers.mesh import DataRanks, check_axes


class OnlyRank(DataRanks):
    """Ranks of which every other says what this one says."""

    @classmethod
    def like(cls, ranks: DataRanks) -> "OnlyRank":
        """The same groups."""
        return cls(ranks.data_groups, ranks.context_groups, ranks.tensor_groups, ranks.pipeline_groups)

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        return [list(numbers) for _ in range(self.num_all)]

    def exchange_objects(self, value: Any) -> list[Any]:
        return [value for _ in range(self.num_all)]


@contextlib.contextmanager
def world(axes: Mapping[str, int]) -> Generator[DeviceMesh | None]:
    """This process as rank 0 of a mesh with these axes; without any there is none. The process group ends with it.

    Raises `PlanError` where there is a process group, and for axes that are not known.
    """
    for axis, size in axes.items():
        require_count(f"the size of mesh axis {axis!r}", size)
    num_ranks = prod(axes.values())
    if dist.is_initialized():
        raise PlanError(
            "this process has a process group, and a simulated one would take its place; simulate in a process of its "
            "own, or call torch.distributed.destroy_process_group() before"
        )
    if not axes:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        _forget_meshes()
        with torch.device("cpu"):
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        check_axes(mesh)
        yield mesh
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """DTensor remembers what its operations gave, and would hand out meshes whose process groups are gone."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    _gen_transform_infos.cache_clear()
