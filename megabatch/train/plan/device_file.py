"""Device files: the speed of this machine, measured, written as TOML and read in place of a data sheet's.

Each figure is the median of `REPEATS` timings after `WARM_UP` untimed runs, by events on CUDA and by the wall clock on
a CPU. _Rates are those of one large operation, so a device that is read has the efficiency 1: products of a real model
are smaller and can be slower.
"""

import os
import platform
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import tomli_w
import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import sdpa_flop_count

from megabatch.errors import PlanError
from megabatch.simulate import DEVICES, Device
from megabatch.train.config.recipe import expected_text

WARM_UP, REPEATS, LAUNCHES = 3, 7, 200
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Bytes of a rank's part of the small all-gather.
SMALL_BYTES = 4096
# In seconds.
SHORTEST = 1e-8

# Figures as in the file.
Figures = dict[str, Any]
_AGAIN = "write it with megabatch plan --measure FILE"
# The smallest and the largest figure that a machine can have: others have a wrong unit.
Bytes = Annotated[float, Field(ge=2**26, le=2**50)]
BytesPerSecond = Annotated[float, Field(ge=1e8, le=1e15)]
# In FLOP per second.
Rate = Annotated[float, Field(ge=1e7, le=1e17)]
Seconds = Annotated[float, Field(ge=SHORTEST, le=10)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Rates(_Table):
    float32: Rate
    bfloat16: Rate


class _AllGather(_Table):
    ranks: Annotated[int, Field(ge=2, le=2**20)]
    ranks_per_node: Annotated[int, Field(ge=1, le=2**10)]
    latency_seconds: Seconds
    bytes_per_second: Annotated[float, Field(ge=1e5, le=1e15)]


class _DeviceFile(_Table):
    like: Literal[*DEVICES]  # pyright: ignore[reportInvalidTypeForm]  # the known device that is nearest
    name: str
    torch: str
    memory_bytes: Bytes
    memory_bytes_per_second: BytesPerSecond
    launch_seconds: Seconds
    matmul_flops_per_second: _Rates
    attention_flops_per_second: _Rates
    all_gather: _AllGather | None = None


class MeasuredSizes(NamedTuple):
    """Sizes of the measured operations."""

    matmul: int  # rows and columns
    attention: tuple[int, int, int, int]  # [B, H, T, D]
    elements: int  # of the elementwise kernel, in float32
    gathered_bytes: int  # of a rank's part of the large all-gather


SIZES = {
    "cuda": MeasuredSizes(8192, (4, 32, 4096, 128), 2**28, 2**26),
    "cpu": MeasuredSizes(512, (1, 8, 512, 64), 2**24, 2**22),
}


def measure_device(device: torch.device, like: str, report: Callable[[str], object] | None = None) -> Figures:
    """Measure this machine. Collective if a process group is there.

    Args:
        device: Runs the operations: a CUDA device or the CPU.
        like: The known device that lends what is not measured, such as the network.
        report: Gets a line for each figure.
    """
    sizes = SIZES[device.type]
    if device.type == "cuda":
        name, memory_bytes = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory_bytes = platform.machine() or "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_bytes //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    figures: Figures = {"like": like, "name": name, "torch": str(torch.__version__)}

    def note(table: str, key: str, value: float, unit: str) -> None:
        (figures.setdefault(table, {}) if table else figures)[key] = value
        if report:
            report(f"{table.partition('_flops')[0] or 'device'} {key} {value:.4g} {unit}".replace("_", " "))

    note("", "memory_bytes", memory_bytes, "bytes")
    values = torch.zeros(sizes.elements, device=device)
    moved = 2 * values.nbytes
    note("", "memory_bytes_per_second", moved / measure_seconds(partial(values.add_, 1), device), "B/s")
    del values
    note("", "launch_seconds", measure_launch(device), "s")
    for name, dtype in DTYPES.items():
        matrix = torch.ones(sizes.matmul, sizes.matmul, dtype=dtype, device=device)
        seconds = measure_seconds(lambda matrix=matrix: matrix @ matrix, device)
        note("matmul_flops_per_second", name, 2 * sizes.matmul**3 / seconds, "FLOP/s")
    # torch counts masked pairs too.
    flops = sdpa_flop_count(sizes.attention, sizes.attention, sizes.attention)
    for name, dtype in DTYPES.items():
        query = torch.ones(sizes.attention, dtype=dtype, device=device)

        def attend(query: torch.Tensor = query) -> object:
            return scaled_dot_product_attention(query, query, query, is_causal=True)

        note("attention_flops_per_second", name, flops / measure_seconds(attend, device), "FLOP/s")
    if dist.is_initialized() and dist.get_world_size() > 1:
        for key, value in measure_all_gather(device, sizes.gathered_bytes).items():
            note("all_gather", key, value, {"latency_seconds": "s", "bytes_per_second": "B/s"}.get(key, ""))
    return figures


def measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    for _ in range(WARM_UP):
        run()
    seconds: list[float] = []
    for _ in range(REPEATS):
        if device.type == "cuda":
            begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begun.record()
            run()
            ended.record()
            ended.synchronize()
            seconds.append(begun.elapsed_time(ended) / 1000)
        else:
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return median(seconds)


def measure_launch(device: torch.device) -> float:
    """Return the host's seconds for one small operation, without waiting for the device."""
    small = torch.zeros(1, device=device)
    seconds: list[float] = []
    for _ in range(WARM_UP + REPEATS):
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            small.add_(1)
        seconds.append((time.perf_counter() - begin) / LAUNCHES)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return median(seconds[WARM_UP:])


def measure_all_gather(device: torch.device, part_bytes: int) -> Figures:
    """Return latency and bandwidth of an all-gather over all ranks, from a small and a large one. Collective."""
    num, seconds = dist.get_world_size(), list[float]()
    for size in (SMALL_BYTES, part_bytes):
        part = torch.zeros(size, dtype=torch.uint8, device=device)
        output = torch.empty(size * num, dtype=torch.uint8, device=device)

        def gather(output: torch.Tensor = output, part: torch.Tensor = part) -> object:
            return dist.all_gather_single(output, part)

        seconds.append(measure_seconds(gather, device))
    sent = [(num - 1) * size for size in (SMALL_BYTES, part_bytes)]
    latency, rate = fit_line((sent[0], seconds[0]), (sent[1], seconds[1]))
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", num))
    return {"ranks": num, "ranks_per_node": per_node, "latency_seconds": latency, "bytes_per_second": rate}


def fit_line(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Return latency and bytes per second of two transfers, (bytes, seconds) each: seconds = latency + bytes / rate.

    Raises `PlanError` if the large one takes no longer than the small one.
    """
    more_bytes, more_seconds = large[0] - small[0], large[1] - small[1]
    if more_seconds <= 0:
        raise PlanError(
            f"an all-gather of {large[0]:,} bytes took {large[1]:.3g} s and one of {small[0]:,} bytes "
            f"{small[1]:.3g} s; measure again without other work on this machine"
        )
    rate = more_bytes / more_seconds
    return max(small[1] - small[0] / rate, SHORTEST), rate


def device_toml(figures: Figures) -> str:
    heading = "# Measured by `megabatch plan --measure FILE`; read by `megabatch plan --device FILE`."
    return f"{heading}\n{tomli_w.dumps(figures)}"


def read_device(path: Path) -> Device:
    """Read a device file. Raises `PlanError` for one that cannot be read, lacks a figure or has a wrong one."""
    try:
        figures = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise PlanError(f"the device file {path} cannot be read ({reason}); {_AGAIN}") from None
    try:
        return _device_of(_DeviceFile.model_validate(figures))
    except ValidationError as error:
        first = error.errors()[0]
        key, change = ".".join(map(str, first["loc"])), f"{expected_text(first)}: correct it or its unit"
        if first["type"] == "missing":
            raise PlanError(f"the device file {path} has no {key}; {_AGAIN}") from None
        if first["type"] == "extra_forbidden":
            raise PlanError(f"the device file {path} has the unknown key {key}; remove it") from None
        raise PlanError(f"the device file {path} has {key} = {first['input']!r:.200}; {change}") from None


def _device_of(figures: _DeviceFile) -> Device:
    like, rates = DEVICES[figures.like], figures.matmul_flops_per_second
    attention = figures.attention_flops_per_second
    device = replace(
        like,
        name=f"{figures.name} (measured)",
        memory_bytes=int(figures.memory_bytes),
        flops={
            torch.bfloat16: rates.bfloat16,
            torch.float16: rates.bfloat16,
            torch.float32: rates.float32,
            torch.float64: like.flops_per_second(torch.float64),
        },
        attention_flops={
            torch.bfloat16: attention.bfloat16,
            torch.float16: attention.bfloat16,
            torch.float32: attention.float32,
        },
        memory_bytes_per_second=figures.memory_bytes_per_second,
        launch_seconds=figures.launch_seconds,
        efficiency=1.0,
    )
    gather = figures.all_gather
    if gather is None:
        return device
    return device.with_measured_links(
        gather.ranks, gather.ranks_per_node, gather.latency_seconds, gather.bytes_per_second
    )
