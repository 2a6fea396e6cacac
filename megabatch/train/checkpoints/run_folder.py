"""Run folder: decide if a run may start there, start over or resume, keep other processes out, and say what was run.

A run without a checkpoint starts over at update 0 and drops the rows of its earlier updates. A run with a checkpoint
never does. The main rank holds ``.lock`` until its process ends.

``config.toml`` is the whole recipe, ready to run again. ``environment.json`` lists every start of the run, ``plan.txt``
the derived settings, ``log.txt`` every line that was printed. ``metrics.jsonl`` has a row for each update and each
evaluation, ``tracking.json`` the run's names in trackers.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tomli_w
import torch

from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.metadata import first_difference, installed_version
from megabatch.train.checkpoints.paths import checkpoints_of, has_checkpoint, holds_a_run, recipe_of
from megabatch.train.config import Config, Section
from megabatch.train.config.recipe import load_config
from megabatch.train.config.secrets import mask, mask_command
from megabatch.train.model.optimizer import settings_of
from megabatch.train.runtime.console import Console, count, utc_now
from megabatch.train.runtime.files import (
    CONFIG,
    ENVIRONMENT,
    LOCK,
    LOG,
    METRICS,
    PLAN,
    UNKNOWN,
    check_own_path,
    differing_conditions,
    find_rows,
    is_evaluation,
    is_file,
    is_writable,
    move_aside,
    open_file,
    read_file,
    read_starts,
    remove_unfinished,
    replace_text,
)
from megabatch.train.runtime.oom_limit import OOM_LIMIT_FILE, wait_for_oom_limit
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Job
from megabatch.train.runtime.shared_folder import ROWS, SharedFolder
from megabatch.train.trust import sealed

# Seconds between tries to lock the run.
SECONDS_BETWEEN_TRIES = 0.2
# A line of the log.
SAVED = re.compile(rb"  saved .*(step-\d+)$")
DATA_KEYS = ("path", "source", "mixture", "function", "options", "pack_tokens")
PACKAGES = ("megabatch", "torch", "transformers", "datasets", "numpy")
# Ids of the run at each tracker.
TRACKING = "tracking.json"
# Folder in which wandb keeps links of its own.
FOLDER_OF_LINKS = "wandb"
# Folders of a run.
FOLDERS = ("checkpoints", "profile", "stuck", "tensorboard", FOLDER_OF_LINKS)
# Stands for None, which TOML lacks.
NONE = "none"
SECONDS_FOR_GIT = 5.0


def resume_if_restarted(config: Config, ranks: Ranks) -> Config:
    """Set ``run.resume`` if torchrun has restarted this command and the run has a checkpoint. Collective.

    A replica always resumes: it may come back to a run that others go on with.
    """
    folder = Path(config.run.folder)

    def is_resumed() -> bool:
        starts = read_starts(folder)
        return has_checkpoint(folder) and bool(starts) and ranks.job.has_started(starts[-1])

    is_replica = config.parallel.replicas is not None
    resume = config.run.resume or is_replica or ranks.on_main(is_resumed, str(folder))
    return config.model_copy(update={"run": config.run.model_copy(update={"resume": resume})})


def check_run_folder(folder: Path, config: Config, ranks: Ranks) -> None:
    """Raise `MegabatchError` on every rank if the run can neither resume in its folder nor start there. Collective.

    Locks an existing run; a new one is locked by `open_run_folder`.
    """

    def check() -> None:
        check_own_paths(folder)
        if config.parallel.replicas is None and (folder / LOCK).exists():
            lock_run(folder, config.run.answer_within_seconds)
        _check_can_start(folder, config, ranks.job)

    ranks.on_main(check, str(folder))
    wait_for_oom_limit(config.run, ranks)


def open_run_folder(
    folder: Path, config: Config, ranks: Ranks, console: Console, *, is_new: bool, shared: SharedFolder | None = None
) -> None:
    """Create and lock the run's folder, write the recipe, record this start, and log from here on. Collective.

    Args:
        folder: The run's folder.
        config: The recipe.
        ranks: The main rank writes.
        console: Logs to the folder.
        is_new: The run starts at update 0 instead of resuming from a checkpoint.
        shared: This replica's part in the folder, which it has entered. A replica that joins others leaves their files
            alone.
    """
    recipe, start = sealed(recipe_text(config)), describe_start(ranks)
    ranks.on_main(lambda: folder.mkdir(parents=True, exist_ok=True), str(folder))
    _check_shared_disk(folder, ranks)

    def write() -> None:
        if shared is None:
            lock_run(folder, config.run.answer_within_seconds)
        if shared is None or not shared.is_joined:
            remove_unfinished(folder)
            remove_unfinished(checkpoints_of(folder))
        if is_new and has_checkpoint(folder):
            raise holds_a_run(folder)
        _check_can_start(folder, config, ranks.job)
        if (starts := read_starts(folder)) == UNKNOWN:
            aside, starts = move_aside(folder / ENVIRONMENT), []
            console.warn(f"{folder / ENVIRONMENT} is damaged; it is kept as {aside.name}, and begun anew")
        if config.update.same_bits and starts:
            for difference in differing_conditions(starts[-1], start):
                console.warn(f"{difference}: microbatches may have other bits from here on, whatever update.same_bits")
        num_unsaved = _count_updates(folder) if is_new else 0
        if is_new and (num_unsaved if shared else starts or config.run.resume):
            if is_file(folder / CONFIG) and read_file(folder / CONFIG) != recipe.encode():
                # Trackers keep the recipe of the run they know.
                (folder / TRACKING).unlink(missing_ok=True)
            again = f", and makes {count(num_unsaved, 'update')} again" if num_unsaved else ""
            console.say(f"nothing was saved yet: the run begins at update 0{again}")
        replace_text(folder / ENVIRONMENT, json.dumps({"starts": [*starts, start]}, indent=1) + "\n")
        if shared is None or not shared.is_joined:
            replace_text(folder / CONFIG, recipe)
        console.log_to(folder / LOG)

    def write_in_turn() -> None:
        with nullcontext() if shared is None else shared.turn(ROWS):
            write()

    ranks.on_main(write_in_turn, str(folder))


def enter_shared_folder(folder: Path, shared: SharedFolder, ranks: Ranks) -> str:
    """Enter a folder in which the replicas of a run write, and return its id. Collective.

    Raises `MegabatchError` if another run writes there, or if its file system has no locks.
    """

    def enter() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return shared.enter(open_file(folder / LOCK, os.O_RDWR | os.O_CREAT))
        except (BlockingIOError, PermissionError):
            raise MegabatchError(
                f"another run is writing in {folder}; wait for it, or choose another run.folder"
            ) from None
        except OSError as error:
            raise MegabatchError(
                f"replicas take turns to write in {folder}, and its file system has no locks ({error.strerror}); "
                "choose a run.folder on another disk, which all hosts share"
            ) from None

    return ranks.on_main(enter, str(folder))


def lock_run(folder: Path, within_seconds: float | None) -> None:
    """Keep other processes from writing to the run until this one ends. Raises `MegabatchError` if one does.

    The processes of a job whose launcher was killed are still about to leave, so it waits ``within_seconds`` for them.

    A POSIX lock belongs to the process, so a worker that outlives a killed run does not hold it. Closing the file would
    release it, so the descriptor stays open.
    """
    descriptor = open_file(folder / LOCK, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + (within_seconds or 0.0)
    while True:
        try:
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > deadline:
                raise MegabatchError(
                    f"another process is writing to the run in {folder}; wait for it, or choose another run.folder"
                ) from None
            time.sleep(SECONDS_BETWEEN_TRIES)
        except OSError:
            return None


def _check_can_start(folder: Path, config: Config, job: Job) -> None:
    """Raise if the run can neither resume nor start.

    A run without a checkpoint starts over if it is asked to, has made no update, ran out of memory, or belongs to this
    job of torchrun.
    """
    if has_checkpoint(folder):
        if not config.run.resume:
            raise holds_a_run(folder)
        return
    lines = read_file(folder / LOG).splitlines() if is_file(folder / LOG) else []
    saved = [match[1].decode() for line in lines if (match := SAVED.search(line))]
    if saved:
        # The user may still have a copy.
        raise MegabatchError(
            f"{folder} has no checkpoint any more, and its run has saved {saved[-1]}; put {checkpoints_of(folder)} "
            "back, or choose another run.folder"
        )
    starts = read_starts(folder)
    if not starts and not (config.run.resume and (folder / CONFIG).is_file()):
        _check_unused(folder)
    elif num_updates := _count_updates(folder):
        if not (config.run.resume or (folder / OOM_LIMIT_FILE).exists() or job.has_started(starts[-1])):
            raise MegabatchError(
                f"{folder} holds a run that has made {count(num_updates, 'update')} and saved none; begin it again "
                "with --run.resume=true, or choose another run.folder"
            )
        _check_same_recipe(folder, config, num_updates)


def check_own_paths(folder: Path) -> None:
    """Raise for a link, a pipe or a device that the run would write, delete or read as its own.

    A run's folder may come from elsewhere. Folders that the run does not know are left to whoever made them.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name in FOLDERS or not path.is_dir():
            check_own_path(path)
    for name in set(FOLDERS) - {FOLDER_OF_LINKS}:
        for place, folders, files in os.walk(folder / name):
            for path in sorted(Path(place, name) for name in (*folders, *files)):
                check_own_path(path)


