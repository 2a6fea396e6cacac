"""Checkpoint: a folder that is whole or not there.

``checkpoints/step-N`` is written beside, as ``step-N.tmp``, and renamed by the main rank when every rank has written
and ``meta.json`` says what every file must be. Nothing but whole folders is ever read.
"""

import contextlib
import os
import shutil
import threading
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.stateful import Stateful

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.checksums import Sums, sums_of
from megabatch.train.checkpoints.metadata import DamagedError, Meta, write_meta
from megabatch.train.checkpoints.paths import POINTER, beside, path_of, replace_text
from megabatch.train.checkpoints.safe_pickle import SafePlanner, SafeReader
from megabatch.train.runtime.ranks import Ranks


def states_of(state: Mapping[str, Stateful]) -> dict[str, Any]:
    """The state of each part, under its name."""
    return {name: part.state_dict() for name, part in state.items()}


def save(folder: Path, states: Mapping[str, Any], meta: Meta, ranks: Ranks) -> Path:
    """Write ``checkpoints/step-N`` and point to it; collective. N is ``meta["step"]``.

    Raises `MegabatchError` on every rank where one cannot write, and leaves nothing of it behind.
    """
    whole = path_of(folder, meta["step"])
    try:
        ranks.on_main(lambda: begin(whole), str(beside(whole)))
        write_states(states, beside(whole), ranks)
        sums = sums_of(beside(whole), ranks)
        ranks.on_main(lambda: finish(whole, meta, sums), str(whole))
    except MegabatchError:
        ranks.on_main(lambda: shutil.rmtree(beside(whole), ignore_errors=True), str(beside(whole)))
        raise
    return whole


def begin(whole: Path) -> None:
    """Make the folder beside."""
    shutil.rmtree(beside(whole), ignore_errors=True)  # left by a run that was killed here
    beside(whole).mkdir(parents=True)


def write_states(states: Mapping[str, Any], to: Path, ranks: Ranks) -> None:
    """Let every rank write its part; collective."""
    try:
        with quiet_alone():
            save_state(dict(states), checkpoint_id=to, process_group=ranks.group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        if isinstance(first, KeyboardInterrupt):  # DCP takes in whatever is raised
            raise KeyboardInterrupt from None
        reason = first.strerror if isinstance(first, OSError) and first.strerror else in_one_line(first)
        raise MegabatchError(f"cannot write {to} ({reason}); make room for it") from None


def finish(whole: Path, meta: Meta, sums: Sums) -> None:
    """Say what it is, give it its name and point to it."""
    write_meta(beside(whole), meta, sums)
    shutil.rmtree(whole, ignore_errors=True)  # damaged, or written after the pointer's step by a run that was killed
    os.replace(beside(whole), whole)
    replace_text(whole.parent / POINTER, whole.name)


def load(checkpoint: Path, state: Mapping[str, Stateful]) -> None:
    """Bring each part of a run to the checkpoint's state, on any number of ranks; collective."""
    reader, states = SafeReader(checkpoint), states_of(state)
    try:
        reader.read_metadata()  # before DCP does, which logs a traceback where it cannot
    except Exception as error:  # whatever a damaged file makes its reader raise
        raise DamagedError(checkpoint, in_one_line(error)) from None
    try:
        with quiet_alone():
            load_state(states, storage_reader=reader, planner=SafePlanner(), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise DamagedError(checkpoint, reason_of(error)) from None
    for name, part in state.items():
        part.load_state_dict(states[name])


def reason_of(error: CheckpointException) -> str:
    """What went wrong on the first rank on which DCP failed."""
    return in_one_line(next(iter(error.failures.values()))[0])


@contextlib.contextmanager
def quiet_alone() -> Generator[None, None, None]:
    """Surrounds DCP's calls, which warn a process without a process group that it is alone.

    What one thread ignores for a while is lost or kept for all of them; so `ignore_alone` is for threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        ignore_alone()
        yield


def ignore_alone() -> None:
    """Ignore that warning for good."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
