"""Run folder: the files that say what was run, with which software, on which devices, and what was printed.

``config.toml`` is the whole recipe, ready to run again. ``environment.json`` lists every start of the run, ``plan.txt``
the derived settings, ``log.txt`` every line that was printed. ``metrics.jsonl`` has a row for each update and each
evaluation, ``tracking.json`` the run's names in trackers.
"""

import contextlib
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w
import torch

from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.metadata import installed_version
from megabatch.train.config import Config, Section
from megabatch.train.config.secrets import mask, mask_command
from megabatch.train.runtime.console import Console, utc_now
from megabatch.train.runtime.files import CONFIG, PLAN, replace_text
from megabatch.train.runtime.ranks import Ranks

PACKAGES = ("megabatch", "torch", "transformers", "datasets", "numpy")
TRACKING = "tracking.json"  # the id of the run at each tracker
NONE = "none"  # stands for None, which TOML lacks
SECONDS_FOR_GIT = 5.0


def recipe_text(config: Config) -> str:
    """Return the whole recipe as TOML: every key with a value, to run it again from the beginning.

    Raises `MegabatchError` for a file name that is not UTF-8.
    """
    fresh = config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})
    text = tomli_w.dumps(mask({name: _section_table(getattr(fresh, name)) for name in Config.model_fields}))
    for line in text.splitlines():
        shown = line.encode("utf-8", "backslashreplace").decode()
        if shown != line:
            raise MegabatchError(f"{CONFIG} cannot hold {shown}, which is not text in UTF-8; rename the file or folder")
    return text


def _section_table(section: Section) -> dict[str, Any]:
    table = section.model_dump(exclude_none=True)
    for key, field in type(section).model_fields.items():
        if getattr(section, key) is None and field.default is not None:
            table[key] = NONE
    return table


def write_plan(folder: Path, text: str, ranks: Ranks, console: Console) -> None:
    """Write what this start derived from the recipe. The log has it too."""
    if ranks.is_main:
        write_if_room(folder / PLAN, lambda: replace_text(folder / PLAN, text.rstrip("\n") + "\n"), console)


def write_if_room(path: Path, write: Callable[[], object], console: Console) -> None:
    """Write a file that a run can do without; warn if that fails."""
    try:
        write()
    except OSError as error:
        console.warn(f"{path} is not written ({error.strerror or error}); the run continues without it")


def describe_start(ranks: Ranks) -> dict[str, Any]:
    """Return the command, time, software and devices of this start. Collective."""
    devices = ranks.gather(device_name(ranks.device))
    return {
        "time_utc": utc_now(),
        "command": mask_command(sys.argv),
        "working_folder": str(Path.cwd()),
        "git_commit": git_commit(Path.cwd()),
        "python": platform.python_version(),
        **{package: installed_version(package) for package in PACKAGES},
        "cuda": torch.version.cuda,
        "num_ranks": ranks.size,
        **ranks.job.to_json(),
        "devices": {name: devices.count(name) for name in devices},
    }


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"cpu: {line.partition(':')[2].strip()}"
    return f"cpu: {platform.processor() or platform.machine()}"


def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder, if any. rev-parse runs no hook."""
    command = ["git", "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS_FOR_GIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
