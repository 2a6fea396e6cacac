"""Devices by name, and the time that an operation takes on one.

Data sheets of NVIDIA (A100, H100, H200, HGX B200, L40S, RTX 4090): dense rates without sparsity, float32 without TF32,
memory as the driver reports it. NVLink and PCIe reach about four fifths of the printed rate, which is the rate here.

An operation takes as long as its arithmetic, as reading and writing its memory, or as its host takes to launch it,
whichever is longest. On a CPU the launch comes before the rest. `Device.efficiency` is fitted to published runs
(benchmarks/published.py); the latencies of collectives are those by which NCCL chooses its algorithms (its
src/graph/tuning.cc: LL128, ring and tree).

Offloaded memory moves over PCIe (x16: 32 GB/s a direction for generation 4, 64 for 5). The host computes on it at the
rate of the host's memory, of which each rank of a node has an eighth: DGX A100 (two sockets with 8 channels of
DDR4-3200: 410 GB/s), DGX H100 (DDR5-4800: 614) and DGX B200 (DDR5-5600: 717). Other devices have the A100's host. Both
count with four fifths of the printed rate; no run has measured them.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megabatch.errors import PlanError
from megabatch.torch_private.operations import packet_of, schema_of

MIB, GIB, GIGA, TERA = 2**20, 2**30, 10**9, 10**12
LINK_SHARE = 0.8  # of the printed rate; NCCL's ring on eight A100 moves 235 of 300 GB/s
START_SECONDS = 14e-6  # of a collective
LINK_SECONDS, NETWORK_SECONDS = 1.9e-6, 4e-6  # of a message from rank to rank, inside of a node and between nodes
# Of the time of a collective, lost to computing beside it, which takes 1.189 times as long: the mean that
# arXiv:2507.03114 measured on A100, H100, MI210 and MI250.
CONTENTION = 1 - 1 / 1.189
MARGIN = 1 / 8  # of reserved memory: published runs with bfloat16 states held up to 1.11 times what is replayed
LAUNCH_SECONDS = 6e-6  # of an operation that torch runs eagerly, on the host


@dataclass(frozen=True)
class Device:
    """One accelerator of a rank, and its links to others."""

    name: str
    memory_bytes: int
    flops: Mapping[torch.dtype, float]  # per second, at most
    memory_bytes_per_second: float
    link_bytes_per_second: float  # from a rank to the ranks of its node
    network_bytes_per_second: float = 25 * GIGA  # from a rank to another node: 200 Gbit/s
    ranks_per_node: int = 8
    efficiency: float = 0.6  # fraction of ``flops`` that the matrix products of a large model reach
    overhead_bytes: int = 2 * GIB  # outside of tensors: context, NCCL's buffers, cuBLAS's workspaces
    margin: float = MARGIN  # of what its allocator reserves, for fragmentation that a replay does not see
    launch_seconds: float = LAUNCH_SECONDS  # of its host, per operation
    start_seconds: float = START_SECONDS  # of a collective; 0: collectives have no latency
    attention_flops: Mapping[torch.dtype, float] = field(default_factory=dict[torch.dtype, float])  # where measured
    pcie_bytes_per_second: float = LINK_SHARE * 32 * GIGA  # to or from its host
    host_bytes_per_second: float = LINK_SHARE * 51 * GIGA  # of a rank's part of the host's memory
    is_cpu: bool = False  # the host computes itself, so that it launches nothing ahead; torch caches no memory of it

    @property
    def host(self) -> "Device":
        """Return the rank's part of the host, which computes on what is offloaded."""
        return replace(self, memory_bytes_per_second=self.host_bytes_per_second)

    def flops_per_second(self, dtype: torch.dtype, *, is_attention: bool = False) -> float:
        """Return the rate that matrix products of a dtype reach, or attention."""
        if is_attention and dtype in self.attention_flops:
            return self.attention_flops[dtype]
        return self.efficiency * self.flops.get(dtype, self.flops[torch.float32])

    def sending_bytes_per_second(self, ranks: list[int]) -> float:
        """Return the rate of a rank in a ring over ``ranks``; between nodes its neighbors' network cards help."""
        here = sum(rank // self.ranks_per_node == ranks[0] // self.ranks_per_node for rank in ranks)
        if here == len(ranks):
            return self.link_bytes_per_second
        return min(self.link_bytes_per_second, here * self.network_bytes_per_second)

    def latency_seconds(self, ranks: list[int], rounds: int) -> float:
        """Return the latency of a collective: of a ring over the ranks, or, for an all-reduce, of a tree over nodes."""
        if not self.start_seconds or len(ranks) == 1:
            return 0.0
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        ring = (len(ranks) - nodes) * LINK_SECONDS + (nodes - 1) * NETWORK_SECONDS
        tree = (len(ranks) / nodes - 1) * LINK_SECONDS + math.ceil(math.log2(nodes)) * NETWORK_SECONDS
        return self.start_seconds + rounds * (min(ring, tree) if rounds == 2 else ring)

    def with_measured_links(
        self, num_ranks: int, ranks_per_node: int, latency_seconds: float, bytes_per_second: float
    ) -> "Device":
        """Return the device with the bandwidth and the start of an all-gather that ran in a ring over all ranks.

        It measures NVLink inside of one node and the network between several.
        """
        nodes = -(-num_ranks // ranks_per_node)
        hops = (num_ranks - nodes) * LINK_SECONDS + (nodes - 1) * NETWORK_SECONDS
        start = max(latency_seconds - hops, self.launch_seconds)  # a collective is launched too
        if nodes == 1:
            return replace(self, link_bytes_per_second=bytes_per_second, start_seconds=start)
        return replace(
            self,
            link_bytes_per_second=max(self.link_bytes_per_second, bytes_per_second),
            network_bytes_per_second=bytes_per_second / ranks_per_node,
            ranks_per_node=ranks_per_node,
            start_seconds=start,
        )


def _rates(bfloat16: float, float32: float, float64: float) -> dict[torch.dtype, float]:
    """Return the rates of matrix products by dtype, from teraflops per second."""
    half = bfloat16 * TERA
    return {
        torch.bfloat16: half,
        torch.float16: half,
        torch.float32: float32 * TERA,
        torch.float64: float64 * TERA,
    }


def _link(gigabytes: float) -> float:
    """Return the usable rate of NVLink or PCIe in one direction, from the printed one."""
    return LINK_SHARE * gigabytes * GIGA


class _Host(TypedDict):
    pcie_bytes_per_second: float
    host_bytes_per_second: float


def _host(pcie: float, memory: float) -> _Host:
    """Return the usable rates of PCIe and of a rank's part of the host's memory, from printed gigabytes per second."""
    return {"pcie_bytes_per_second": _link(pcie), "host_bytes_per_second": _link(memory)}


def busy_seconds(
    compute_seconds: float, host_seconds: float, collective_seconds: float, *, is_cpu: bool = False
) -> float:
    """Return the seconds of computing, of the launches of its host, and of the collectives beside it.

    A CPU launches an operation before it computes it, a GPU's host launches the next ones meanwhile.
    """
    computing = compute_seconds + CONTENTION * collective_seconds + (host_seconds if is_cpu else 0.0)
    return max(computing, host_seconds, collective_seconds)


_A100, _H100 = _rates(312, 19.5, 19.5), _rates(989, 67, 67)
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40g", 40_960 * MIB, _A100, 1555 * GIGA, _link(300), efficiency=0.7),
        Device("a100-80g", 81_920 * MIB, _A100, 2039 * GIGA, _link(300), efficiency=0.7),
        Device("h100-80g", 81_559 * MIB, _H100, 3350 * GIGA, _link(450), 50 * GIGA, efficiency=0.6, **_host(64, 77)),
        Device("h200", 143_771 * MIB, _H100, 4800 * GIGA, _link(450), 50 * GIGA, efficiency=0.75, **_host(64, 77)),
        Device("b200", 183_359 * MIB, _rates(2250, 75, 37), 8000 * GIGA, _link(900), 50 * GIGA, **_host(64, 90)),
        Device("l40s", 46_068 * MIB, _rates(362, 91.6, 1.4), 864 * GIGA, _link(32)),
        Device("rtx4090", 24_564 * MIB, _rates(165, 82.6, 1.3), 1008 * GIGA, _link(32)),
        # A core of a server: nothing is measured, it is a placeholder for CPU runs.
        Device(
            "cpu",
            64 * GIB,
            _rates(0.1, 0.1, 0.05),
            20 * GIGA,
            5 * GIGA,
            1 * GIGA,
            efficiency=0.5,
            overhead_bytes=0,
            margin=0.0,
            start_seconds=0.0,
            pcie_bytes_per_second=math.inf,  # nothing is copied
            host_bytes_per_second=20 * GIGA,
            is_cpu=True,
        ),
    )
}
"""The devices that are known by name, with numbers of their data sheets."""
ALIASES = {"a100": "a100-80g", "h100": "h100-80g"}


