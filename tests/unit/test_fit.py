"""The search for the largest microbatch that fits, over ways in which memory may grow: pure arithmetic."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.planning.limit_search import MemoryRoom, TimedMicrobatch, bound_tokens, cost_of, search, seconds_of
from megabatch.planning.limits import MeasuredMicrobatch, gains_little
from megabatch.planning.plan import CostModel

LONGEST, MOST = 100, 10_000
GROWING: dict[str, Callable[[int], float]] = {  # bytes of a microbatch by its rows
    "a line from nothing": lambda rows: 7.0 * rows,
    "a line from a gradient": lambda rows: 3000 + 7.0 * rows,
    "two lines, steeper late": lambda rows: max(2500 + 1.0 * rows, 9.0 * rows),
    "four lines": lambda rows: max(1000, 700 + rows, 300 + 5.0 * rows, 6.5 * rows),
    "steps of an allocator": lambda rows: -(-(200 + 7 * rows) // 64) * 64.0,
    "nothing": lambda rows: 0.0,
}


def searched(grow: Callable[[int], float], space: MemoryRoom, most: int = MOST) -> list[MeasuredMicrobatch]:
    return search(lambda rows: MeasuredMicrobatch(rows, grow(rows)), lambda: space, most)


def largest(grow: Callable[[int], float], allowed: float, most: int = MOST) -> int:
    return max((rows for rows in range(1, most + 1) if grow(rows) <= allowed), default=0)


@pytest.mark.parametrize("allowed", [7.0, 40.0, 3500.0, 9000.0, 50_000.0])
@pytest.mark.parametrize("name", GROWING)
def test_the_bound_is_the_largest_within_a_tenth(name: str, allowed: float) -> None:
    grow = GROWING[name]
    measured = searched(grow, MemoryRoom(allowed, 3 * allowed))
    tokens = bound_tokens(measured, MemoryRoom(allowed, 3 * allowed), LONGEST, MOST)
    best = largest(grow, allowed)
    if best == 0:
        assert tokens is None
        return
    assert tokens is not None
    assert grow(tokens // LONGEST) <= allowed
    assert tokens // LONGEST >= int(best * 0.9)
    assert len(measured) <= 12


@pytest.mark.parametrize("allowed", [3500.0, 9000.0, 50_000.0])
@pytest.mark.parametrize("name", GROWING)
def test_nothing_is_measured_that_may_not_be_there(name: str, allowed: float) -> None:
    """No line is trusted that a steeper one could break, if nothing is free beyond the allowed memory."""
    measured = searched(GROWING[name], MemoryRoom(allowed, allowed))
    assert all(each.num_bytes <= 1.1 * allowed for each in measured)


def test_no_more_rows_than_there_are_samples_are_measured() -> None:
    measured = searched(GROWING["a line from nothing"], MemoryRoom(1e9, 1e9), most=37)
    assert [each.rows for each in measured] == [1, 8]
    assert bound_tokens(measured, MemoryRoom(1e9, 1e9), LONGEST, 37) == 38 * LONGEST - 1


@pytest.mark.parametrize("most", [3, 30, 300])
@pytest.mark.parametrize("allowed", [70.0, 3500.0, 9000.0])
@pytest.mark.parametrize("name", GROWING)
def test_what_is_not_measured_is_sure_to_fit(name: str, allowed: float, most: int) -> None:
    grow, space = GROWING[name], MemoryRoom(allowed, allowed)
    tokens = bound_tokens(searched(grow, space, most), space, LONGEST, most)
    assert tokens is None or grow(tokens // LONGEST) <= allowed


@pytest.mark.parametrize("most", [8, 100, MOST])
def test_a_microbatch_that_runs_out_of_memory_ends_what_is_sure(most: int) -> None:
    space = MemoryRoom(1e9, 1e9)
    measured = searched(lambda rows: 7.0 * rows if rows < 8 else math.inf, space, most)
    assert bound_tokens(measured, space, LONGEST, most) == 8 * LONGEST - 1


@pytest.mark.parametrize(
    ("launch", "rows"), [(0.0, [1, 8]), (0.5, [1, 8]), (5.0, [1, 8, 64]), (9000.0, [1, 8, 64, 512, 4096])]
)
def test_more_rows_are_measured_while_they_are_faster(launch: float, rows: list[int]) -> None:
    space = MemoryRoom(9e4, 9e5)

    def measure(rows: int) -> MeasuredMicrobatch:
        return MeasuredMicrobatch(rows, 2000.0 + 7 * rows, launch + rows)

    measured = search(measure, lambda: space, MOST)
    assert [each.rows for each in measured] == rows
    assert gains_little(measured) == (launch < 9000)
    assert bound_tokens(measured, space, LONGEST, MOST) == ((rows[-1] if launch < 9000 else MOST) + 1) * LONGEST - 1


def test_a_cost_goes_through_the_largest_that_fit() -> None:
    grow, space = GROWING["a line from a gradient"], MemoryRoom(9000, 20_000)
    measured = searched(grow, space)
    timed = [TimedMicrobatch(1, LONGEST, 1.1), TimedMicrobatch(8, LONGEST, 8.1)]
    cost = cost_of(measured, space, stays_bytes=500.0, longest_tokens=LONGEST, timed=timed)
    assert cost.peak_bytes(10, LONGEST) == pytest.approx(500 + grow(10))
    assert cost.seconds(10, LONGEST) == pytest.approx(0.1 + 10)
    one = cost_of([MeasuredMicrobatch(1, 70.0)], space, 500.0, LONGEST, timed)
    assert (one.bytes_fixed, one.bytes_per_token) == (500.0, pytest.approx(0.7))


factors = st.floats(0, 10).map(lambda number: round(number, 3))


@given(factors, st.floats(0.01, 10), st.floats(0, 0.1), st.integers(20, 400))
def test_seconds_that_follow_the_model_are_found(launch: float, token: float, pair: float, usual: int) -> None:
    cost = CostModel(launch, token, pair)
    timed = [TimedMicrobatch(rows, tokens, cost.seconds(rows, tokens)) for rows in (1, 8) for tokens in (usual, 1000)]
    found = CostModel(*seconds_of(timed))
    for rows, tokens in ((1, 10), (3, 700), (64, 50)):
        assert found.seconds(rows, tokens) == pytest.approx(cost.seconds(rows, tokens), rel=1e-6)


@given(st.lists(st.floats(1e-3, 10), min_size=4, max_size=4))
def test_no_price_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    shapes = [(1, 30), (8, 30), (1, 200), (8, 200)]
    found = seconds_of([TimedMicrobatch(*shape, each) for shape, each in zip(shapes, seconds, strict=True)])
    assert all(each >= 0 for each in found)
    assert any(each > 0 for each in found)
