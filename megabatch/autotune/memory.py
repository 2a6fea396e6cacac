"""What memory this rank uses, may use, and needs at the peak. The only clock, and the only measuring place.

On a GPU torch's caching allocator tells all of it. On the CPU torch's allocator tells what tensors take while its own
profiler runs, and the kernel what the process has and what there is; no other module of the library reads a file.
"""

import contextlib
import ctypes
import gc
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import optim

from megabatch.errors import PlanError
from megabatch.torch_private import start_profiler, stop_profiler
from megabatch.wrappers.base import local
from megabatch.wrappers.mesh import DataRanks

KEPT_FREE = 0.1  # of what is free, where no cap is given: for what no microbatch shows, fragments and neighbours
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
GIVE_A_BOUND = "give max_microbatch_tokens= or micro_batch_size="
STATES: dict[type[optim.Optimizer], tuple[int, tuple[str, ...]]] = {  # tensors, and the settings that add one each
    optim.SGD: (0, ("momentum",)),
    optim.Adam: (2, ("amsgrad",)),
    optim.RMSprop: (1, ("momentum", "centered")),
    optim.Adafactor: (1, ()),
    optim.Adagrad: (1, ()),
    optim.ASGD: (1, ()),
    optim.Muon: (1, ()),
}
UNREADABLE = (OSError, ValueError, KeyError)  # of a file that the kernel does not have, or has otherwise


@dataclass(frozen=True)
class Budget:
    """Bytes of this rank, on its device."""

    used: float  # now
    limit: float  # what it may come to
    there: float  # what it could come to before memory runs out


@dataclass
class Needed:
    """What a piece of work took, once it is done."""

    peak_bytes: float = 0.0  # beyond what was there before it
    left_bytes: float = 0.0  # of that, what is still there after it


@dataclass
class MemoryUse:
    """How long a piece of work took, once it is done."""

    seconds: float = 0.0


def check_device(device: torch.device) -> None:
    """Raise `PlanError` for a device that cannot be measured."""
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f'memory of a device of type {device.type!r} cannot be measured for "auto"; {GIVE_A_BOUND}')


def check_measurable(device: torch.device) -> None:
    """Raise `PlanError` where measuring cannot begin now."""
    with measuring(device):
        pass
    if device.type == "cpu":
        resident_bytes()
        free_bytes()


def budget_of(device: torch.device, cap_bytes: float | None, ranks: DataRanks) -> Budget:
    """What this rank uses and may use; collective. Raises `PlanError` where the system does not tell."""
    hosts: list[str] = ranks.exchange_objects(socket.gethostname())
    gc.collect()
    _trim()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        used, free = float(torch.cuda.memory_reserved(device)), free_on(device)
    else:
        used, free = resident_bytes(), free_on(device) / hosts.count(socket.gethostname())
    limit = used + free * (1 - KEPT_FREE)
    return Budget(used, limit if cap_bytes is None else min(limit, cap_bytes), used + free)


def free_on(device: torch.device) -> float:
    """What the device can still give, a CPU to all processes together. Raises `PlanError` where none can tell."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else free_bytes()


def device_text(device: torch.device) -> str:
    """The device and the memory that it can give this process, by which another is told from it."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    with contextlib.suppress(*UNREADABLE):
        whole = min([_table(PROC / "meminfo")["MemTotal"], *(limit for limit, _ in _limits())])
        return f"{device.type}, {whole / 2**30:.0f} GiB"
    return device.type


@contextlib.contextmanager
def measuring(device: torch.device) -> Generator[Needed]:
    """Measures what is done inside; it waits for the device before and after."""
    needed = Needed()
    with _measuring_cuda(needed, device) if device.type == "cuda" else _measuring_cpu(needed):
        yield needed
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def timing(device: torch.device) -> Generator[MemoryUse]:
    """Times what is done inside; it waits for the device before and after."""
    took = MemoryUse()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    yield took
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took.seconds = time.perf_counter() - start


@contextlib.contextmanager
def _measuring_cuda(needed: Needed, device: torch.device) -> Generator[None]:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    yield
    needed.peak_bytes = float(torch.cuda.max_memory_reserved(device) - reserved)
    needed.left_bytes = float(torch.cuda.memory_allocated(device) - allocated)


