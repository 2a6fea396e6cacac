"""Names of mesh axes, and the ranks that see different samples with the small messages between them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch.errors import PlanError

DATA_AXES = ("dp", "dp_replicate", "dp_shard")  # ranks along these see different samples
MODEL_AXES = ("cp", "tp", "pp", "ep")  # ranks along these share their samples


def data_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """The mesh's data axes. Raises `PlanError` for an axis of another name, or one that is not supported."""
    if mesh.mesh_dim_names is None:
        raise PlanError(f"the mesh has no axis names; name its axes, from {', '.join(DATA_AXES + MODEL_AXES)}")
    for axis, size in zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True):
        if axis not in DATA_AXES + MODEL_AXES:
            raise PlanError(f"unknown mesh axis {axis!r}; expected one of {', '.join(DATA_AXES + MODEL_AXES)}")
        if axis in MODEL_AXES and size > 1:
            raise PlanError(
                f"mesh axis {axis!r} has {size} ranks; only data axes are supported: {', '.join(DATA_AXES)}"
            )
    return tuple(axis for axis in mesh.mesh_dim_names if axis in DATA_AXES)


def mesh_groups(mesh: DeviceMesh, axes: Sequence[str | int]) -> list[dist.ProcessGroup]:
    """A process group per axis; a sum over one after the other is the sum over all their ranks."""
    return [mesh.get_group(axis) for axis in axes]


class DataRanks:
    """The ranks that see different samples. With one rank every message is free."""

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self.groups = [group for group in groups if group.size() > 1]
        self._cpu_groups = [_cpu_group(group) for group in self.groups]

    @property
    def degree(self) -> int:
        """How many ranks there are: dp_degree."""
        degree = 1
        for group in self.groups:
            degree *= group.size()
        return degree

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Everyone's numbers, by a message between hosts: a row per rank."""
        if not self.groups:
            return [list(numbers)]
        return _gather(torch.tensor([list(numbers)], dtype=torch.float64), self._cpu_groups).tolist()

    def exchange_objects(self, value: Any) -> list[Any]:
        """Everyone's object, in the same order as the rows of `exchange`."""
        values = [value]
        for group in self._cpu_groups:
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, values, group=group)
            values = [each for part in gathered for each in part]
        return values

    def gather(self, numbers: Tensor) -> Tensor:
        """Everyone's numbers, by a message between devices: [n] -> [ranks, n]; the host does not wait."""
        return _gather(numbers[None], self.groups)


def _gather(rows: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows, group=group)
        rows = torch.cat(parts)
    return rows


def _cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group itself where it carries CPU tensors, else a gloo group of the same ranks."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # this rank is one of its ranks
    return made