def _check_unused(folder: Path) -> None:
    """Raise if the folder has files of an unknown run, or cannot be created."""
    for path in (checkpoints_of(folder), folder / METRICS, folder / CONFIG):
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


def _count_updates(folder: Path) -> int:
    return max((row["step"] for row in find_rows(folder / METRICS)[0] if not is_evaluation(row)), default=0)


def _check_same_recipe(folder: Path, config: Config, num_updates: int) -> None:
    try:
        there = load_config(recipe_of(folder), [], may_be_masked=True)
    except MegabatchError:
        # A damaged recipe is written again, and nothing that was saved is lost.
        return
    difference = first_difference(_identity(there), _identity(config))
    if difference is not None:
        key, there, now = difference
        raise MegabatchError(
            f"{folder} holds a run of another recipe, which has made {count(num_updates, 'update')} and saved none: "
            f"{key} is {there} there and {now} here; begin that again with `megabatch train {folder}`, or choose "
            "another run.folder"
        )


def _identity(config: Config) -> dict[str, Any]:
    model = {f"model.{key}": getattr(config.model, key) for key in ("name", "config")}
    data = {f"data.{key}": getattr(config.data, key) for key in DATA_KEYS}
    start = {"run.init_from": config.run.init_from}
    return mask(json.loads(json.dumps({**settings_of(config), **model, **data, **start}, default=str)))


