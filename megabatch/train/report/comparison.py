"""Comparison of two runs, update by update, by their manifests."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.runtime.files import (
    CLOSE,
    MANIFEST,
    SAME,
    Row,
    differing_conditions,
    irregular_steps,
    read_rows,
    read_starts,
)

WITHIN = 1e-3  # relative difference of losses and norms, of float32 after thousands of updates on other ranks
KEYS = (*SAME, "num_samples", *CLOSE)


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs in the updates that both have made."""

    text: str  # a table
    is_same: bool  # every update is in both once, with equal samples, weights and rates, and losses within the bound


def compare(one: Path, other: Path, within: float) -> Comparison:
    """Compare the runs in two folders, update by update. Losses and norms may differ by ``within``, relative."""
    (ours, wrong), (theirs, other_wrong) = read_manifest(one), read_manifest(other)
    steps = sorted(ours.keys() & theirs.keys())
    if steps and len({len(each[steps[0]]["samples"]) for each in (ours, theirs)}) > 1:
        raise MegabatchError(
            f"{one} or {other} is of an earlier version, which hashed the names of samples and not their content; "
            "train both with one version"
        )
    if not steps:
        raise MegabatchError(f"{one} and {other} have no update in common; compare runs of one recipe")
    pairs = {step: (ours[step], theirs[step]) for step in steps}
    first = {key: next((step for step, (a, b) in pairs.items() if a[key] != b[key]), None) for key in SAME}
    lines = [f"{len(steps)} updates compared, of {len(ours)} in {one} and {len(theirs)} in {other}"]
    lines += [f"{key:<10} {first_text(key, first[key], pairs)}" for key in SAME]
    far = [key for key in CLOSE if any(relative_difference(a[key], b[key]) > within for a, b in pairs.values())]
    beyond = {key: f", more than {within:g}" if key in far else "" for key in CLOSE}
    lines += [f"{key:<10} {largest_text(key, pairs)}{beyond[key]}" for key in CLOSE]
    odd = wrong + other_wrong
    if not odd and len(ours) != len(theirs):
        odd = [f"{one if len(ours) < len(theirs) else other} ends after update {steps[-1]}"]
    differs = any(first.values()) or any(a[key] != b[key] for key in CLOSE for a, b in pairs.values())
    if not (differs or odd):
        lines.append("bits       equal in every number of every update")
    elif differs:
        lines += differing_starts(one, other)
    return Comparison("\n".join([*lines, *odd]), is_same=not (any(first.values()) or far or odd))


def differing_starts(one: Path, other: Path) -> list[str]:
    """Return what the bits of a microbatch depend on and differs between the last starts of two runs."""
    starts = [read_starts(folder)[-1:] for folder in (one, other)]
    return [f"bits       {each}" for a, b in zip(*starts, strict=False) for each in differing_conditions(a, b)]


def read_manifest(folder: Path) -> tuple[dict[int, Row], list[str]]:
    """Return the line of each update, and which are missing or doubled. Raises `MegabatchError` without any."""
    path = folder / MANIFEST
    if not path.is_file():
        raise MegabatchError(f"{folder} has no {MANIFEST}; train with --run.manifest=true and compare runs' folders")
    lines = read_rows(path)
    rows, odd = {row["step"]: row for row in lines}, irregular_steps([row["step"] for row in lines])
    for step, row in rows.items():
        kinds = [(key, str if key == "samples" else int | float | None) for key in KEYS]
        if any(key not in row or not isinstance(row[key], kind) for key, kind in kinds):
            raise MegabatchError(
                f"{path} is damaged (update {step} has not all of {', '.join(KEYS)}); delete that line"
            )
    return rows, [f"{path} {odd}"] if odd else []


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