@contextlib.contextmanager
def _measuring_cpu(needed: Needed) -> Generator[None]:
    """By the old profiler, which says nothing by itself and does not end another that runs already."""
    try:
        start_profiler()
    except RuntimeError:
        raise PlanError(
            "a profiler runs, and memory is measured with torch's own; start it after the bound is chosen, or "
            f"{GIVE_A_BOUND}"
        ) from None
    try:
        yield
    finally:
        threads: list[list[Any]] = stop_profiler()
    start = threads[0][0]
    events = [(start.cpu_elapsed_us(each), each) for events in threads for each in events]
    total = 0
    for _, each in sorted(events, key=lambda event: event[0]):
        if each.kind() == "memory_alloc":
            total += each.cpu_memory_usage()
            needed.peak_bytes = max(needed.peak_bytes, total)
    needed.left_bytes = float(total)
    del threads, events, start
    _trim()


def _trim() -> None:
    """Give free pages back: what glibc keeps of a large measured microbatch would lie beside the small ones to come."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # of a system without it
        ctypes.CDLL(None).malloc_trim(0)


class HighWater:
    """The most memory that this process has had on its device since this was made, as the system counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(*UNREADABLE):
            (PROC / "self/clear_refs").write_text("5")

    def bytes(self) -> float | None:
        """On a GPU what was reserved; on the CPU what was resident, without files. None where nobody can tell."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_reserved(self._device))
        try:
            status = _table(PROC / "self/status")
        except UNREADABLE:
            return None
        return status["VmHWM"] - status["RssFile"]


def bytes_to_come(optimizer: optim.Optimizer | None, parameters: list[torch.nn.Parameter]) -> float:
    """What the optimizer's states will take that are not there yet, each in the parameter's dtype.

    Without an optimizer two for each parameter.
    """
    if optimizer is None:
        return 2.0 * sum(local(each.data).nbytes for each in parameters)
    return sum(
        _num_states(optimizer, group) * local(each.data).nbytes
        for group in optimizer.param_groups
        for each in group["params"]
        if each.requires_grad and not optimizer.state.get(each)
    )


def _num_states(optimizer: optim.Optimizer, group: dict[str, Any]) -> int:
    """Of a parameter's size; two where the class is not known."""
    for kind, (always, asked_for) in STATES.items():
        if isinstance(optimizer, kind):
            return always + sum(bool(group.get(key)) for key in asked_for)
    return 2


def resident_bytes() -> float:
    """What this process has in memory, without what files would give again. Raises `PlanError` where none can tell."""
    try:
        status = _table(PROC / "self/status")
        return status["RssAnon"] + status["RssShmem"]
    except UNREADABLE:
        raise PlanError(f'this system does not say what memory a process uses, for "auto"; {GIVE_A_BOUND}') from None


def free_bytes() -> float:
    """What this host, or the group that this process is limited with, can still give."""
    try:
        free = _table(PROC / "meminfo")["MemAvailable"]
    except UNREADABLE:
        raise PlanError(f'this system does not say what memory is free, for "auto"; {GIVE_A_BOUND}') from None
    return max(0.0, min([free, *(limit - used for limit, used in _limits())]))


def _limits() -> list[tuple[float, float]]:
    """The limit of each control group above this process, of either version, and what is used of it."""
    found: list[tuple[float, float]] = []
    with contextlib.suppress(*UNREADABLE):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                base = CGROUP / controllers
                within = base / path.strip("/")  # in a container the file system may begin at its own group
                found += [each for group in (within, *within.parents) if group.is_relative_to(base)
                          for each in _limit_of(group)]  # fmt: skip
    return found


def _limit_of(group: Path) -> list[tuple[float, float]]:
    for limit, names in {
        "memory.max": ("anon", "shmem"),
        "memory.limit_in_bytes": ("total_rss", "total_shmem"),
    }.items():
        with contextlib.suppress(*UNREADABLE):
            whole = float((group / limit).read_text())  # "max" is no number: no limit
            used = _table(group / "memory.stat")
            return [(whole, sum(used.get(name, 0.0) for name in names))]
    return []


def _table(path: Path) -> dict[str, float]:
    """The numbers of a file of lines "name: number kB", or of "name number"; in bytes."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return {
        row[0].rstrip(":"): float(row[1]) * (1024 if row[-1] == "kB" else 1)
        for row in rows
        if len(row) > 1 and row[1].isdecimal()
    }
