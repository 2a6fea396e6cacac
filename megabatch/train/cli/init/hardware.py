"""Hardware: what a recipe is written for, as a person says it."""

import re
import shutil
import subprocess
from dataclasses import dataclass

from megabatch.errors import MegabatchError

DEVICES = ("a100", "a100-40g", "a100-80g", "h100", "h100-80g", "h200", "b200", "l40s", "rtx4090")  # that plan knows
WORDS = re.compile(r"(?:(\d+) *(?:nodes? +of|x) +)?(?:(\d+) +)?([a-z][\w-]*)", re.IGNORECASE)
SECONDS_TO_LOOK = 10.0


@dataclass(frozen=True)
class Hardware:
    """Processes that train together: so many on each of so many nodes."""

    device: str  # "cpu", "gpu", or one of DEVICES
    per_node: int = 1
    num_nodes: int = 1

    @property
    def num_processes(self) -> int:
        """Ranks of the run."""
        return self.per_node * self.num_nodes

    @property
    def is_cpu(self) -> bool:
        """Whether there is no GPU."""
        return self.device == "cpu"


def read_hardware(text: str) -> Hardware:
    """ "cpu", "1 gpu", "8 gpus", "8 h100" or "2 nodes of 8 h100". Raises `MegabatchError` for any other text."""
    found = WORDS.fullmatch(text.strip())
    device = None if found is None else device_of(found[3].lower())
    num_nodes, per_node = (1, 1) if found is None else (int(found[1] or 1), int(found[2] or 1))
    if device is None or not num_nodes or not per_node:
        raise MegabatchError(
            f'--hardware is {text!r}; write "cpu", "1 gpu", "8 gpus", "8 h100" or "2 nodes of 8 h100"; '
            f"devices are {', '.join(DEVICES)}"
        )
    return Hardware(device, per_node, num_nodes)


def device_of(word: str) -> str | None:
    """The device that a word of the plural or singular names; None: none that is known."""
    known = ("cpu", "gpu", *DEVICES)
    return next((name for name in known if word in (name, f"{name}s")), None)


def seen_hardware() -> str:
    """What this machine has, as `read_hardware` reads it."""
    names = seen_gpus()
    return f"{len(names)} {kind_of(names[0])}" if names else "cpu"


def seen_gpus() -> list[str]:
    """The lines of nvidia-smi, one for each GPU that the driver has; torch, which may see fewer, takes seconds."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=SECONDS_TO_LOOK, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]  # also where another one is sick


def kind_of(name: str) -> str:
    """The device that a line of nvidia-smi names, where plan knows it, "gpu" else."""
    letters = name.partition("(UUID")[0].lower().replace(" ", "")
    if "a100" in letters and "40gb" in letters:
        return "a100-40g"
    found = [device for device in DEVICES if device in letters]
    return found[0] if found and "gh200" not in letters else "gpu"
