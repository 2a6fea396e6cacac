"""Request: what `megabatch plan` is asked for."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.simulate import Device, device_named
from megabatch.train.config.byte_sizes import read_bytes, read_rate
from megabatch.train.plan.device_file import read_device

# Digits of a count.
MOST_DIGITS = 18
TOKENS = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([KMBT]?)", re.IGNORECASE)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class PlanRequest:
    """The cluster to plan for and the output to write."""

    world: int  # processes
    device: Device  # of each process
    memory_bytes: int  # of the device
    length_tokens: int | None = None  # of the longest sample; None: read from the recipe or its data
    layouts: bool = False  # compare the ways to divide the processes, whatever the recipe has
    as_json: bool = False
    num_tokens: float | None = None  # of a whole training, of which the days are printed
    overrides: tuple[str, ...] = ()  # of the recipe

    @property
    def limit_bytes(self) -> int:
        """Memory for a rank's tensors, without what the context, NCCL and cuBLAS take."""
        return self.memory_bytes - self.device.overhead_bytes

    @property
    def stated_keys(self) -> set[str]:
        """Keys of the recipe that the command line sets; the plan does not vary them."""
        return {word[2:].partition("=")[0].replace("-", "_") for word in self.overrides if word.startswith("--")}


def read_request(options: Iterable[tuple[str, str]], overrides: Sequence[str]) -> PlanRequest:
    """Parse the options after the recipe, as `split_options` gives them with the overrides of its keys.

    Raises `MegabatchError` for a value that cannot be.
    """
    values = dict(options)
    path = Path(values.get("device", "a100-80g"))
    device = read_device(path) if path.suffix == ".toml" or path.is_file() else device_named(str(path))
    if "bandwidth" in values:
        rate = read_rate("--bandwidth", values["bandwidth"])
        network = min(device.network_bytes_per_second, rate)
        device = replace(device, link_bytes_per_second=rate, network_bytes_per_second=network)
    if "ranks-per-node" in values:
        device = replace(device, ranks_per_node=_read_count("ranks-per-node", values["ranks-per-node"]))
    request = PlanRequest(
        world=_read_count("world", values.get("world", "1")),
        device=device,
        memory_bytes=read_bytes("--memory", values["memory"]) if "memory" in values else device.memory_bytes,
        length_tokens=_read_count("length", values["length"], lowest=2) if "length" in values else None,
        layouts="layouts" in values,
        as_json="json" in values,
        num_tokens=_read_tokens(values["tokens"]) if "tokens" in values else None,
        overrides=tuple(overrides),
    )
    if request.limit_bytes <= 0:
        raise MegabatchError(
            f"--memory is {request.memory_bytes:,} bytes, and the context of a {device.name} alone takes "
            f"{device.overhead_bytes:,}; give more"
        )
    return request


def _read_count(name: str, text: str, *, lowest: int = 1) -> int:
    if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) < lowest:
        raise MegabatchError(f"--{name} is {text[:40]!r}; it must be a whole number of at least {lowest}")
    return int(text)


def _read_tokens(text: str) -> float:
    match = TOKENS.fullmatch(text.strip())
    number = 0.0 if match is None else float(match[1]) * UNITS[match[2].upper()]
    if not 1 <= number < 10**MOST_DIGITS:
        raise MegabatchError(f"--tokens is {text[:40]!r}; write a number of tokens, 300M, 15B or 1.5T say")
    return number
