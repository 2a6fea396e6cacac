"""Traffic of a rank: collectives by kind and mesh axis, in bytes of ring algorithms and seconds of a device's links."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from megabatch.simulate.devices import Device
from megabatch.torch_private.operations import name_of_operation
from megabatch.torch_private.process_groups import group_named, is_boxed_group

OVERLAPPED = "c10d"  # namespace of the collectives of DDP and FSDP2, which run beside computing
# Collectives of that namespace which a layer waits for: of context parallelism and of experts.
AWAITED = ("allgather", "alltoall", "alltoallbase")
SEND = "send"  # of a pipeline's stages
NAMESPACES = (OVERLAPPED, "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
KINDS = {  # by the start of torch's name without underscores: our name, and how often each part of a buffer is sent
    "allgather": ("all_gather", 1),
    "allreduce": ("all_reduce", 2),
    "alltoall": ("all_to_all", 1),
    "sharddimalltoall": ("all_to_all", 1),
    "reducescatter": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 1),
    "reduce": ("reduce", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "send": (SEND, 1),
}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
OF_DATA = ("dp", "ep")  # beginnings of axes whose ranks see different samples
# Operations of reductions, which are strings among the arguments as well.
OPERATIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True)
class Sent:
    """Traffic of one kind of collective along one axis."""

    collective: str
    axis: str  # of the mesh, or several joined by "+"; "world" where no axes are known
    num_ranks: int
    calls: int
    buffer_bytes: int  # the larger side of each call: the gathered result, or the input to reduce
    sent_bytes: int  # by this rank, in a ring
    seconds: float

    @property
    def reduces_gradients(self) -> bool:
        """True for a reduction over data ranks."""
        return self.collective in REDUCTIONS and self.axis.startswith(OF_DATA)

    @property
    def gathers_parameters(self) -> bool:
        """True for an all-gather over data ranks."""
        return self.collective == "all_gather" and self.axis.startswith(OF_DATA)

    def __add__(self, added: "Sent") -> "Sent":
        return self.times_plus(1, added)

    def times_plus(self, factor: float, added: "Sent | None" = None) -> "Sent":
        """Return this traffic ``factor`` times, plus another."""
        extra = added or Sent(self.collective, self.axis, self.num_ranks, 0, 0, 0, 0.0)
        return Sent(
            self.collective,
            self.axis,
            self.num_ranks,
            round(factor * self.calls) + extra.calls,
            round(factor * self.buffer_bytes) + extra.buffer_bytes,
            round(factor * self.sent_bytes) + extra.sent_bytes,
            factor * self.seconds + extra.seconds,
        )


Key = tuple[str, str, int]  # of a sum: collective, axis, ranks


class Collective(NamedTuple):
    """One call of a collective, with the tensors that it reads and writes."""

    kind: str
    rounds: int  # how often each part of the buffer is sent
    tensors: list[Tensor]
    buffer_bytes: int
    group: dist.ProcessGroup
    is_awaited: bool  # computing waits for it: it belongs to a layer, as those of tensor parallelism do
    receiver: int | None = None  # of a message from rank to rank: its index in the group


def parse_collective(func: Any, args: Any, kwargs: Any, result: Any) -> Collective | None:
    """Return the collective of an operation of torch; None for any other operation."""
    if func.namespace not in NAMESPACES:
        return None
    name = name_of_operation(func).replace("_", "")
    kind = next((value for prefix, value in KINDS.items() if name.startswith(prefix)), None)
    group = _group((*args, *kwargs.values()))
    if kind is None or group is None:
        return None
    sides = [side for value in (*args, *kwargs.values(), result) if (side := _side(value))]
    tensors = [tensor for side in sides for tensor in side]
    buffer_bytes = max((sum(tensor.nbytes for tensor in side) for side in sides), default=0)
    is_awaited = func.namespace != OVERLAPPED or name in AWAITED
    receiver = args[2] if kind[0] == SEND else None
    return Collective(*kind, tensors, buffer_bytes, group, is_awaited, receiver)


def count_traffic(collective: Collective, axes: Mapping[str, int], device: Device) -> Sent:
    """Return the traffic of this rank in a ring, which cuts the buffer into one part for each rank.

    A message from rank to rank is sent whole.
    """
    ranks = dist.get_process_group_ranks(collective.group)
    if collective.receiver is not None:
        pair, size = [ranks[collective.group.rank()], ranks[collective.receiver]], collective.buffer_bytes
        return Sent(collective.kind, find_axis(pair, axes), 2, 1, size, size, message_seconds(size, pair, device))
    num = len(ranks)
    part = -(-collective.buffer_bytes // num)
    sent = collective.rounds * (num - 1) * part
    seconds = device.latency_seconds(ranks, collective.rounds) + sent / device.sending_bytes_per_second(ranks)
    return Sent(collective.kind, find_axis(ranks, axes), num, 1, collective.buffer_bytes, sent, seconds)


def message_seconds(num_bytes: int, ranks: list[int], device: Device) -> float:
    """Return the seconds of a message between two ranks."""
    return device.latency_seconds(ranks, 1) + num_bytes / device.sending_bytes_per_second(ranks)


def find_axis(ranks: list[int], axes: Mapping[str, int]) -> str:
    """Return the mesh axes along which the ranks lie, joined by "+"."""
    if not axes:
        return "world"
    coordinates = np.unravel_index(ranks, tuple(axes.values()))
    return "+".join(name for name, along in zip(axes, coordinates, strict=True) if len(set(along.tolist())) > 1)


def _side(value: Any) -> list[Tensor]:
    """Return the tensors of an argument: a tensor, or lists of tensors, nested or not."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for member in value for tensor in _side(member)]
    return []


def _group(values: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments, boxed or by its name."""
    for value in values:
        if is_boxed_group(value):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, str) and value not in OPERATIONS:
            return group_named(value)
    return None