def device_named(name: str) -> Device:
    """Return the device of a name, such as "h100-80g". Raises `PlanError` for one that is not known."""
    device = DEVICES.get(ALIASES.get(name.lower(), name.lower()))
    if device is None:
        known = ", ".join([*DEVICES, *ALIASES])
        raise PlanError(f"the device {name!r} is not known; name one of {known}")
    return device


aten = torch.ops.aten
FREE = {  # operations that move no bytes, besides torch's views
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._reshape_alias,
    aten.lift_fresh,
    aten.set_,
    aten.resize_,
}
# Operations whose operands a CPU casts to one dtype before it computes.
PROMOTING = {aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_}


class Cost(NamedTuple):
    """Cost of one operation."""

    flops: int
    seconds: float
    is_arithmetic: bool  # true if arithmetic takes longer than memory


NOTHING = Cost(0, 0.0, False)


def cost_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, device: Device) -> Cost:
    """Return the cost of an operation of torch that is no view, from the shapes of its arguments and results."""
    if packet_of(func) in FREE or func.namespace not in ("aten", "fsdp"):
        return NOTHING
    written = (result,) if result is not None else written_by(func, args)
    tensors = [*tensors_in(args), *tensors_in(kwargs.values()), *tensors_in(written)]
    moving = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / device.memory_bytes_per_second
    formula = FORMULAS.get(packet_of(func)) or flop_registry.get(packet_of(func))
    if formula is None:
        return Cost(0, moving, False)
    flops = int(formula(*args, **kwargs, out_val=result))
    is_attention = "scaled_dot_product" in str(packet_of(func))
    arithmetic = flops / device.flops_per_second(next(tensors_in((result,))).dtype, is_attention=is_attention)
    return Cost(flops, max(moving, arithmetic), arithmetic > moving)


