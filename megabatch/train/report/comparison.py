"""Comparison of two runs, update by update, by their manifests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.callbacks.update_logs import CLOSE, SAME
from megabatch.train.runtime.files import MANIFEST, Row, read_rows

KEYS = (*SAME, "num_samples", *CLOSE)


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs in the updates that both have made."""

    text: str  # a table
    is_same: bool  # samples, weights and learning rates of all of them are equal


def compare(one: Path, other: Path) -> Comparison:
    """Compare the runs in two folders, update by update."""
    ours, theirs = read_manifest(one), read_manifest(other)
    steps = sorted(ours.keys() & theirs.keys())
    if not steps:
        raise MegabatchError(f"{one} and {other} have no update in common; compare runs of one recipe")
    pairs = {step: (ours[step], theirs[step]) for step in steps}
    first = {key: next((step for step, (a, b) in pairs.items() if a[key] != b[key]), None) for key in SAME}
    lines = [f"{len(steps)} updates compared, of {len(ours)} in {one} and {len(theirs)} in {other}"]
    lines += [f"{key:<10} {first_text(key, first[key], pairs)}" for key in SAME]
    lines += [f"{key:<10} {largest_text(key, pairs)}" for key in CLOSE]
    return Comparison("\n".join(lines), is_same=not any(first.values()))


def read_manifest(folder: Path) -> dict[int, Row]:
    """Return the line of each update. Raises `MegabatchError` where there are none."""
    path = folder / MANIFEST
    if not path.is_file():
        raise MegabatchError(f"{folder} has no {MANIFEST}; train with --run.manifest=true and compare runs' folders")
    rows = {row["step"]: row for row in read_rows(path)}
    for step, row in rows.items():
        kinds = [(key, str if key == "samples" else int | float | None) for key in KEYS]
        if any(key not in row or not isinstance(row[key], kind) for key, kind in kinds):
            raise MegabatchError(
                f"{path} is damaged (update {step} has not all of {', '.join(KEYS)}); delete that line"
            )
    return rows


def first_text(key: str, step: int | None, pairs: Mapping[int, tuple[Row, Row]]) -> str:
    """Return the first update in which the runs differ, as text."""
    if step is None:
        return "equal"
    here, there = (row[key] for row in pairs[step])
    return f"differs from update {step} on: {here} and {there}"


def largest_text(key: str, pairs: Mapping[int, tuple[Row, Row]]) -> str:
    """Return the update in which the runs are furthest apart, as text."""
    differences = {step: relative_difference(a[key], b[key]) for step, (a, b) in pairs.items()}
    step = max(differences, key=differences.__getitem__)
    if differences[step] == 0:
        return "equal"
    here, there = (row[key] for row in pairs[step])
    return f"differs by at most {differences[step]:.2g}, relative, at update {step}: {here} and {there}"


def relative_difference(a: float | None, b: float | None) -> float:
    """Return the difference over the larger number; infinity where only one is a number."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(a), abs(b), 5e-324)
