"""Retention: which checkpoint a run resumes from, and which ones it keeps.

A checkpoint whose files differ from what was written is never used. The run resumes from an older one and says so.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.metadata import (
    BEST_ONLY,
    DamagedError,
    Digests,
    describe_versions,
    find_changed_file,
    read_digests,
    read_meta,
    shorten,
)
from megabatch.train.checkpoints.paths import (
    BEST,
    META,
    POINTER,
    UNFINISHED,
    checkpoints_of,
    has_checkpoint,
    named_by,
    path_of,
    step_named_by,
    step_of,
    steps_of,
    unfinished_of,
)
from megabatch.train.config import RunConfig
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import remove_path, remove_unfinished, replace_text
from megabatch.train.runtime.ranks import Ranks

Value = TypeVar("Value")


def resumed_from(run: RunConfig, ranks: Ranks, console: Console) -> Path | None:
    """Return the checkpoint that a run resumes from; None if it starts from update 0. Collective."""
    folder = Path(run.folder)
    if not run.resume or not ranks.on_main(lambda: has_checkpoint(folder), str(checkpoints_of(folder)), verb="read"):
        return None
    checkpoint = Checkpoints(folder).latest_valid(ranks)
    lines = ranks.on_main(lambda: describe_versions(checkpoint.path), str(checkpoint.path), verb="read")
    for line in (*checkpoint.warnings, *lines):
        console.warn(line)
    return checkpoint.path


@dataclass(frozen=True)
class ValidCheckpoint:
    """A checkpoint to resume from, and warnings about others that were passed over."""

    path: Path
    warnings: tuple[str, ...] = ()


class Checkpoints:
    """The checkpoints of a run. Each is verified at most once by a process."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pointer = folder, checkpoints_of(folder) / POINTER
        # By step. None is a valid checkpoint.
        self._damages: dict[int, str | None] = {}

    def damage(self, step: int, ranks: Ranks) -> str | None:
        """Return what is wrong with a checkpoint, the same on every rank; None if it is valid. Collective."""
        if step not in self._damages:
            self._damages[step] = find_damage(path_of(self._folder, step), ranks)
        return self._damages[step]

    def add(self, step: int) -> None:
        """Record a checkpoint that this process has just written or loaded."""
        self._damages[step] = None

    def latest_valid(self, ranks: Ranks) -> ValidCheckpoint:
        """Return the checkpoint that ``latest`` names, or the newest valid one before it. Collective.

        Raises `MegabatchError` naming every checkpoint if none is valid.
        """
        name, steps = self._read_on_main(lambda: (named_by(self._pointer), steps_of(self._folder)), ranks)
        named = step_of(name)
        damages = {} if named is None or named in steps else {named: "it is not there"}
        for step in reversed(steps):
            if named is not None and step > named:
                continue
            damage = self.damage(step, ranks)
            if damage is None:
                return ValidCheckpoint(path_of(self._folder, step), self._warnings(step, name, steps, damages))
            damages[step] = damage
        details = ", ".join(f"step-{step} ({shorten(damage)})" for step, damage in damages.items())
        beyond = [step for step in steps if step not in damages]
        change = (
            f"name step-{beyond[-1]}, which lies beyond, in {self._pointer}" if beyond else "put back a copy of one"
        )
        raise MegabatchError(
            f"{self._pointer.parent} has no whole checkpoint to resume from: {details or 'none at all'}; {change}, or "
            "start in a new run.folder"
        )

    def _warnings(self, step: int, name: str, steps: Sequence[int], damages: dict[int, str]) -> tuple[str, ...]:
        path = path_of(self._folder, step)
        lines = [f"{path_of(self._folder, damaged)} is damaged ({damages[damaged]})" for damaged in damages]
        if step_of(name) is None:
            lines.append(f"{self._pointer} names no checkpoint ({shorten(name) or 'nothing'})")
        lines = [f"{line}; the run resumes from {path.name}" for line in lines]
        if beyond := [later for later in steps if later > step and later not in damages]:
            lines.append(f"{path_of(self._folder, beyond[-1])} lies beyond {path.name}, from which the run resumes")
        return tuple(lines)

    def prune(self, keep_last: int | None, ranks: Ranks) -> None:
        """Delete checkpoints that are not to be kept. Collective.

        Kept are the last ``keep_last`` valid ones (None: all), those that a pointer names and those beyond ``latest``.
        One that was saved only because it was the best goes once it is not.
        """
        regular, superseded = self._read_on_main(self._list_regular_and_superseded, ranks)
        num_valid, old = 0, list[int]()
        for step in reversed(regular):
            if num_valid == keep_last:
                old.append(step)
            elif keep_last is not None:
                num_valid += self.damage(step, ranks) is None
        deleted = [*superseded, *old]
        ranks.on_main(lambda: self._delete(deleted), str(self._pointer.parent))
        self._damages = {step: damage for step, damage in self._damages.items() if step not in deleted}

    def make_room(self, ranks: Ranks) -> bool:
        """Keep one checkpoint fewer where another one does not fit on the disk; return True if that made room.

        The newest valid one stays, and those that a pointer names. Collective.
        """

        def count_if_full() -> int:
            steps = steps_of(self._folder)
            files = path_of(self._folder, steps[-1]).iterdir() if steps else ()
            is_full = shutil.disk_usage(self._folder).free < sum(file.stat().st_size for file in files)
            return len(steps) if is_full else 0

        number = self._read_on_main(count_if_full, ranks)
        if number < 2:
            return False
        self.prune(number - 1, ranks)
        return self._read_on_main(lambda: len(steps_of(self._folder)), ranks) < number

    def _list_regular_and_superseded(self) -> tuple[list[int], list[int]]:
        """List the steps up to ``latest``: those saved in turn, and those saved as the best that no pointer names."""
        now = step_named_by(self._pointer) or 0
        steps = [step for step in steps_of(self._folder) if step <= now]
        best_only = set[int]()
        for step in steps:
            # A damaged one is counted, and kept or deleted with the others.
            with suppress(MegabatchError):
                best_only |= {step} if read_meta(path_of(self._folder, step)).get(BEST_ONLY, False) else set()
        return [step for step in steps if step not in best_only], sorted(best_only - {*self._named_steps()})

    def _named_steps(self) -> list[int | None]:
        return [step_named_by(self._pointer.with_name(name)) for name in (POINTER, BEST)]

    def _delete(self, steps: Sequence[int]) -> None:
        """Delete checkpoints that no pointer names, and what killed processes have left of others."""
        for path in (path_of(self._folder, step) for step in steps if step not in self._named_steps()):
            remove_path(unfinished_of(path))
            # A half-deleted checkpoint must never look whole.
            os.replace(path, unfinished_of(path))
        folder = checkpoints_of(self._folder)
        for unfinished in folder.glob(f"step-*{UNFINISHED}"):
            if step_of(unfinished.name.removesuffix(UNFINISHED)) is not None:
                remove_path(unfinished)
        remove_unfinished(folder)

    def _read_on_main(self, read: Callable[[], Value], ranks: Ranks) -> Value:
        return ranks.on_main(read, str(self._pointer.parent), verb="read")


def find_damage(checkpoint: Path, ranks: Ranks) -> str | None:
    """Return what is wrong with a checkpoint, the same on every rank; None if it is valid. Collective.

    Only ``meta.json`` is parsed before the bytes of all files are known to be those that were written.
    """
    problem, digests = None, Digests()
    try:
        digests = read_digests(checkpoint)
    except DamagedError as error:
        problem = error.reason
    return ranks.first_problem(problem) or find_changed_file(checkpoint, digests, ranks)


def point_to_best(folder: Path, step: int, ranks: Ranks) -> None:
    """Let ``checkpoints/best`` name the checkpoint of a step, if it exists. Collective."""
    checkpoint = path_of(folder, step)

    def point() -> None:
        if (checkpoint / META).exists():
            replace_text(checkpoint.parent / BEST, checkpoint.name)

    ranks.on_main(point, str(checkpoint.parent / BEST))
