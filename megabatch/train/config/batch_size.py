"""The batch size of each update: one number, or a schedule."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any, cast

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, UpdateConfig

KEY = "update.global_batch_size"
FORM = 'a number, or [[0, 64], ["50M tokens", 256]]'
POINT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([kMB]?)\s*(update|sample|token)s?\s*")
TIMES = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True)
class BatchSizes:
    """Samples of an update over all ranks, by what was handed out before it."""

    unit: str  # what points are counted in: a field of `Consumed`
    points: tuple[int, ...]  # increasing, the first is 0
    sizes: tuple[int, ...]  # from that point on

    def __call__(self, consumed: object) -> int:
        """Return the samples of the next update, by the sampler's `Consumed`; it needs torch and is not imported."""
        return self.sizes[bisect_right(self.points, getattr(consumed, self.unit)) - 1]

    @property
    def largest(self) -> int:
        return max(self.sizes)

    def __str__(self) -> str:
        later = zip(self.sizes[1:], self.points[1:], strict=True)
        words = [f"{size} after {point:,} {self.unit if point > 1 else self.unit[:-1]}" for size, point in later]
        return ", ".join([f"{self.sizes[0]} samples", *words])


def sizes_of(update: UpdateConfig) -> BatchSizes:
    """Return the sizes of a recipe. Raises `MegabatchError` for a bad schedule."""
    size = update.global_batch_size
    return BatchSizes("updates", (0,), (size,)) if isinstance(size, int) else read_schedule(size)


def read_schedule(pairs: Sequence[Any]) -> BatchSizes:
    if not pairs or not all(isinstance(pair, list) and len(cast(list[Any], pair)) == 2 for pair in pairs):
        raise MegabatchError(f"{KEY} is {pairs}; expected {FORM}: pairs of a point and the samples from there on")
    sizes = tuple(size for _, size in pairs)
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size < 2**63:
            raise MegabatchError(f"{KEY} has updates of {size!r} samples; expected a whole number of at least 1")
    read = [read_point(point) for point, _ in pairs]
    points = tuple(number for number, _ in read)
    units = sorted({unit for number, unit in read if number})
    if points[0]:
        raise MegabatchError(f"{KEY} begins at {pairs[0][0]!r}; the first size holds from 0 on: [[0, {sizes[0]}], ...]")
    if len(units) > 1:
        raise MegabatchError(f"{KEY} has points in {' and in '.join(units)}, which have no order; count all in one")
    for (before, _), (after, _), (low, high) in zip(pairs, pairs[1:], pairwise(points), strict=False):
        if high <= low:
            raise MegabatchError(f"{KEY} goes from {before!r} to {after!r}; put its points in increasing order")
    return BatchSizes(units[0] if units else "updates", points, sizes)


def read_point(point: object) -> tuple[int, str]:
    """Return number and unit of a point: a number of updates, or "50M tokens"."""
    if isinstance(point, int) and not isinstance(point, bool) and 0 <= point < 2**63:
        return point, "updates"
    match = POINT.fullmatch(point) if isinstance(point, str) else None
    number = Fraction(match[1].replace("_", "")) * TIMES[match[2]] if match else Fraction(1, 2)
    if match is None or number.denominator != 1 or number >= 2**63:
        raise MegabatchError(
            f'{KEY} has the point {point!r}; expected a number of updates, or "20k samples", "1.5B tokens" or the like'
        )
    return int(number), f"{match[3]}s"


def check_batch_size(config: Config) -> None:
    """Raise `MegabatchError` for a bad schedule, and where the learning rate follows a constant size."""
    sizes = sizes_of(config.update)
    if config.optim.lr_follows_batch is not None and len(sizes.sizes) == 1:
        raise MegabatchError(
            f'optim.lr_follows_batch is "{config.optim.lr_follows_batch}" and all updates have {sizes}; '
            f"give {KEY} a schedule, or leave optim.lr_follows_batch out"
        )
