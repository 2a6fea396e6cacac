"""Names of mesh axes, and what ranks along them share."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch.errors import PlanError
from megabatch.torch_private.classes import is_dtensor

# Ranks along the data axes see different samples, and ranks along the context axes stretches of the same samples.
DATA_AXES = ("dp", "dp_replicate", "dp_shard")
CONTEXT_AXES = ("cp",)
# Ranks along the model axes share samples and hold parts of the model.
MODEL_AXES = ("tp", "pp")
# Ranks along this axis see different samples and hold different experts.
EXPERT_AXIS = "ep"
AXES = (*DATA_AXES, *CONTEXT_AXES, *MODEL_AXES, EXPERT_AXIS)


def check_axes(mesh: DeviceMesh) -> None:
    """Raise `PlanError` for an axis of another name."""
    if mesh.mesh_dim_names is None:
        raise PlanError(f"the mesh has no axis names; name its axes, from {', '.join(AXES)}")
    for axis in mesh.mesh_dim_names:
        if axis not in AXES:
            raise PlanError(f"unknown mesh axis {axis!r}; expected one of {', '.join(AXES)}")


def is_expert(parameter: Tensor) -> TypeGuard[Any]:
    """Return True for a parameter of which the ranks along ``ep`` hold different experts."""
    return is_dtensor(parameter) and EXPERT_AXIS in (parameter.device_mesh.mesh_dim_names or ())


def groups_of(mesh: DeviceMesh, axes: Sequence[str]) -> list[dist.ProcessGroup]:
    """Return a process group for each of ``axes`` in the mesh. Sums over one after another are the sum over all."""
    return [mesh.get_group(axis) for axis in mesh.mesh_dim_names or () if axis in axes]
