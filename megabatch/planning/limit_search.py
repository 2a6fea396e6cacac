"""The search for the largest microbatch that fits in memory, and a cost model, from a few measured ones.

Pure: numbers in, numbers out. All measured microbatches have samples of one length, the longest. Their memory grows
with the rows along a straight line, or along several, of which the steepest comes last.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import NamedTuple

import numpy as np

from megabatch.planning.limits import MeasuredMicrobatch, gains_little
from megabatch.planning.plan import LAUNCH_SHARE, CostModel

GROWTH = 8  # the next measurement has at most this many times the rows of the last
NEARBY = 32  # the search ends when less than a 32nd of the limit is left
MAX_MEASURED = 12
LEAST_SPREAD = 1.5  # the largest timed microbatch has so many times the tokens of the smallest, or a launch is unknown


class TimedMicrobatch(NamedTuple):
    """The seconds of a forward and backward of ``rows`` samples of ``tokens`` each, on the slowest rank."""

    rows: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class MemoryRoom:
    """Bytes for one microbatch beyond what stays, the least over all ranks."""

    allowed: float
    there: float  # for a measurement: with the reserve, or beyond the given cap


def search(
    measure: Callable[[int], MeasuredMicrobatch], space: Callable[[], MemoryRoom], most_rows: int
) -> list[MeasuredMicrobatch]:
    """Measure a microbatch of one row, then larger ones, until enough is known.

    Larger ones must be sure to fit, and faster per token. If ``most_rows`` are sure to fit, they are not measured.
    """
    measured = [measure(1)]
    while len(measured) < MAX_MEASURED and not _is_enough(measured, space(), most_rows):
        rows = next_rows(measured, space(), most_rows)
        if rows is None:
            break
        measured.append(measure(rows))
    return measured


def _is_enough(measured: Sequence[MeasuredMicrobatch], space: MemoryRoom, most_rows: int) -> bool:
    low = largest_fitting(measured, space)
    are_sure = low is not None and low.rows >= GROWTH and sure_rows(measured, low, space) >= most_rows
    return are_sure or gains_little(fitting(measured, space))


def sure_rows(measured: Sequence[MeasuredMicrobatch], low: MeasuredMicrobatch, space: MemoryRoom) -> float:
    """Return the rows that fit if the whole memory of ``low`` grows in proportion, which is faster than it can."""
    over = smallest_not_fitting(measured, space)
    sure = low.rows * _ratio(space.allowed, low.num_bytes)
    return sure if over is None else min(sure, math.nextafter(over.rows, 0))


def next_rows(measured: Sequence[MeasuredMicrobatch], space: MemoryRoom, most_rows: int) -> int | None:
    """Return the rows of the microbatch to measure next; None where enough is known.

    More rows than were measured are tried where the whole measured memory may grow in proportion and still fits, or, up
    to twice the rows, where a line through two measurements stays below the allowed memory.
    """
    low, over = largest_fitting(measured, space), smallest_not_fitting(measured, space)
    if low is None:
        return None
    aim = max(sure_rows(measured, low, space), _along_line(measured, low, over, space.allowed))
    if len(measured) == 1:
        aim = max(aim, 2)  # for a line
    reach = max(low.rows * _ratio(space.there, low.num_bytes), 2 * low.rows if len(measured) > 1 else 1)
    rows = int(min(aim, reach, GROWTH * low.rows, most_rows, most_rows if over is None else over.rows - 1))
    is_near = rows < most_rows and NEARBY * (rows - low.rows) < low.rows
    return None if rows <= low.rows or is_near else rows


def bound_tokens(
    measured: Sequence[MeasuredMicrobatch], space: MemoryRoom, longest_tokens: int, most_rows: int
) -> int | None:
    """Return the largest limit that is sure to fit, in padded tokens; None where one sample does not.

    It is that of ``most_rows`` where they are sure to fit and faster. Otherwise it may exceed the measured rows by part
    of a row.
    """
    low = largest_fitting(measured, space)
    if low is None:
        return None
    sure = sure_rows(measured, low, space)
    rows = most_rows if sure >= most_rows and not gains_little(fitting(measured, space)) else low.rows
    return min(int(longest_tokens * sure), (rows + 1) * longest_tokens - 1)


def cost_of(
    measured: Sequence[MeasuredMicrobatch],
    space: MemoryRoom,
    stays_bytes: float,
    longest_tokens: int,
    timed: Sequence[TimedMicrobatch],
) -> CostModel:
    """Return the cost of a microbatch, its seconds by `seconds_of`.

    Its bytes are a line through the two largest measurements that fit, or in proportion to the only one.
    """
    *smaller, high = sorted(fitting(measured, space), key=lambda microbatch: microbatch.rows)
    low = smaller[-1] if smaller else MeasuredMicrobatch(0, 0.0)
    row_bytes = max(0.0, (high.num_bytes - low.num_bytes) / (high.rows - low.rows))
    return CostModel(
        *seconds_of(timed),
        bytes_fixed=stays_bytes + high.num_bytes - high.rows * row_bytes,
        bytes_per_token=row_bytes / longest_tokens,
    )


def seconds_of(timed: Sequence[TimedMicrobatch]) -> tuple[float, float, float]:
    """Fit the seconds of a microbatch, a token and a pair for `CostModel`, with the least relative error.

    With samples of one length only, attention has the share of `CostModel`'s defaults.
    """
    usual = CostModel()
    counts = np.array([[1.0, rows * tokens, rows * tokens * tokens] for rows, tokens, _ in timed])
    if len({tokens for _, tokens, _ in timed}) == 1:
        pairs = usual.seconds_per_pair / usual.seconds_per_token
        seconds, token, _ = _closest(np.stack([counts[:, 0], counts[:, 1] + pairs * counts[:, 2]], axis=1), timed)
        return seconds, token, token * pairs
    return _closest(counts, timed)


def cost_in_use(timed: Sequence[TimedMicrobatch], host_seconds: float) -> CostModel | None:
    """Return the cost of microbatches that were timed in real updates; None if their sizes tell too little.

    A launch costs at least ``host_seconds``, in which a device may wait for its host. It also costs at least a
    sixteenth of the fastest microbatch, since nothing is known of smaller ones: they are approached step by step.
    """
    sizes = [rows * tokens for rows, tokens, _ in timed]
    if max(sizes, default=0) < LEAST_SPREAD * min(sizes, default=1):
        return None
    cost = CostModel(*seconds_of(timed))
    launch_seconds = max(host_seconds, min(seconds for *_, seconds in timed) / LAUNCH_SHARE)
    return replace(cost, seconds_per_microbatch=max(cost.seconds_per_microbatch, launch_seconds))


def _closest(counts: np.ndarray, timed: Sequence[TimedMicrobatch]) -> tuple[float, float, float]:
    """Solve least squares without negative factors, trying every subset of the at most three columns."""
    weights = np.array([1 / microbatch.seconds for microbatch in timed])[:, None]
    best, best_factors = np.inf, np.zeros(3)
    num_columns = counts.shape[1]
    sizes = range(1, num_columns + 1)
    for used in chain.from_iterable(combinations(range(num_columns), size) for size in sizes):
        factors = np.linalg.lstsq(counts[:, used] * weights, np.ones(len(timed)))[0]
        error = float(np.sum((counts[:, used] * weights @ factors - 1) ** 2))
        if (factors >= 0).all() and error < best:
            best, best_factors = error, np.zeros(3)
            best_factors[list(used)] = factors
    return float(best_factors[0]), float(best_factors[1]), float(best_factors[2])


def fitting(measured: Sequence[MeasuredMicrobatch], space: MemoryRoom) -> list[MeasuredMicrobatch]:
    """Return those that fit in memory."""
    return [microbatch for microbatch in measured if microbatch.num_bytes <= space.allowed]


def largest_fitting(measured: Sequence[MeasuredMicrobatch], space: MemoryRoom) -> MeasuredMicrobatch | None:
    return max(fitting(measured, space), key=lambda microbatch: microbatch.rows, default=None)


def smallest_not_fitting(measured: Sequence[MeasuredMicrobatch], space: MemoryRoom) -> MeasuredMicrobatch | None:
    too_large = [microbatch for microbatch in measured if microbatch.num_bytes > space.allowed]
    return min(too_large, key=lambda microbatch: microbatch.rows, default=None)


def _along_line(
    measured: Sequence[MeasuredMicrobatch], low: MeasuredMicrobatch, over: MeasuredMicrobatch | None, num_bytes: float
) -> float:
    """Return the rows, or a few less, at which a line through the nearest two measurements reaches ``num_bytes``.

    Returns 0 without two measurements.
    """
    below = [microbatch for microbatch in measured if microbatch.rows < low.rows]
    if over is None and not below:
        return 0.0
    first, second = (low, over) if over is not None else (max(below, key=lambda microbatch: microbatch.rows), low)
    slope = (second.num_bytes - first.num_bytes) / (second.rows - first.rows)
    return low.rows + (1 - 1 / NEARBY) * max(0.0, num_bytes - low.num_bytes) / max(slope, 1e-9)


def _ratio(total: float, part: float) -> float:
    return max(0.0, total) / max(part, 1.0)
