"""Checkpoint: a folder that is whole or not there, and a pointer to the latest one.

``checkpoints/step-N`` is written beside, as ``step-N.tmp``, and renamed by the main rank when every rank has written;
``checkpoints/latest`` names the folder to go on from. Nothing but whole folders is ever read.
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
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from megabatch import Learner
from megabatch.errors import MegabatchError
from megabatch.train.data import Data, lengths_of
from megabatch.train.metrics import FILE_NAME
from megabatch.train.ranks import Ranks

Meta = dict[str, Any]

POINTER = "latest"
META = "meta.json"
TITLES = {  # part of META → what another value in it makes of a run, and how its keys are named
    "settings": ("recipe", ""),
    "model_config": ("model", "model.config."),
    "parameters": ("model", "the parameter "),
    "data": ("data set", "data: "),
    "derived": ("recipe", ""),  # last: it differs where one of the others does
}
VERSION_KEYS = ("transformers_version",)  # of a model's config; they say who wrote it and not what it is


def checkpoints_of(folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return folder / "checkpoints"


def check_folder(folder: Path, *, resume: bool, ranks: Ranks) -> None:
    """Raise on every rank where the main rank finds that a run cannot be written to, or resumed from, the folder."""
    problem = None
    if ranks.is_main:
        try:
            latest(folder) if resume else check_unused(folder)
        except MegabatchError as error:
            problem = str(error)
    ranks.agree(problem)


def check_unused(folder: Path) -> None:
    """Raise where the folder holds a run, or cannot be made."""
    if not has_checkpoint(folder) and (checkpoints_of(folder).exists() or (folder / FILE_NAME).exists()):
        raise MegabatchError(
            f"{folder} holds a run that stopped before its first checkpoint; choose another run.folder or delete it"
        )
    if has_checkpoint(folder):
        raise MegabatchError(
            f"{folder} already holds a run; go on with --run.resume=true, or choose another run.folder"
        )
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise MegabatchError(
            f"run.folder is {folder} and {nearest} is no folder to write to; choose another run.folder"
        )


def has_checkpoint(folder: Path) -> bool:
    """Whether there is one to go on from."""
    return (checkpoints_of(folder) / POINTER).exists()


def latest(folder: Path) -> Path:
    """The checkpoint to go on from. Raises `MegabatchError` where there is none."""
    pointer = checkpoints_of(folder) / POINTER
    if not has_checkpoint(folder):
        raise MegabatchError(
            f"run.resume is set and {folder} has no checkpoint; start without run.resume, in a new folder"
        )
    checkpoint = pointer.parent / pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not (checkpoint / META).exists():
        raise MegabatchError(
            f"{pointer} names {checkpoint.name}, which is not there; name in it a step-N folder that is"
        )
    return checkpoint


def save(folder: Path, learner: Learner, meta: Meta, ranks: Ranks) -> Path:
    """Write ``checkpoints/step-N`` and point to it; collective."""
    whole = checkpoints_of(folder) / f"step-{meta['step']}"
    beside = whole.with_name(whole.name + ".tmp")
    if ranks.is_main:
        shutil.rmtree(beside, ignore_errors=True)  # left by a run that was killed here
        beside.mkdir(parents=True)
    ranks.barrier()
    try:
        with quiet_alone():
            save_state({"learner": learner.state_dict()}, checkpoint_id=beside, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise MegabatchError(f"cannot write {beside} ({reason_of(error)}); make room for it") from None
    ranks.barrier()
    if ranks.is_main:
        (beside / META).write_text(json.dumps(meta, indent=1), encoding="utf-8")
        shutil.rmtree(whole, ignore_errors=True)  # written after the pointer's step, by a run that was killed
        os.replace(beside, whole)
        replace_text(whole.parent / POINTER, whole.name)
    ranks.barrier()
    return whole


def load(checkpoint: Path, learner: Learner) -> None:
    """Bring the learner to the checkpoint's state, on any number of ranks; collective."""
    state = {"learner": learner.state_dict()}
    try:
        with quiet_alone():
            load_state(state, checkpoint_id=checkpoint, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise damaged(checkpoint, reason_of(error)) from None
    learner.load_state_dict(state["learner"])


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
        tables = [meta[part] for part in (*TITLES, "sampler")]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise damaged(checkpoint / META, one_line(error)) from None
    if not all(isinstance(table, dict) for table in tables):
        raise damaged(checkpoint / META, "a part of it is no table")
    return cast(Meta, meta)


def reason_of(error: CheckpointException) -> str:
    """What went wrong on the first rank on which DCP failed."""
    return one_line(next(iter(error.failures.values()))[0])


def one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def damaged(path: Path, reason: str) -> MegabatchError:
    """The error for a checkpoint that cannot be read."""
    return MegabatchError(
        f"{path} is damaged ({reason}); name an earlier step-N folder in the file checkpoints/{POINTER}, "
        "or start in a new run.folder"
    )


def describe(model: nn.Module, data: Data, settings: Meta, derived: Meta) -> Meta:
    """What makes a run another one: settings, the model's config, the parameters' types and shapes, the data."""
    config = cast(Any, model).config.to_dict()
    return {
        "settings": json.loads(json.dumps(settings)),
        "derived": derived,
        "model_config": json.loads(
            json.dumps({key: config[key] for key in config if key not in VERSION_KEYS}, default=str)
        ),
        "parameters": {
            name: [str(parameter.dtype).removeprefix("torch."), *parameter.shape]
            for name, parameter in model.named_parameters()
        },
        "data": {"samples": len(data.train), "tokens": sum(lengths_of(data.train))},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def check_same(checkpoint: Path, saved: Meta, here: Meta) -> None:
    """Raise `MegabatchError` that names the first thing in which a checkpoint and this run differ."""
    for part, (kind, title) in TITLES.items():
        difference = first_difference(saved[part], here[part])
        if difference is not None:
            key, there, now = difference
            raise MegabatchError(
                f"{checkpoint} is of another {kind}: {title}{key} is {there} there and {now} here; "
                "resume with the recipe it was made with, or start in a new run.folder"
            )


def first_difference(saved: Mapping[str, Any], here: Mapping[str, Any]) -> tuple[str, object, object] | None:
    """The first key whose values differ, with both values."""
    for key in [*saved, *(key for key in here if key not in saved)]:
        there, now = saved.get(key, "missing"), here.get(key, "missing")
        if there != now:
            return key, there, now
    return None


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old text or the new one, never a part."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)