def cast_bytes(func: Any, args: Sequence[Any]) -> int:
    """Return the bytes of the copies that a CPU makes of an operation's operands, in the dtype of its arithmetic.

    A GPU casts inside of its kernel (`TensorIteratorBase::compute_types` in torch).
    """
    if packet_of(func) not in PROMOTING or not all(isinstance(operand, Tensor) for operand in args[:2]):
        return 0
    first, second = args[:2]
    if first.dtype == second.dtype:
        return 0
    dtype = torch.result_type(first, second)
    return sum(operand.numel() * dtype.itemsize for operand in (first, second) if operand.dtype != dtype)


def written_by(func: Any, args: Sequence[Any]) -> list[Any]:
    """Return the arguments that an operation writes to, which is to return nothing: those of ``foreach`` and fused."""
    pairs = zip(schema_of(func).arguments, args, strict=False)
    return [value for argument, value in pairs if argument.is_write]


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return sdpa_flop_count(query.shape, _with_heads_of(query, key), _with_heads_of(query, value))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    repeated_key, repeated_value = _with_heads_of(query, key), _with_heads_of(query, value)
    return sdpa_backward_flop_count(grad.shape, query.shape, repeated_key, repeated_value)


def _with_heads_of(query: Tensor, grouped: Tensor) -> tuple[int, ...]:
    """Return the shape of keys or values of grouped heads, repeated as in a kernel. Torch 2.11 counts no groups."""
    return (*grouped.shape[:1], *query.shape[1:2], *grouped.shape[2:])


def _grouped_mm(tokens: Tensor, weights: Tensor, *_: object, **__: object) -> int:
    """Count [T, K] times one of [E, K, N] per row; in the backward of weights, [K, T] times [T, N] in parts of T."""
    return 2 * tokens.shape[-2] * tokens.shape[-1] * weights.shape[-1]


# Operations of a CPU, a fake one too, for which torch has no formula.
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _grouped_mm,
}
# Torch's own formulas of attention, of which those of torch 2.11 refuse grouped heads.
for operation in flop_registry:
    if "scaled_dot_product" in str(operation):
        FORMULAS[operation] = _attention_backward if "backward" in str(operation) else _attention
