"""Checkpoint: a folder that is whole or not there, and pointers to the latest one and to the best one.

``checkpoints/step-N`` is written beside, as ``step-N.tmp``, and renamed by the main rank when every rank has written;
``checkpoints/latest`` names the folder to go on from, ``checkpoints/best`` that of the lowest watched loss. Nothing but
whole folders is ever read.
"""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import transformers
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.stateful import Stateful

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.ranks import Ranks
from megabatch.train.safe import SafePlanner, SafeReader

Meta = dict[str, Any]

POINTER = "latest"
BEST = "best"
META = "meta.json"
UNFINISHED = ".tmp"
BEST_ONLY = "best_only"  # key of META: true in a checkpoint that is kept for as long as it is the best, and no longer
POSITIONS = ("updates", "watch")  # parts of META that say where a run is
TITLES = {  # part of META → what another value in it makes of a run, and how its keys are named
    "settings": ("recipe", ""),
    "model_config": ("model", "model.config."),
    "parameters": ("model", "the parameter "),
    "data": ("data set", "data: "),
    "derived": ("recipe", ""),  # last: it differs where one of the others does
}
SAY_LITTLE = "fingerprint"  # how keys begin that differ wherever something does; any other difference says more
MISSING = "missing"
NOTHING: tuple[object, ...] = (None, {}, [])
MAX_CHARACTERS = 80  # of a value in a message


