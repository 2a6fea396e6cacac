"""Names of mesh axes, and the ranks that see different samples with the small messages between them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch.errors import PlanError
from megabatch.torch_private import groups_of_process, num_begun

DATA_AXES = ("dp", "dp_replicate", "dp_shard")  # ranks along these see different samples
CONTEXT_AXES = ("cp",)  # ranks along these see stretches of the same samples
MODEL_AXES = ("tp", "pp", "ep")  # ranks along these share samples and hold parts of the model
AXES = DATA_AXES + CONTEXT_AXES + MODEL_AXES


def check_axes(mesh: DeviceMesh) -> None:
    """Raise `PlanError` for an axis of another name, or one that is not supported."""
    if mesh.mesh_dim_names is None:
        raise PlanError(f"the mesh has no axis names; name its axes, from {', '.join(AXES)}")
    for axis, size in zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True):
        if axis not in AXES:
            raise PlanError(f"unknown mesh axis {axis!r}; expected one of {', '.join(AXES)}")
        if axis == "ep" and size > 1:
            raise PlanError(
                f"mesh axis 'ep' has {size} ranks; experts on ranks of their own are not supported: keep every expert "
                "on every rank, or shard them with dp_shard or tp"
            )


def groups_of(mesh: DeviceMesh, axes: Sequence[str]) -> list[dist.ProcessGroup]:
    """Return a process group for each of ``axes`` in the mesh. Sums over one after another are the sum over all."""
    return [mesh.get_group(axis) for axis in mesh.mesh_dim_names or () if axis in axes]


@dataclass
class DataRanks:
    """The ranks that work on one update. With one rank every message is free.

    Rows of `exchange_numbers` come in the order of data ranks, then context ranks, then those that hold parts of the
    model: the first ``degree`` rows are of different samples, the first ``num_weighing`` of different targets.
    """

    data_groups: Sequence[dist.ProcessGroup] = ()  # the inner axis first, so that rows come in the order of ranks
    context_groups: Sequence[dist.ProcessGroup] = ()
    tensor_groups: Sequence[dist.ProcessGroup] = ()
    pipeline_groups: Sequence[dist.ProcessGroup] = ()
    groups: list[dist.ProcessGroup] = field(init=False)  # gradients, totals and weights are summed over these
    degree: int = field(init=False)  # ranks that see different samples: dp_degree
    context_degree: int = field(init=False)  # stretches that each sequence is cut into
    num_weighing: int = field(init=False)  # ranks that see different targets: weights are summed over them
    num_all: int = field(init=False)  # with the ranks that hold other parts of the model
    is_alone: bool = field(init=False)  # no other rank works on the update
    _cpu_groups: list[dist.ProcessGroup] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.data_groups, self.context_groups, self.tensor_groups, self.pipeline_groups = (
            [group for group in groups if group.size() > 1]
            for groups in (self.data_groups, self.context_groups, self.tensor_groups, self.pipeline_groups)
        )
        self.groups = [*self.data_groups, *self.context_groups]
        all_groups = [*self.groups, *self.tensor_groups, *self.pipeline_groups]
        self.degree = prod(group.size() for group in self.data_groups)
        self.context_degree = prod(group.size() for group in self.context_groups)
        self.num_weighing = self.degree * self.context_degree
        self.num_all = prod(group.size() for group in all_groups)
        self.is_alone = not all_groups
        self._cpu_groups = [_cpu_group(group) for group in all_groups]

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> "DataRanks":
        """Return the ranks along the axes of a mesh, by their names. Raises `PlanError` for unknown names."""
        check_axes(mesh)
        data, *others = (groups_of(mesh, axes) for axes in (DATA_AXES, CONTEXT_AXES, ("tp",), ("pp",)))
        return cls(data[::-1], *others)

    @property
    def context_rank(self) -> int:
        """Index of the stretch of each sequence that this rank sees."""
        return self.context_groups[0].rank() if self.context_groups else 0

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The ranks with the other stages of this rank's pipeline."""
        return self.pipeline_groups[0] if self.pipeline_groups else None

    def exchange_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, a row for each. This takes one message between hosts."""
        if not self._cpu_groups:
            return [list(numbers)]
        return _gather(torch.tensor([list(numbers)], dtype=torch.float64, device="cpu"), self._cpu_groups).tolist()

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return every rank's object, in the order of the rows of `exchange_numbers`."""
        values = [value]
        for group in self._cpu_groups:
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, values, group=group)
            values = [each for part in gathered for each in part]
        return values

    def gather_on_device(self, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks that see different targets: [n] -> [num_weighing, n].

        This takes one message between devices. The host does not wait.
        """
        return _gather(numbers[None], self.groups)


def num_collectives() -> int | None:
    """Return the number of collectives that this process has begun. None if a backend does not count them."""
    with contextlib.suppress(RuntimeError):
        return sum(map(num_begun, groups_of_process()))
    return None


def _gather(rows: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    for group in groups:
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows, group=group)
        rows = torch.cat(parts)
    return rows


def _cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group itself if it carries CPU tensors, else a new gloo group of the same ranks."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # this rank is one of its ranks
    return made
