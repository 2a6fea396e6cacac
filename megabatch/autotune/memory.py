"""Measurements of memory and time: the memory of this rank in use, free, and at the peak of a piece of work.

On a GPU torch's caching allocator reports all of it. On the CPU torch's old profiler reports the memory of tensors, and
the kernel that of the process and the host. No other module of the library reads a file or a clock.
"""

import contextlib
import ctypes
import gc
import resource
import socket
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import optim

from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import local
from megabatch.errors import PlanError
from megabatch.torch_private.operations import start_profiler, stop_profiler

KEPT_FREE = 0.1  # fraction of free memory without memory_bytes: for fragments and other processes
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
GIVE_A_BOUND = "give max_microbatch_tokens= or micro_batch_size="
# Tensors for each parameter, and the settings that add one each.
STATES: dict[type[optim.Optimizer], tuple[int, tuple[str, ...]]] = {
    optim.SGD: (0, ("momentum",)),
    optim.Adam: (2, ("amsgrad",)),
    optim.RMSprop: (1, ("momentum", "centered")),
    optim.Adafactor: (1, ()),
    optim.Adagrad: (1, ()),
    optim.ASGD: (1, ()),
}
UNREADABLE = (OSError, ValueError, KeyError)  # errors of a kernel file that is missing or has another format


@dataclass(frozen=True)
class Budget:
    """Memory of this rank on its device, in bytes."""

    used: float  # in use now
    limit: float  # the most that it may use
    there: float  # the most that it can use before memory runs out


@dataclass
class MemoryUse:
    """Memory of a piece of work, set when it is done."""

    peak_bytes: float = 0.0  # beyond the memory in use before
    left_bytes: float = 0.0  # of that, still in use afterwards


@dataclass
class Duration:
    """Time of a piece of work, set when it is done."""

    seconds: float = 0.0


def check_device(device: torch.device) -> None:
    """Raise `PlanError` for a device that cannot be measured."""
    if device.type not in ("cpu", "cuda"):
        raise PlanError(f'memory of a device of type {device.type!r} cannot be measured for "auto"; {GIVE_A_BOUND}')


def check_measurable(device: torch.device) -> None:
    """Raise `PlanError` where memory cannot be measured now: a profiler runs, or the system does not tell."""
    with measure_memory(device):
        pass
    if device.type == "cpu":
        resident_bytes()
        free_bytes()


def measure_budget(device: torch.device, cap_bytes: float | None, ranks: DataRanks) -> Budget:
    """Measure the memory that this rank uses and may use; collective. Raise `PlanError` without numbers."""
    hosts: list[str] = ranks.exchange_objects(socket.gethostname())
    gc.collect()
    _trim()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        used, free = float(torch.cuda.memory_reserved(device)), free_on(device)
    else:
        used, free = resident_bytes(), free_on(device) / hosts.count(socket.gethostname())
    limit, there = used + free * (1 - KEPT_FREE), used + free
    if cap_bytes is not None:  # other work may need the rest, even while this is measured
        limit = there = min(limit, cap_bytes)
    return Budget(used, limit, there)


def free_on(device: torch.device) -> float:
    """Return the bytes that a device can still give; those of a CPU are for all processes of the host together.

    The limit of the process's control group counts, and `torch.cuda.set_per_process_memory_fraction`. Raises
    `PlanError` where the system does not tell.
    """
    if device.type != "cuda":
        return free_bytes()
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return min(float(free), limit - torch.cuda.memory_reserved(device))


def device_text(device: torch.device) -> str:
    """Return the name of a device and the memory that it can give this process: "cpu, 62 GiB".

    What was measured on one device holds on another of the same text.
    """
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    with contextlib.suppress(*UNREADABLE):
        total = min([_parse_table(PROC / "meminfo")["MemTotal"], *(limit for limit, _ in _limits())])
        return f"{device.type}, {total / 2**30:.0f} GiB"
    return device.type


@contextlib.contextmanager
def measure_memory(device: torch.device) -> Generator[MemoryUse]:
    """Measure the memory of the work inside; wait for the device before and after."""
    needed = MemoryUse()
    with _measuring_cuda(needed, device) if device.type == "cuda" else _measuring_cpu(needed):
        yield needed
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def measure_time(device: torch.device) -> Generator[Duration]:
    """Measure the time of the work inside; wait for the device before and after."""
    took = Duration()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    yield took
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    took.seconds = time.perf_counter() - start


@contextlib.contextmanager
def _measuring_cuda(needed: MemoryUse, device: torch.device) -> Generator[None]:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    yield
    needed.peak_bytes = float(torch.cuda.max_memory_reserved(device) - reserved)
    needed.left_bytes = float(torch.cuda.memory_allocated(device) - allocated)


