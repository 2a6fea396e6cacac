"""Process groups, stores and meshes."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def groups_of_process() -> list[dist.ProcessGroup]:
    """``distributed_c10d._world.pg_map``: every process group that this process is in."""
    return list(cast(Any, dist).distributed_c10d._world.pg_map)


def default_store() -> Any:
    """``distributed_c10d._get_default_store``: the store that init_process_group has made."""
    return cast(Any, dist).distributed_c10d._get_default_store()


def group_named(name: str) -> dist.ProcessGroup:
    """``distributed_c10d._resolve_process_group``: the group that a functional collective names."""
    return cast(Any, dist).distributed_c10d._resolve_process_group(name)


def is_boxed_group(value: object) -> bool:
    """``ScriptObject._type``: whether an argument of an operation is a process group in a box."""
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in cast(Any, value)._type().qualified_name()


def make_fake_store() -> Any:
    """Return the store of the backend "fake", whose collectives do nothing. The import registers the backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def num_begun(group: Any) -> int:
    """``Backend._get_sequence_number_for_group``: collectives begun. Raises RuntimeError where none is counted."""
    backends = [group._get_backend(device) for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``DeviceMesh._get_root_mesh``: the mesh that this one was taken from."""
    return mesh._get_root_mesh()  # pyright: ignore[reportPrivateUsage]
