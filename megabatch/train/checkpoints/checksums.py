"""Sums: the size and the SHA-256 of every file of a checkpoint, so that a changed byte is seen before it is used.

Each rank sums the files that it wrote, by reading them back, about a gigabyte a second and mostly from the page cache:
that needs no writer of our own, and many ranks are as quick as their files are small. SHA-256, since processors have
instructions for it: it takes half the time of BLAKE2.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.runtime.ranks import Ranks


class Sum(NamedTuple):
    """What a file must be."""

    num_bytes: int
    sha256: str  # hexadecimal digits


Sums = dict[str, Sum]  # by the file's name


def sum_of(path: Path) -> Sum:
    """The size and sum of a file as it is now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Sum(file.tell(), digest)


def sums_of(checkpoint: Path, ranks: Ranks) -> Sums:
    """Those of every file that the ranks have written there, each by its own; collective.

    Raises `MegabatchError` on every rank where one cannot read what it wrote.
    """
    patterns = [f"__{ranks.rank}_*", *([".metadata"] if ranks.is_main else [])]  # as DCP names what a rank writes
    problem, here = "", {}
    try:
        here = {path.name: sum_of(path) for pattern in patterns for path in checkpoint.glob(pattern)}
    except OSError as error:
        problem = in_one_line(error)
    told = [json.loads(text) for text in ranks.gather(json.dumps([problem, here]))]
    for problem, _ in told:
        if problem:
            raise MegabatchError(f"cannot read back what was written to {checkpoint} ({problem}); look at its disk")
    return {name: Sum(*each) for _, sums in told for name, each in sums.items()}


def problem_of(checkpoint: Path, sums: Mapping[str, Sum], ranks: Ranks) -> str | None:
    """What is wrong with the first file that is not as its sum says, on every rank; None: nothing. Collective.

    The ranks share the work, by size.
    """
    names = sorted(sums, key=lambda name: (-sums[name].num_bytes, name))
    found = [problem for name in names if (problem := size_problem(checkpoint / name, sums[name].num_bytes))]
    mine = [] if found else names[ranks.rank :: ranks.size]
    found += [problem for name in mine if (problem := content_problem(checkpoint / name, sums[name]))]
    return first_told(found, ranks)


def first_told(problems: Sequence[str], ranks: Ranks) -> str | None:
    """The first problem of the first rank that has any; collective."""
    told = [each for text in ranks.gather(json.dumps(list(problems))) for each in json.loads(text)]
    return told[0] if told else None


def size_problem(path: Path, num_bytes: int, *, at_least: bool = False) -> str | None:
    """What is wrong with a file by its size alone."""
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        return f"{path.name} is not there" if isinstance(error, FileNotFoundError) else in_one_line(error)
    if size == num_bytes or (at_least and size > num_bytes):
        return None
    return f"{path.name} has {size:,} bytes of {num_bytes:,}"


def content_problem(path: Path, expected: Sum) -> str | None:
    """What is wrong with a file by what it holds."""
    try:
        return None if sum_of(path) == expected else f"{path.name} is not what was written: its SHA-256 is another"
    except OSError as error:
        return f"{path.name} cannot be read ({in_one_line(error)})"
