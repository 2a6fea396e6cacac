"""A small sample of a large table in which every pair of values that can meet, meets."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Axes = Mapping[str, Sequence[Any]]
Row = dict[str, Any]
Valid = Callable[[Row], bool]  # also of a row with only some of the axes
Pair = tuple[str, Any, str, Any]  # axis and value, twice


def rows(axes: Axes, valid: Valid) -> Iterable[Row]:
    """Every row of the table that can be."""
    table = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return (row for row in table if valid(row))


def pairs(row: Row) -> set[Pair]:
    """The pairs of values that a row shows."""
    return {(a, x, b, y) for (a, x), (b, y) in combinations(row.items(), 2)}


def all_pairs(axes: Axes, valid: Valid) -> list[Pair]:
    """Every pair of values that can meet, in the order of the axes."""
    always = {axis: values[0] for axis, values in axes.items() if len(values) == 1}
    found = ((a, x, b, y) for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b])
    return [(a, x, b, y) for a, x, b, y in found if valid(always | {a: x, b: y})]


def sample(axes: Axes, valid: Valid, cost: Callable[[Row], float], tries: int = 60) -> list[Row]:
    """Rows that together show every pair: for each pair not yet shown, the best of some random rows that show it.

    Of rows that show as many pairs it is the cheapest. The numbers are seeded, so the same axes give the same rows.
    """
    numbers = random.Random(0)
    chosen: list[Row] = []
    missing = all_pairs(axes, valid)
    numbers.shuffle(missing)
    missing.sort(key=lambda pair: -len(axes[pair[0]]) * len(axes[pair[2]]))  # the longest axes need the most rows
    left = dict.fromkeys(missing)
    while left:
        a, x, b, y = next(iter(left))
        candidates = [_completed({a: x, b: y}, axes, valid, numbers) for _ in range(tries)]
        best = max(candidates, key=lambda row: (sum(pair in left for pair in pairs(row)), -cost(row)))
        chosen.append(best)
        for pair in pairs(best):
            left.pop(pair, None)
    return chosen


def _completed(fixed: Row, axes: Axes, valid: Valid, numbers: random.Random) -> Row:
    while True:
        row = {name: fixed.get(name, numbers.choice(values)) for name, values in axes.items()}
        if valid(row):
            return row