def checkpoints_of(folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return folder / "checkpoints"


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one to go on from."""
    return (checkpoints_of(folder) / POINTER).exists()


def path_of(folder: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of that step."""
    return checkpoints_of(folder) / f"step-{step}"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder; None for a folder of another name, an unfinished one among them."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdecimal() and path.name != number else None


def named_by(pointer: Path) -> str:
    """The name in the pointer's file; "" where there is no such file."""
    return pointer.read_text(encoding="utf-8", errors="replace").strip() if pointer.exists() else ""


def latest(folder: Path) -> Path:
    """The checkpoint to go on from. Raises `MegabatchError` where there is none."""
    pointer = checkpoints_of(folder) / POINTER
    if not has_checkpoint(folder):
        raise MegabatchError(
            f"{folder} has no checkpoint to go on from; start in a new run.folder (run.save_every saves on the way)"
        )
    checkpoint = pointer.parent / named_by(pointer)
    if not (checkpoint / META).exists():
        raise MegabatchError(
            f"{pointer} names {checkpoint.name}, which is not there; name in it a step-N folder that is"
        )
    return checkpoint


def best(folder: Path) -> Path | None:
    """The checkpoint of the lowest watched loss, where one was kept."""
    checkpoint = checkpoints_of(folder) / named_by(checkpoints_of(folder) / BEST)
    return checkpoint if (checkpoint / META).exists() else None


def save(folder: Path, state: Mapping[str, Stateful], meta: Meta, ranks: Ranks) -> Path:
    """Write ``checkpoints/step-N`` and point to it; collective. N is ``meta["step"]``."""
    whole = path_of(folder, meta["step"])
    beside = whole.with_name(whole.name + UNFINISHED)

    def begin() -> None:
        shutil.rmtree(beside, ignore_errors=True)  # left by a run that was killed here
        beside.mkdir(parents=True)

    def finish() -> None:
        (beside / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        shutil.rmtree(whole, ignore_errors=True)  # written after the pointer's step, by a run that was killed
        os.replace(beside, whole)
        replace_text(whole.parent / POINTER, whole.name)

    ranks.on_main(begin, str(beside))
    try:
        with quiet_alone():
            save_state(states_of(state), checkpoint_id=beside, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise MegabatchError(f"cannot write {beside} ({reason_of(error)}); make room for it") from None
    ranks.barrier()
    ranks.on_main(finish, str(beside))
    return whole


def load(checkpoint: Path, state: Mapping[str, Stateful]) -> None:
    """Bring each part of a run to the checkpoint's state, on any number of ranks; collective."""
    reader, states = SafeReader(checkpoint), states_of(state)
    try:
        reader.read_metadata()  # before DCP does, which logs a traceback where it cannot
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise damaged(checkpoint, in_one_line(error)) from None
    try:
        with quiet_alone():
            load_state(states, storage_reader=reader, planner=SafePlanner(), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise damaged(checkpoint, reason_of(error)) from None
    for name, part in state.items():
        part.load_state_dict(states[name])


def states_of(state: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of each part, under its name."""
    return {name: part.state_dict() for name, part in state.items()}


def point_to_best(folder: Path, step: int, ranks: Ranks) -> None:
    """Let ``checkpoints/best`` name the checkpoint of that step, which is whole; collective."""
    whole = path_of(folder, step)

    def point() -> None:
        if (whole / META).exists():
            replace_text(whole.parent / BEST, whole.name)

    ranks.on_main(point, str(whole.parent / BEST))


def prune(folder: Path, keep_last: int | None, ranks: Ranks) -> None:
    """Delete the checkpoints that are not to be kept: all but the last ``keep_last``, and those that were only saved as
    the best and are not any more; collective. What `POINTER` and `BEST` name stays, and what a run that was gone back
    from has left beyond the latest.
    """

    def delete() -> None:
        for path in superfluous(folder, keep_last):
            unfinished = path.with_name(path.name.removesuffix(UNFINISHED) + UNFINISHED)
            if path != unfinished:
                shutil.rmtree(unfinished, ignore_errors=True)
                os.replace(path, unfinished)  # so that a half-deleted one is never taken for a whole one
            shutil.rmtree(unfinished)

    ranks.on_main(delete, str(checkpoints_of(folder)))


def superfluous(folder: Path, keep_last: int | None) -> list[Path]:
    """The folders that `prune` deletes, what a kill has left of one included."""
    checkpoints = checkpoints_of(folder)
    named = {named_by(checkpoints / POINTER), named_by(checkpoints / BEST)}
    now = step_of(latest(folder)) or 0
    steps = {step: path for path in checkpoints.iterdir() if (step := step_of(path)) is not None and step <= now}
    past = [steps[step] for step in sorted(steps)]
    best_only = [path for path in past if is_best_only(path)]
    in_turn = [path for path in past if path not in best_only]
    old = [] if keep_last is None else in_turn[:-keep_last]
    left = sorted(checkpoints.glob(f"step-*{UNFINISHED}"))
    return [path for path in (*best_only, *old, *left) if path.name not in named]


def is_best_only(checkpoint: Path) -> bool:
    """Whether it says of itself that it is kept for as long as it is the best."""
    try:
        return bool(read_meta(checkpoint).get(BEST_ONLY, False))
    except MegabatchError:  # damaged; not for us to judge
        return False


@contextlib.contextmanager
def quiet_alone() -> Generator[None, None, None]:
    """Surrounds DCP's calls, which warn a process without a process group that it is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_meta(checkpoint: Path) -> Meta:
    """What the checkpoint says of itself. Raises `MegabatchError` where that cannot be read."""
    try:
        meta = json.loads((checkpoint / META).read_text(encoding="utf-8"))
        tables = [meta[part] for part in (*TITLES, *POSITIONS)]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise damaged(checkpoint / META, in_one_line(error)) from None
    if not all(isinstance(table, dict) for table in tables):
        raise damaged(checkpoint / META, "a part of it is no table")
    return cast(Meta, meta)


def reason_of(error: CheckpointException) -> str:
    """What went wrong on the first rank on which DCP failed."""
    return in_one_line(next(iter(error.failures.values()))[0])


def damaged(path: Path, reason: str) -> MegabatchError:
    """The error for a checkpoint that cannot be read."""
    return MegabatchError(
        f"{path} is damaged ({reason}); name an earlier step-N folder in the file checkpoints/{POINTER}, "
        "or start in a new run.folder"
    )


def describe(*, model: Meta, data: Meta, settings: Meta, derived: Meta) -> Meta:
    """What makes a run another one: settings, the model's config and parameters, the data; as JSON will have it."""
    parts = {"settings": settings, "derived": derived, "model_config": {}, "parameters": {}, **model, "data": data}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return json.loads(json.dumps({**parts, "versions": versions}, default=str))


def check_same(checkpoint: Path, saved: Meta, here: Meta) -> None:
    """Raise `MegabatchError` that names the first thing in which a checkpoint and this run differ."""
    for part, (kind, title) in TITLES.items():
        difference = first_difference(saved[part], here[part])
        if difference is not None:
            key, there, now = difference
            change = f"set {key} to {there}" if part == "derived" else "resume with the recipe it was made with"
            raise MegabatchError(
                f"{checkpoint} is of another {kind}: {title}{key} is {there} there and {now} here; "
                f"{change}, or start in a new run.folder"
            )


def first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """The dotted key of the first values that differ, with both; of two that differ, the one that says more."""
    keys = [*saved, *(key for key in here if key not in saved)]
    for key in sorted(keys, key=lambda key: key.startswith(SAY_LITTLE)):
        there, now = saved.get(key, MISSING), here.get(key, MISSING)
        if isinstance(there, dict) and isinstance(now, dict):
            within = first_difference(cast(Meta, there), cast(Meta, now))
            if within is not None:
                return f"{key}.{within[0]}", *within[1:]
        elif there != now and not (there is MISSING and now in NOTHING):  # a key that an earlier version did not have
            return key, shortened(there), shortened(now)
    return None


def shortened(value: object) -> str:
    """The value as text, or its beginning where a line has no room for all of it."""
    text = str(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
