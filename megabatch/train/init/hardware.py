"""Hardware that a recipe is written for: named on the command line, or seen on this machine."""

import re
import shutil
import subprocess
from typing import Literal, NamedTuple, get_args

from megabatch.errors import MegabatchError

Device = Literal["cpu", "a100", "a100-40g", "a100-80g", "h100", "h100-80g", "h200", "b200", "l40s", "rtx4090"]
# The GPUs that plan knows.
DEVICES = get_args(Device)[1:]
HARDWARE = re.compile(r"(?:(\d+) *(?:nodes? +of|x) +)?(?:(\d+) +)?([a-z][\w-]*)", re.IGNORECASE)


class Hardware(NamedTuple):
    """Processes that train together: so many on each of so many nodes."""

    device: str  # "cpu", "gpu", or one of DEVICES
    per_node: int = 1
    num_nodes: int = 1


def read_hardware(text: str) -> Hardware:
    """Read "cpu", "1 gpu", "8 gpus", "8 h100" or "2 nodes of 8 h100"."""
    match = HARDWARE.fullmatch(text.strip())
    word = "" if match is None else match[3].lower()
    device = next((name for name in ("cpu", "gpu", *DEVICES) if word in (name, f"{name}s")), None)
    num_nodes, per_node = (1, 1) if match is None else (int(match[1] or 1), int(match[2] or 1))
    if device is None or not num_nodes or not per_node:
        raise MegabatchError(
            f'--hardware is {text!r}; write "cpu", "1 gpu", "8 gpus", "8 h100" or "2 nodes of 8 h100"; '
            f"devices are {', '.join(DEVICES)}"
        )
    return Hardware(device, per_node, num_nodes)


def seen_hardware() -> str:
    """Return what this machine has, as `read_hardware` reads it; nvidia-smi says it without torch's seconds."""
    program = shutil.which("nvidia-smi")
    try:
        done = program and subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    names = [line for line in done.stdout.splitlines() if line.startswith("GPU ")] if done else []
    return f"{len(names)} {kind_of(names[0])}" if names else "cpu"


def kind_of(name: str) -> str:
    """Return the device that a line of nvidia-smi names, where plan knows it; "gpu" else."""
    letters = name.partition("(UUID")[0].lower().replace(" ", "")
    if "a100" in letters and "40gb" in letters:
        return "a100-40g"
    devices = [device for device in DEVICES if device in letters]
    return devices[0] if devices and "gh200" not in letters else "gpu"
