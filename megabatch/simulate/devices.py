"""Devices by name: what they hold, how fast they compute, and how fast they send.

Data sheets of NVIDIA (A100, H100, H200, HGX B200, L40S, RTX 4090): dense rates without sparsity, float32 without TF32,
memory as the driver reports it. NVLink and PCIe reach about four fifths of what is printed, which is what is here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megabatch.errors import PlanError

MIB, GIB, GIGA, TERA = 2**20, 2**30, 10**9, 10**12
LINK_SHARE = 0.8  # of the printed rate; NCCL's ring on eight A100 moves 235 of 300 GB/s


@dataclass(frozen=True)
class Device:
    """One accelerator of a rank, and the links it has to others."""

    name: str
    memory_bytes: int
    flops: Mapping[torch.dtype, float]  # per second, at most
    memory_bytes_per_second: float
    link_bytes_per_second: float  # that a rank can send to ranks of its node
    network_bytes_per_second: float = 25 * GIGA  # that a rank can send to another node: 200 Gbit/s
    ranks_per_node: int = 8
    efficiency: float = 0.5  # of ``flops`` that the matrix products of a large model reach
    overhead_bytes: int = 2 * GIB  # that no tensor can use: context, NCCL's buffers, cuBLAS's workspaces

    def flops_per_second(self, dtype: torch.dtype) -> float:
        """What matrix products of a dtype reach."""
        return self.efficiency * self.flops.get(dtype, self.flops[torch.float32])

    def sending_bytes_per_second(self, ranks: list[int]) -> float:
        """What a rank can send in a ring over ``ranks``: between nodes, its neighbours' network cards help."""
        here = sum(rank // self.ranks_per_node == ranks[0] // self.ranks_per_node for rank in ranks)
        if here == len(ranks):
            return self.link_bytes_per_second
        return min(self.link_bytes_per_second, here * self.network_bytes_per_second)


def _rates(bfloat16: float, float32: float, float64: float) -> dict[torch.dtype, float]:
    """Of matrix products, given in teraflops per second."""
    half = bfloat16 * TERA
    return {
        torch.bfloat16: half,
        torch.float16: half,
        torch.float32: float32 * TERA,
        torch.float64: float64 * TERA,
    }


def _link(gigabytes: float) -> float:
    """What NVLink or PCIe carries in one direction, from what is printed of it."""
    return LINK_SHARE * gigabytes * GIGA


_A100, _H100 = _rates(312, 19.5, 19.5), _rates(989, 67, 67)
DEVICES = {
    device.name: device
    for device in (
        Device("a100-40g", 40_960 * MIB, _A100, 1555 * GIGA, _link(300)),
        Device("a100-80g", 81_920 * MIB, _A100, 2039 * GIGA, _link(300)),
        Device("h100-80g", 81_559 * MIB, _H100, 3350 * GIGA, _link(450), 50 * GIGA),
        Device("h200", 143_771 * MIB, _H100, 4800 * GIGA, _link(450), 50 * GIGA),
        Device("b200", 183_359 * MIB, _rates(2250, 75, 37), 8000 * GIGA, _link(900), 50 * GIGA),
        Device("l40s", 46_068 * MIB, _rates(362, 91.6, 1.4), 864 * GIGA, _link(32)),
        Device("rtx4090", 24_564 * MIB, _rates(165, 82.6, 1.3), 1008 * GIGA, _link(32)),
        # A core of a server: nothing measured, a place to put what runs there.
        Device("cpu", 64 * GIB, _rates(0.1, 0.1, 0.05), 20 * GIGA, 5 * GIGA, 1 * GIGA, overhead_bytes=0),
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