@contextlib.contextmanager
def _measuring_cpu(needed: MemoryUse) -> Generator[None]:
    """Measure with the old profiler, which prints nothing and does not end another one."""
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
    events = [event for events in threads for event in events if event.kind() == "memory_alloc"]
    total = 0
    for event in sorted(events, key=start.cpu_elapsed_us):
        total += event.cpu_memory_usage()
        needed.peak_bytes = max(needed.peak_bytes, total)
    needed.left_bytes = float(total)
    del threads, events, start
    _trim()


def _trim() -> None:
    """Return free pages to the system, which glibc would keep after a large microbatch and count for the next."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # the system does not have it
        ctypes.CDLL(None).malloc_trim(0)


def estimate_state_bytes(optimizer: optim.Optimizer | None, parameters: list[torch.nn.Parameter]) -> float:
    """Return the bytes of optimizer states that do not exist yet, in the dtype of their parameters.

    Those of `LowBits` have twice the size, and its low bits count too. Without an optimizer it assumes two states for
    each parameter.
    """
    if optimizer is None:
        return 2.0 * sum(local(parameter.data).nbytes for parameter in parameters)
    missing = [
        (group, local(parameter.data))
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not optimizer.state.get(parameter)
    ]
    # Only `LowBits` has a dtype of its states.
    if not isinstance(getattr(optimizer, "state_dtype", None), torch.dtype):
        return sum(_num_states(optimizer, group) * values.nbytes for group, values in missing)
    inner: optim.Optimizer = cast(Any, optimizer).optimizer
    every = [(_num_states(inner, group), values) for group, values in missing]
    return sum(values.nbytes * (2 * num + 1 if values.dtype == torch.bfloat16 else num) for num, values in every)


def _num_states(optimizer: optim.Optimizer, group: dict[str, Any]) -> int:
    """Return the number of states of a parameter's size; two for an unknown class."""
    if "ns_steps" in group:  # torch's Muon, alone or beside another optimizer
        return 1
    for kind, (always, asked_for) in STATES.items():
        if isinstance(optimizer, kind):
            return always + sum(bool(group.get(key)) for key in asked_for)
    return 2


def resident_bytes() -> float:
    """Return the resident bytes of this process, without files. Raise `PlanError` if the system has no numbers."""
    try:
        status = _parse_table(PROC / "self/status")
        return status["RssAnon"] + status["RssShmem"]
    except UNREADABLE:
        raise PlanError(f'this system does not say what memory a process uses, for "auto"; {GIVE_A_BOUND}') from None


def free_bytes() -> float:
    """Return the free bytes of this host, or of what limits this process: a control group, or ``ulimit -v``."""
    try:
        free = _parse_table(PROC / "meminfo")["MemAvailable"]
    except UNREADABLE:
        raise PlanError(f'this system does not say what memory is free, for "auto"; {GIVE_A_BOUND}') from None
    limits = _limits()
    with contextlib.suppress(*UNREADABLE):
        addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
        if addresses != resource.RLIM_INFINITY:
            limits.append((addresses, _parse_table(PROC / "self/status")["VmSize"]))
    return max(0.0, min([free, *(limit - used for limit, used in limits)]))


def _limits() -> list[tuple[float, float]]:
    """Return the limit and use of each control group above this process, of either version."""
    limits: list[tuple[float, float]] = []
    with contextlib.suppress(*UNREADABLE):
        for line in (PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                base = CGROUP / controllers
                within = base / path.strip("/")  # a container's file system may begin at its own group
                for group in (within, *within.parents):
                    limits += _limit_of(group) if group.is_relative_to(base) else []
    return limits


def _limit_of(group: Path) -> list[tuple[float, float]]:
    for limit, names in {
        "memory.max": ("anon", "shmem"),
        "memory.limit_in_bytes": ("total_rss", "total_shmem"),
    }.items():
        with contextlib.suppress(*UNREADABLE):
            limit_bytes = float((group / limit).read_text())  # "max" is no number and no limit
            used = _parse_table(group / "memory.stat")
            return [(limit_bytes, sum(used.get(name, 0.0) for name in names))]
    return []


def _parse_table(path: Path) -> dict[str, float]:
    """Parse a file of lines "name: number kB" or "name number"; in bytes."""
    rows = [line.split() for line in path.read_text().splitlines()]
    return {
        row[0].rstrip(":"): float(row[1]) * (1024 if row[-1] == "kB" else 1)
        for row in rows
        if len(row) > 1 and row[1].isdecimal()
    }
