"""Folder: a run's folder says by itself what was run, with what, on what, and what was said.

A run's folder is one process's to write to, its main rank's, which holds ``.lock`` until it ends, however it ends.
``config.toml`` is the whole recipe, fit to be run again; ``environment.json`` every start of the run; ``plan.txt`` what
was derived; ``log.txt`` all that was said.
"""

import contextlib
import fcntl
import json
import os
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
from megabatch.train import metrics
from megabatch.train.attempt import Job
from megabatch.train.config import Config, Section
from megabatch.train.console import Console
from megabatch.train.naming import checkpoints_of, has_checkpoint, replace_text
from megabatch.train.ranks import Ranks
from megabatch.train.shortage import has_learned

CONFIG, ENVIRONMENT, PLAN, LOG, LOCK = "config.toml", "environment.json", "plan.txt", "log.txt", ".lock"
PACKAGES = ("megabatch", "torch", "transformers", "datasets", "numpy")
NONE = "none"  # what a recipe has for no value at all, which TOML cannot write
SECONDS_FOR_GIT = 5.0


def check_folder(folder: Path, *, resume: bool, ranks: Ranks) -> None:
    """Raise on every rank where the main rank finds that a run cannot be written to, or resumed from, the folder.

    A run that is there is locked from now on; a folder that has none yet, from `begin` on.
    """

    def check() -> None:
        if (folder / LOCK).exists():
            lock(folder)
        check_free(folder, resume=resume, job=ranks.job)

    ranks.on_main(check, str(folder))


def check_free(folder: Path, *, resume: bool, job: Job) -> None:
    """Raise where a run cannot be resumed from the folder, or a new one not be written to it.

    One that ran out of memory before its first checkpoint begins again, resumed or not, and one of this very job.
    """
    if begins_again(folder, job):
        read_starts(folder)
    elif resume:
        check_resumable(folder)
    else:
        check_unused(folder)


def begins_again(folder: Path, job: Job) -> bool:
    """Whether the folder has no checkpoint yet, and what a run has learned of its memory, or a run of this job."""
    return not has_checkpoint(folder) and (has_learned(folder) or is_of_job(folder, job))


def gone_on_with(config: Config, ranks: Ranks) -> Config:
    """The recipe, resumed where torchrun has started this command again and the run has a checkpoint; collective."""
    folder, found = Path(config.run.folder), [False]

    def look() -> None:
        found[0] = has_checkpoint(folder) and is_of_job(folder, ranks.job)

    ranks.on_main(look, str(folder))
    if not any(ranks.sum([float(found[0])])):
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": True})})


def is_of_job(folder: Path, job: Job) -> bool:
    """Whether the run there was last started by this job."""
    starts = read_starts(folder)
    return bool(starts) and job.has_made(starts[-1])


def check_resumable(folder: Path) -> None:
    """Raise where there is nothing to go on from, or what is there cannot be gone on with."""
    if not has_checkpoint(folder):
        raise MegabatchError(
            f"{folder} has no checkpoint to go on from; start in a new run.folder (run.save_every saves on the way)"
        )
    read_starts(folder)
    metrics.read_rows(folder / metrics.FILE_NAME)


def check_unused(folder: Path) -> None:
    """Raise where the folder holds a run, or cannot be made."""
    if has_checkpoint(folder):
        raise MegabatchError(
            f"{folder} already holds a run; go on with --run.resume=true, or choose another run.folder"
        )
    if any(path.exists() for path in (checkpoints_of(folder), folder / metrics.FILE_NAME, folder / CONFIG)):
        raise MegabatchError(
            f"{folder} holds a run that stopped before its first checkpoint; choose another run.folder or delete it"
        )
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not is_writable(nearest):
        raise MegabatchError(
            f"run.folder is {folder} and {nearest} is no folder to write to; choose another run.folder"
        )


def lock(folder: Path) -> None:
    """Let no other process write to the run until this one ends; raise where another does. Again is no harm.

    The lock is the process's own (POSIX), so that a worker which outlives a killed run holds nothing, and goes when
    the process closes the file; so the descriptor stays open, and ends with the process.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # PermissionError: what some systems say instead
        raise MegabatchError(
            f"another process is writing to the run in {folder}; wait for it, or choose another run.folder"
        ) from None
    except OSError:  # a file system without locks
        return


def recipe_of(folder: Path) -> Path:
    """The recipe of the run in the folder, to go on with it."""
    if not (folder / CONFIG).is_file():
        raise MegabatchError(
            f"{folder} is a folder without {CONFIG}, so no run to go on with; give the path of a TOML file"
        )
    return folder / CONFIG


def begin(folder: Path, config: Config, ranks: Ranks, console: Console) -> None:
    """Make the folder, or go on in it: lock it, write the recipe, add this start, and log from here on; collective."""
    recipe, start = recipe_text(config), describe_start(ranks)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
        check_free(folder, resume=config.run.resume, job=ranks.job)  # again: another process may have come first
        if begins_again(folder, ranks.job):
            console.say("nothing was saved yet: begins again")
        starts = [*read_starts(folder), start]
        replace_text(folder / CONFIG, recipe)
        replace_text(folder / ENVIRONMENT, json.dumps({"starts": starts}, indent=1) + "\n")
        console.log_to(folder / LOG)

    ranks.on_main(write, str(folder))


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
