"""The device that a benchmark runs on: the GPU where there is one, and else the CPU."""

import argparse
import time
from typing import Any

import torch

from megabatch.errors import PlanError
from megabatch.simulate.devices import device_named
from megabatch.train.init.hardware import kind_of

OTHER_RATES = ("pcie", "nvl", "laptop")  # slower than what devices.py lists under the name, but for the A100


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def name() -> str:
    """What the GPU calls itself, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def size_named(large: str, *, quick: bool) -> str:
    """Of the sizes of a benchmark: the large one wants a GPU."""
    return "quick" if quick else large if torch.cuda.is_available() else "small"


def not_measured(size: str, large: str) -> str | None:
    """What a run of another size does not say; None for the large one."""
    why = "the model is tiny" if torch.cuda.is_available() else "no CUDA device"
    return None if size == large else f"{why}: the {large.upper()} numbers are not measured here"


def facts() -> dict[str, Any]:
    """What a result says of the device."""
    found: dict[str, Any] = {"hardware": name()}
    if torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(0).total_memory
        found |= {"memory_bytes": memory_bytes, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return found


def seconds_now() -> float:
    """The clock, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_flops(hardware: str, dtype: torch.dtype) -> tuple[float | None, str]:
    """The most that a device computes in a second, as `megabatch.simulate.devices` has it; None, and why, without."""
    if hardware == "cpu":
        return None, "no peak is known of this CPU"
    named = hardware.lower()
    if "mig" in named or ("a100" not in named and any(word in named for word in OTHER_RATES)):
        return None, f"{hardware} is slower than the device of that name in megabatch/simulate/devices.py"
    try:
        found = device_named(kind_of(hardware))
    except PlanError:
        return None, f"megabatch/simulate/devices.py has no {hardware}"
    return found.flops.get(dtype, found.flops[torch.float32]), f"{found.name} of megabatch/simulate/devices.py"


def positive(text: str) -> int:
    """A number of something, of the command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
