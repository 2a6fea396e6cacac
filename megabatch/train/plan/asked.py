"""Asked: what a command line of `megabatch plan` asks for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.simulate import Device, device_named
from megabatch.train.config.byte_sizes import read_bytes, read_rate

VALUES = ("world", "memory", "device", "bandwidth", "length", "chart")  # each with a value
DEVICE = "a100-80g"


@dataclass(frozen=True)
class Asked:
    """How many ranks of which device, and what is to be written; what else was given are the recipe's overrides."""

    world: int  # processes
    device: Device  # of each
    memory_bytes: int  # of it
    length_tokens: int | None = None  # of the longest sample; None: as the recipe or its data say
    as_json: bool = False
    chart: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def limit_bytes(self) -> int:
        """What a rank's tensors may take: the memory without what the context, NCCL and cuBLAS keep."""
        return self.memory_bytes - self.device.overhead_bytes


def read_asked(arguments: Sequence[str]) -> Asked:
    """The arguments after the recipe. Raises `MegabatchError` for a value that cannot be."""
    values, overrides, as_json = split(arguments)
    device = device_named(values.get("device", DEVICE))
    if "bandwidth" in values:
        rate = read_rate("--bandwidth", values["bandwidth"])
        network = min(device.network_bytes_per_second, rate)
        device = replace(device, link_bytes_per_second=rate, network_bytes_per_second=network)
    memory_bytes = read_bytes("--memory", values["memory"]) if "memory" in values else device.memory_bytes
    asked = Asked(
        world=read_count("world", values.get("world", "1")),
        device=device,
        memory_bytes=memory_bytes,
        length_tokens=read_count("length", values["length"], least=2) if "length" in values else None,
        as_json=as_json,
        chart=read_chart(values["chart"]) if "chart" in values else None,
        overrides=tuple(overrides),
    )
    if asked.limit_bytes <= 0:
        raise MegabatchError(
            f"--memory is {memory_bytes:,} bytes, and the context of a {device.name} alone takes "
            f"{device.overhead_bytes:,}; give more"
        )
    return asked


def split(arguments: Sequence[str]) -> tuple[dict[str, str], list[str], bool]:
    """Our own values, the overrides of the recipe, and whether JSON is wanted."""
    values: dict[str, str] = {}
    overrides: list[str] = []
    as_json, waiting = False, list(arguments)
    while waiting:
        argument = waiting.pop(0)
        name, given, text = argument.removeprefix("--").partition("=")
        if argument == "--json":
            as_json = True
        elif argument.startswith("--") and name in VALUES:
            if not given and (not waiting or waiting[0].startswith("--")):
                raise MegabatchError(f"--{name} has no value; write --{name} VALUE")
            values[name] = text if given else waiting.pop(0)
        elif argument.startswith("--") and not given and waiting and not waiting[0].startswith("--"):
            overrides.append(f"{argument}={waiting.pop(0)}")  # as it is said again in the command that is printed
        else:
            overrides.append(argument)
    return values, overrides, as_json


def read_count(name: str, text: str, *, least: int = 1) -> int:
    """A whole number."""
    if not text.isdecimal() or int(text) < least:
        raise MegabatchError(f"--{name} is {text!r}; it must be a whole number of at least {least}")
    return int(text)


def read_chart(text: str) -> Path:
    """The file of the chart, which is a picture."""
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf") or not path.parent.is_dir():
        raise MegabatchError(f"--chart is {text!r}; name a .png, .svg or .pdf file in a folder that is there")
    if find_spec("matplotlib") is None:
        raise MegabatchError("--chart needs matplotlib, which is not installed; pip install matplotlib")
    return path
