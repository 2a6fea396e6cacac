"""Rows of a run as columns of short numbers, few enough for a browser."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.runtime.files import Row

# Updates of a page. Of more, every second, third, ... is drawn, and the last one.
MOST_UPDATES = 20_000
# Microbatches of all cuts of a page. Of more, those of every second, third, ... update are drawn.
MOST_MICROBATCHES = 120_000
MOST_SKIPPED = 500
# Digits of a number on the page. metrics.jsonl has all of them.
DIGITS = 6
Column = list[float | int | None]


def short(value: Any) -> float | int | None:
    """Return the number in six digits; None for anything else, and where it is not finite."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def columns_of(rows: Sequence[Row], keys: Iterable[str]) -> dict[str, Column]:
    columns = {key: [short(row.get(key)) for row in rows] for key in keys}
    return {
        key: column for key, column in columns.items() if key == "step" or any(value is not None for value in column)
    }


def thinned(rows: Sequence[Row], limit: int) -> tuple[list[Row], int]:
    """Return every n-th row and the last one, about ``limit`` of them, and n."""
    every = max(1, -(-len(rows) // limit))
    chosen = list(rows[::every])
    return [*chosen, rows[-1]] if rows and (len(rows) - 1) % every else chosen, every


def keys_of(rows: Iterable[Row]) -> list[str]:
    """Return every key of any row, in the order in which they come."""
    return list(dict.fromkeys(key for row in rows for key in row))


def evaluations_of(rows: Sequence[Row]) -> dict[str, dict[str, Column]]:
    """Return the columns of every evaluated set, without the prefix eval_."""
    sets: dict[str, list[Row]] = {}
    for row in rows:
        numbers = {key.removeprefix("eval_"): value for key, value in row.items()}
        sets.setdefault(str(numbers.pop("set")), []).append(numbers)
    return {name: columns_of(of_set, keys_of(of_set)) for name, of_set in sets.items()}


def cuts_of(rows: Sequence[Row], path: object) -> dict[str, Any]:
    """Return the microbatches of all updates as flat lists; ``counts`` has their number by update and rank.

    Of more than `MOST_MICROBATCHES` those of every n-th update are kept; ``every`` is n.

    Raises `MegabatchError` where a row is no cut.
    """
    ranks = rows[-1].get("cut") if rows else None
    a_row = sum(len(cut[0]) for cut in ranks if cut) if isinstance(ranks, list) else 1
    chosen, every = thinned(rows, max(1, MOST_MICROBATCHES // max(1, a_row)))
    lists: dict[str, Any] = {"step": [], "counts": [], "left_out": [], "samples": [], "real": [], "padding": []}
    for row in chosen:
        try:
            add_cut(lists, row)
        except (KeyError, TypeError, ValueError):
            raise MegabatchError(f"{path} is damaged (update {row['step']} has no cut); delete that line") from None
    return {**lists, "every": every}


def add_cut(lists: dict[str, Any], row: Mapping[str, Any]) -> None:
    """Add an update's cut to the lists. Raises where the row has none."""
    ranks = [[list(map(int, column)) for column in rank] for rank in row["cut"]]
    if any(len(rank) != 3 or len(set(map(len, rank))) > 1 for rank in ranks):
        raise ValueError("three columns of one length")
    lists["step"].append(row["step"])
    lists["counts"].append([len(samples) for samples, _, _ in ranks])
    lists["left_out"].append(int(row.get("microbatches_left_out", 0)))
    for name, place in (("samples", 0), ("real", 1), ("padding", 2)):
        lists[name] += [number for rank in ranks for number in rank[place]]


def timelines_of(rows: Sequence[Row], path: object) -> list[dict[str, Any]]:
    timelines: list[dict[str, Any]] = []
    try:
        for row in rows:
            spans = [(list(map(str, rank["kinds"])), list(map(float, rank["ms"]))) for rank in row["ranks"]]
            if any(len(ms) != len(kinds) + 1 for kinds, ms in spans):
                raise ValueError("a span has a beginning and an end")
            texts = {name: str(row[name]) for name in ("device", "sync")}
            ranks = [{"kinds": kinds, "ms": ms} for kinds, ms in spans]
            timelines.append({"step": row["step"], "num_ranks": int(row["num_ranks"]), **texts, "ranks": ranks})
    except (KeyError, TypeError, ValueError):
        raise MegabatchError(f"{path} is damaged (a line is no timeline); delete that line") from None
    return timelines


def skipped_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the skipped samples by update, the last first, with some of their names."""
    skipped: list[dict[str, Any]] = []
    for row in reversed(rows[-MOST_SKIPPED:]):
        names = row.get("samples") or []
        reason = str(row.get("reason", ""))
        samples = list(map(str, names[:5]))
        skipped.append({"step": row["step"], "reason": reason, "num_samples": len(names), "samples": samples})
    return skipped
