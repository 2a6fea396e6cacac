"""Starting: whether a run may begin in a folder, begins again there, or goes on from its checkpoint.

A run that has saved nothing begins again, at update 0, with what it has learned of its memory and without the rows of
what it had made. One that has saved anything never does. A run's folder is one process's to write to, its main rank's,
which holds ``.lock`` until it ends, however it ends.
"""

import fcntl
import json
import os
import re
import socket
import uuid
from pathlib import Path
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.callbacks import metrics
from megabatch.train.callbacks.tracking import FILE_NAME as TRACKING
from megabatch.train.checkpoints.metadata import first_difference
from megabatch.train.checkpoints.paths import checkpoints_of, has_checkpoint, replace_text
from megabatch.train.checkpoints.run_folder import (
    CONFIG,
    ENVIRONMENT,
    LOG,
    describe_start,
    is_writable,
    read_starts,
    recipe_of,
    recipe_text,
)
from megabatch.train.config import Config
from megabatch.train.config.recipe import load_config
from megabatch.train.model.optimizer import settings_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.oom_limit import has_learned, wait_for_learned
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Job

LOCK = ".lock"
SAVED = re.compile(rb"  saved .*(step-\d+)$")  # a line of the log


def check_folder(folder: Path, config: Config, ranks: Ranks) -> None:
    """Raise on every rank where the main rank finds that the run can neither go on in its folder nor begin there.

    A run that is there is locked from now on; a folder that has none yet, from `begin` on.
    """

    def check() -> None:
        if (folder / LOCK).exists():
            lock(folder)
        check_free(folder, config, ranks.job)

    ranks.on_main(check, str(folder))
    wait_for_learned(config.run, ranks)


def check_free(folder: Path, config: Config, job: Job) -> None:
    """Raise where the run can neither go on in the folder nor begin there.

    One that has saved nothing begins again: where that is asked for, where it has made no update or ran out of memory,
    and where it is of this very job.
    """
    if has_checkpoint(folder):
        if not config.run.resume:
            raise already_there(folder)
        read_starts(folder)
        metrics.read_rows(folder / metrics.FILE_NAME)
        return
    check_not_lost(folder)
    starts = read_starts(folder)
    if not starts:
        check_unused(folder)
    elif made := num_made(folder):
        if not (config.run.resume or has_learned(folder) or job.has_made(starts[-1])):
            raise MegabatchError(
                f"{folder} holds a run that has made {counted_updates(made)} and saved none; begin it again with "
                "--run.resume=true, or choose another run.folder"
            )
        check_same_recipe(folder, config, made)


def gone_on_with(config: Config, ranks: Ranks) -> Config:
    """The recipe, resumed where torchrun has started this command again and the run has a checkpoint; collective.

    The main rank's word counts on all of them.
    """
    folder, found = Path(config.run.folder), [False]

    def look() -> None:
        found[0] = config.run.resume or (has_checkpoint(folder) and is_of_job(folder, ranks.job))

    ranks.on_main(look, str(folder))
    resume = any(ranks.sum([float(found[0])]))
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": resume})})


def is_of_job(folder: Path, job: Job) -> bool:
    """Whether the run there was last started by this job."""
    starts = read_starts(folder)
    return bool(starts) and job.has_made(starts[-1])


def already_there(folder: Path) -> MegabatchError:
    """The error of a run that would begin where one has a checkpoint."""
    return MegabatchError(f"{folder} already holds a run; go on with --run.resume=true, or choose another run.folder")


def check_not_lost(folder: Path) -> None:
    """Raise where a run without a checkpoint has said that it saved one: it is not begun again over what was lost."""
    lines = (folder / LOG).read_bytes().splitlines() if (folder / LOG).is_file() else []
    saved = [found[1].decode() for line in lines if (found := SAVED.search(line))]
    if saved:
        raise MegabatchError(
            f"{folder} has no checkpoint any more, and its run has saved {saved[-1]}; put {checkpoints_of(folder)} "
            "back, or choose another run.folder"
        )