def _check_shared_disk(folder: Path, ranks: Ranks) -> None:
    """Raise on every rank if one does not see what the main rank writes; a checkpoint has files of every rank.

    The file has a fresh name: a client of a network disk caches that a file was missing.
    """
    if ranks.size == 1:
        return
    mark = folder / f".seen-{ranks.broadcast(uuid.uuid4().hex)}"
    ranks.on_main(mark.touch, str(folder))
    blind = ranks.first_problem(None if mark.exists() else f"rank {ranks.rank} on {socket.gethostname()}")
    ranks.on_main(lambda: mark.unlink(missing_ok=True), str(folder))
    if blind:
        raise MegabatchError(
            f"run.folder is {folder}, where {blind} does not see what rank 0 writes, and a checkpoint has files of "
            "every rank; name a folder on a disk that all hosts share"
        )


def recipe_text(config: Config) -> str:
    """Return the whole recipe as TOML: every key with a value, to run it again from the beginning.

    Raises `MegabatchError` for a file name that is not UTF-8.
    """
    fresh = config.model_copy(update={"run": config.run.model_copy(update={"resume": False})})
    tables: dict[str, dict[str, Any]] = {}
    for name in Config.model_fields:
        section: Section = getattr(fresh, name)
        fields = type(section).model_fields.items()
        unset = [key for key, field in fields if getattr(section, key) is None and field.default is not None]
        tables[name] = section.model_dump(exclude_none=True) | dict.fromkeys(unset, NONE)
    text = tomli_w.dumps(mask(tables))
    for line in text.splitlines():
        shown = line.encode("utf-8", "backslashreplace").decode()
        if shown != line:
            raise MegabatchError(f"{CONFIG} cannot hold {shown}, which is not text in UTF-8; rename the file or folder")
    return text


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
        "torch_build": torch.version.git_version,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": sorted(set(ranks.gather(torch.get_num_threads()))),
        "num_ranks": ranks.size,
        **ranks.job.to_json(),
        "devices": {name: devices.count(name) for name in devices},
    }


def device_name(device: torch.device) -> str:
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
