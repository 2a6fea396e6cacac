"""Folder: a run's folder says by itself what was run, with what, on what, and what was said.

``config.toml`` is the whole recipe, fit to be run again; ``environment.json`` every start of the run; ``plan.txt`` what
was derived; ``log.txt`` all that was said.
"""

import contextlib
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import tomli_w
import torch

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.paths import replace_text
from megabatch.train.config import Config, Section
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

CONFIG, ENVIRONMENT, PLAN, LOG = "config.toml", "environment.json", "plan.txt", "log.txt"
TRACKING = "tracking.json"  # the id of the run at each tracker
PACKAGES = ("megabatch", "torch", "transformers", "datasets", "numpy")
NONE = "none"  # what a recipe has for no value at all, which TOML cannot write
SECONDS_FOR_GIT = 5.0


def recipe_of(folder: Path) -> Path:
    """The recipe of the run in the folder, to go on with it."""
    if not (folder / CONFIG).is_file():
        raise MegabatchError(
            f"{folder} is a folder without {CONFIG}, so no run to go on with; give the path of a TOML file"
        )
    return folder / CONFIG


def write_plan(folder: Path, text: str, ranks: Ranks, console: Console) -> None:
    """Keep what was derived before the first update of this start; the log has it too."""
    if ranks.is_main:
        write_if_room(folder / PLAN, lambda: replace_text(folder / PLAN, text.rstrip("\n") + "\n"), console)


def write_if_room(path: Path, write: Callable[[], object], console: Console) -> None:
    """Write what a run can do without; where that cannot be done, it is said, and the run goes on."""
    try:
        write()
    except OSError as error:
        console.warn(f"{path} is not written ({error.strerror or error}); the run goes on without it")


def recipe_text(config: Config) -> str:
    """The whole recipe as TOML: every key with a value, given or default; the same run again, from its beginning.

    Raises `MegabatchError` where a value is no text: a file's name, from the command line, may hold any bytes.
    """
    fresh = config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})
    table = {name: table_of(getattr(fresh, name)) for name in Config.model_fields}
    text = tomli_w.dumps(table)
    for line in text.splitlines():
        shown = line.encode("utf-8", "backslashreplace").decode()
        if shown != line:
            raise MegabatchError(f"{CONFIG} cannot hold {shown}, which is not text in UTF-8; rename the file or folder")
    return text


def table_of(section: Section) -> dict[str, Any]:
    """The section's keys, without those that have no value; a value that was taken away from a default is "none"."""
    table = section.model_dump(exclude_none=True)
    for key, field in type(section).model_fields.items():
        if getattr(section, key) is None and field.default is not None:
            table[key] = NONE
    return table


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Every start of the run so far."""
    path = folder / ENVIRONMENT
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf-8"))["starts"])
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        reason = in_one_line(error)
        raise MegabatchError(f"{path} is damaged ({reason}); mend it, or delete it and go on") from None


def describe_start(ranks: Ranks) -> dict[str, Any]:
    """What was started, when, with which software, on which devices; collective."""
    return {
        "time_utc": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": sys.argv,
        "working_folder": str(Path.cwd()),
        "git_commit": git_commit(Path.cwd()),
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
        "cuda": torch.version.cuda,
        "num_ranks": ranks.size,
        **ranks.job.to_json(),
        "devices": counted(ranks.gather(device_name(ranks.device))),
    }


def counted(names: Sequence[str]) -> dict[str, int]:
    """Each name with how often it comes."""
    return {name: names.count(name) for name in dict.fromkeys(names)}


def device_name(device: torch.device) -> str:
    """What the device is called by who made it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"cpu: {line.partition(':')[2].strip()}"
    return f"cpu: {platform.processor() or platform.machine()}"


def version_of(package: str) -> str | None:
    """The version that is installed, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out there; None where there is none, or no git. rev-parse runs no hook."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--verify", "--quiet", "HEAD"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=SECONDS_FOR_GIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def is_writable(folder: Path) -> bool:
    """Whether files can be made in it: asked by making one, which has no name and is gone at once."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