def check_unused(folder: Path) -> None:
    """Raise where the folder has files of a run that it knows no start of, or cannot be made."""
    for path in (checkpoints_of(folder), folder / metrics.FILE_NAME, folder / CONFIG):
        if path.exists():
            raise MegabatchError(
                f"{folder} has {path.name} of a run that {ENVIRONMENT} does not know; choose another run.folder, or "
                "delete it"
            )
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not is_writable(nearest):
        raise MegabatchError(
            f"run.folder is {folder} and {nearest} is no folder to write to; choose another run.folder"
        )


def check_same_recipe(folder: Path, config: Config, made: int) -> None:
    """Raise where the updates that would be made again were made by another recipe."""
    difference = first_difference(decisive(load_config(recipe_of(folder), [])), decisive(config))
    if difference is not None:
        key, there, now = difference
        raise MegabatchError(
            f"{folder} holds a run of another recipe, which has made {counted_updates(made)} and saved none: {key} is "
            f"{there} there and {now} here; begin that again with `megabatch train {folder}`, or choose another "
            "run.folder"
        )


def decisive(config: Config) -> dict[str, Any]:
    """What of a recipe makes it another run's, by its key."""
    keys = {"model": ("name", "config"), "data": ("path", "source", "mixture", "function", "options", "pack_tokens")}
    named = {f"{section}.{key}": getattr(getattr(config, section), key) for section in keys for key in keys[section]}
    return json.loads(json.dumps({**settings_of(config), **named}, default=str))


def num_made(folder: Path) -> int:
    """How many updates the run there has made, by its rows."""
    rows = metrics.read_rows(folder / metrics.FILE_NAME)
    return max((row["step"] for row in rows if not metrics.is_evaluation(row)), default=0)


def counted_updates(number: int) -> str:
    """So many updates, in words."""
    return f"{number:,} update{'' if number == 1 else 's'}"


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


def check_shared(folder: Path, ranks: Ranks) -> None:
    """Raise on every rank where one does not see what the main rank writes there: a checkpoint is of all of them.

    Looked for is a name that nobody has asked for before: a client of a network's disk may remember of any other one
    that it was not there.
    """
    if ranks.size == 1:
        return
    mark = folder / f".seen-{ranks.gather(uuid.uuid4().hex)[0]}"
    ranks.on_main(mark.touch, str(folder))
    told = ranks.gather("" if mark.exists() else f"rank {ranks.rank} on {socket.gethostname()}")
    ranks.on_main(lambda: mark.unlink(missing_ok=True), str(folder))
    blind = [each for each in told if each]
    if blind:
        raise MegabatchError(
            f"run.folder is {folder}, where {blind[0]} does not see what rank 0 writes, and a checkpoint has files of "
            "every rank; name a folder on a disk that all hosts share"
        )


def is_other(folder: Path, recipe: str) -> bool:
    """Whether the run there was last started with another recipe's text."""
    path = folder / CONFIG
    return path.is_file() and path.read_text(encoding="utf-8", errors="replace") != recipe


def begin(folder: Path, config: Config, ranks: Ranks, console: Console, *, is_new: bool) -> None:
    """Make the folder, or go on in it: lock it, write the recipe, add this start, and log from here on; collective.

    Args:
        is_new: Whether the run begins, at update 0, and does not go on from a checkpoint.
    """
    recipe, start = recipe_text(config), describe_start(ranks)
    ranks.on_main(lambda: folder.mkdir(parents=True, exist_ok=True), str(folder))
    check_shared(folder, ranks)

    def write() -> None:
        lock(folder)
        if is_new and has_checkpoint(folder):  # of another process, which came first
            raise already_there(folder)
        check_free(folder, config, ranks.job)
        starts = read_starts(folder)
        if is_new and (starts or config.run.resume):
            made = num_made(folder)
            if is_other(folder, recipe):
                (folder / TRACKING).unlink(missing_ok=True)  # trackers keep the recipe that a run of theirs began with
            again = f", and makes {counted_updates(made)} again" if made else ""
            console.say(f"nothing was saved yet: the run begins at update 0{again}")
        replace_text(folder / ENVIRONMENT, json.dumps({"starts": [*starts, start]}, indent=1) + "\n")
        replace_text(folder / CONFIG, recipe)
        console.log_to(folder / LOG)

    ranks.on_main(write, str(folder))
