"""Shelf: a run's checkpoints: which is whole, which is gone on from, which are kept.

A checkpoint whose files are not what was written is never used. The one before it is, which is said aloud.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.checksums import first_told, problem_of, size_problem
from megabatch.train.checkpoints.metadata import BEST_ONLY, META, DamagedError, read_meta, read_sums, shortened
from megabatch.train.checkpoints.paths import (
    BEST,
    POINTER,
    UNFINISHED,
    beside,
    checkpoints_of,
    has_checkpoint,
    named_by,
    path_of,
    replace_text,
    step_named_by,
    steps_of,
)
from megabatch.train.checkpoints.safe_pickle import SafeReader
from megabatch.train.config import RunConfig
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from, and what is to be said of the choice."""

    path: Path
    warnings: tuple[str, ...] = ()


class Shelf:
    """The checkpoints of a run. What was once found whole or damaged by this process is not read again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problems: dict[int, str | None] = {}  # by step; None: whole

    def problem(self, step: int, ranks: Ranks) -> str | None:
        """What is wrong with the checkpoint of that step, the same on every rank; None: it is whole. Collective."""
        if step not in self._problems:
            self._problems[step] = damage_of(path_of(self._folder, step), ranks)
        return self._problems[step]

    def choose(self, ranks: Ranks) -> Chosen:
        """The whole checkpoint to go on from: the one that ``latest`` names, or the newest before it; collective.

        Raises `MegabatchError` that names all that there are, where none of them is whole.
        """
        named, name, steps = told_by_main(named_and_there, self._folder, ranks)
        candidates = [step for step in reversed(steps) if named is None or step <= named]
        problems = {} if named is None or named in steps else {named: "it is not there"}
        for step in candidates:
            problem = self.problem(step, ranks)
            if problem is None:
                return Chosen(path_of(self._folder, step), self._warnings(step, named, name, steps, problems))
            problems[step] = problem
        raise MegabatchError(none_whole(self._folder, problems, [step for step in steps if step not in problems]))

    def add(self, step: int) -> None:
        """Take note of a checkpoint that was just written."""
        self._problems[step] = None

    def prune(self, keep_last: int | None, ranks: Ranks) -> None:
        """Delete the checkpoints that are not to be kept: all before the last ``keep_last`` whole ones, and those that
        were only saved as the best and are not any more; collective. What `POINTER` and `BEST` name stays, and what a
        run that was gone back from has left beyond the latest.
        """
        in_turn, others = told_by_main(on_shelf, self._folder, ranks)
        num_whole, old = 0, []
        for step in reversed(in_turn):
            if num_whole == keep_last:
                old.append(step)
            elif keep_last is not None:
                num_whole += self.problem(step, ranks) is None
        ranks.on_main(lambda: delete(self._folder, [*others, *old]), str(checkpoints_of(self._folder)))
        self._problems = {step: problem for step, problem in self._problems.items() if step not in (*others, *old)}

    def _warnings(
        self, step: int, named: int | None, name: str, steps: Sequence[int], problems: dict[int, str]
    ) -> tuple[str, ...]:
        """What is to be said of going on from ``step``."""
        path, checkpoints = path_of(self._folder, step), checkpoints_of(self._folder)
        said = [f"{path_of(self._folder, each)} is damaged ({problems[each]})" for each in problems]
        if named is None:
            said.append(f"{checkpoints / POINTER} names no checkpoint ({shortened(name) or 'nothing'})")
        said = [f"{each}; the run goes on from {path.name}" for each in said]
        if beyond := [each for each in steps if each > step and each not in problems]:
            said.append(f"{path_of(self._folder, beyond[-1])} lies beyond {path.name}, from which the run goes on")
        if read_sums(path) is None:
            said.append(f"{path} has no checksums, as of an earlier version: only that its files are there is known")
        return tuple(said)


def resumed_from(run: RunConfig, ranks: Ranks, console: Console) -> Path | None:
    """The checkpoint that a run goes on from; None where it begins, or begins again; collective."""
    folder = Path(run.folder)
    if not run.resume or not told_by_main(lambda each: [has_checkpoint(each)], folder, ranks)[0]:
        return None
    chosen = Shelf(folder).choose(ranks)
    for line in chosen.warnings:
        console.warn(line)
    return chosen.path


def damage_of(checkpoint: Path, ranks: Ranks) -> str | None:
    """What is wrong with a checkpoint, the same on every rank; None: it is whole; collective.

    Nothing of it but ``meta.json`` is looked into before its bytes are known to be those that were written.
    """
    problem, sums = "", None
    try:
        sums = read_sums(checkpoint)
        if sums is None:  # of an earlier version
            problem = unsummed_problem(checkpoint)
    except DamagedError as error:
        problem = error.reason
    told = first_told([problem] if problem else [], ranks)
    return told if told is not None or sums is None else problem_of(checkpoint, sums, ranks)


def unsummed_problem(checkpoint: Path) -> str:
    """What is seen to be wrong with a checkpoint that has no sums: a file that is missing, or too short."""
    try:
        read_meta(checkpoint)
        stored = SafeReader(checkpoint).read_metadata().storage_data
        ends: dict[str, int] = {}
        for each in stored.values():
            ends[each.relative_path] = max(ends.get(each.relative_path, 0), each.offset + each.length)
    except DamagedError as error:
        return error.reason
    except Exception as error:  # whatever a damaged file makes its reader raise
        return in_one_line(error)
    found = (size_problem(checkpoint / name, end, at_least=True) for name, end in ends.items())
    return next((problem for problem in found if problem), "")


def told_by_main(read: Callable[[Path], list[Any]], folder: Path, ranks: Ranks) -> list[Any]:
    """What the main rank reads of a run's folder, as JSON has it; what it cannot read is a `MegabatchError` on every
    rank. Collective."""
    problem, found = None, []
    if ranks.is_main:
        try:
            found = read(folder)
        except OSError as error:
            problem = f"cannot read {checkpoints_of(folder)} ({in_one_line(error)}); allow it, or look at its disk"
    ranks.agree(problem)
    return json.loads(ranks.gather(json.dumps(found))[0])


def named_and_there(folder: Path) -> list[Any]:
    """The step that the pointer names, the text in it, and the steps that there are."""
    pointer = checkpoints_of(folder) / POINTER
    return [step_named_by(pointer), named_by(pointer), steps_of(folder)]


def none_whole(folder: Path, problems: dict[int, str], beyond: Sequence[int]) -> str:
    """The line for a run of which no checkpoint can be gone on from."""
    each = ", ".join(f"step-{step} ({shortened(problem)})" for step, problem in problems.items())
    if beyond:
        change = f"name step-{beyond[-1]}, which lies beyond, in {checkpoints_of(folder) / POINTER}"
    else:
        change = "put back a copy of one"
    return (
        f"{checkpoints_of(folder)} has no whole checkpoint to go on from: {each or 'none at all'}; {change}, or start "
        "in a new run.folder"
    )


def point_to_best(folder: Path, step: int, ranks: Ranks) -> None:
    """Let ``checkpoints/best`` name the checkpoint of that step, if it is there; collective."""
    whole = path_of(folder, step)

    def point() -> None:
        if (whole / META).exists():
            replace_text(whole.parent / BEST, whole.name)

    ranks.on_main(point, str(whole.parent / BEST))


def on_shelf(folder: Path) -> list[list[int]]:
    """The steps up to the latest that were saved in their turn, and those to delete: saved as the best, and not any
    more; but for what `POINTER` and `BEST` name."""
    checkpoints = checkpoints_of(folder)
    now = step_named_by(checkpoints / POINTER) or 0
    steps = [step for step in steps_of(folder) if step <= now]
    best_only = {step for step in steps if is_best_only(path_of(folder, step))}
    return [[step for step in steps if step not in best_only], sorted(best_only - {*kept_steps(folder)})]


def kept_steps(folder: Path) -> list[int | None]:
    """The steps that a pointer names."""
    return [step_named_by(checkpoints_of(folder) / pointer) for pointer in (POINTER, BEST)]


def is_best_only(checkpoint: Path) -> bool:
    """Whether it says of itself that it is kept for as long as it is the best."""
    try:
        return bool(read_meta(checkpoint).get(BEST_ONLY, False))
    except MegabatchError:  # damaged; not for us to judge
        return False


def delete(folder: Path, steps: Sequence[int]) -> None:
    """Delete these checkpoints but for what a pointer names, and what a kill has left of others."""
    for path in (path_of(folder, step) for step in steps if step not in kept_steps(folder)):
        shutil.rmtree(beside(path), ignore_errors=True)
        os.replace(path, beside(path))  # so that a half-deleted one is never taken for a whole one
    for unfinished in checkpoints_of(folder).glob(f"step-*{UNFINISHED}"):
        shutil.rmtree(unfinished, ignore_errors=True)
