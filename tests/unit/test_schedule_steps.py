"""Schedule steps of a pipelined call: the cheapest grouping, the same on all data ranks, and every sample once."""

from functools import partial
from itertools import accumulate, combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch import CostModel
from megabatch.pipeline.schedule_steps import (
    MOST_LENGTHS,
    MOST_STEPS,
    RankLengths,
    choose_steps,
    deal_into_steps,
    group_microbatches,
    group_neighbors,
)
from megabatch.pipeline.stages import SCHEDULES
from megabatch.planning.plan import Plan

ranks_of_lengths = st.lists(st.lists(st.integers(0, 40), max_size=20), min_size=1, max_size=3)
limits = st.one_of(st.tuples(st.integers(1, 6), st.none()), st.tuples(st.none(), st.integers(40, 200)))


def tell(lengths: list[int], limit: tuple[int | None, int | None], cost: CostModel | None = None) -> RankLengths:
    distinct, counts = np.unique(lengths, return_counts=True)
    return RankLengths(distinct.astype(int).tolist(), counts.tolist(), *limit, cost)


def filled(schedule: str, ranks: int, number: int) -> int:
    return number and SCHEDULES[schedule].runnable(number, ranks, ranks)


def skewed(num: int, seed: int) -> list[int]:
    """Lengths like those of solved grade-school problems: 60 to 500 tokens, 160 on average."""
    drawn = np.random.default_rng(seed).lognormal(5.0, 0.4, num)
    return np.clip(drawn, 60, 500).astype(int).tolist()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(0, 30))
def test_the_cheapest_grouping_is_found(sizes, fee):
    """Against every grouping: a group costs a fee, and its largest item for each of its items."""
    num = len(sizes)

    def price(start: int, end: int) -> int:
        return fee + (end - start) * max(sizes[start:end])

    found = group_neighbors([np.array([price(start, end + 1) for end in range(start, num)]) for start in range(num)])
    groupings = [
        [*inner, num] for number in range(min(MOST_STEPS, num)) for inner in combinations(range(1, num), number)
    ]
    totals = [sum(price(start, end) for start, end in pairwise([0, *ends])) for ends in groupings]
    assert found in groupings
    assert totals[groupings.index(found)] == min(totals)
    assert len(found) == min(len(ends) for ends, total in zip(groupings, totals, strict=True) if total == min(totals))


def test_nothing_is_in_no_group():
    assert group_neighbors([]) == []
    assert choose_steps([tell([], (2, None))], int, 1.0) == []


@given(ranks_of_lengths, limits, st.sampled_from(["GPipe", "1F1B", "Interleaved1F1B"]), st.integers(1, 4))
def test_every_sample_runs_once_within_the_limit_on_every_rank(ranks, limit, schedule, num_ranks):
    steps = choose_steps([tell(each, limit) for each in ranks], partial(filled, schedule, num_ranks), num_ranks - 1)
    numbers = [each.num_microbatches for each in steps]
    assert len(steps) <= MOST_STEPS
    assert all(filled(schedule, num_ranks, number) == number for number in numbers)
    max_rows, max_tokens = limit
    for lengths in ranks:
        cut = deal_into_steps(lengths, steps)
        assert sorted(row for rows in cut for row in rows) == list(range(len(lengths)))
        assert all(cut)
        assert len(cut) <= sum(numbers)
        for told, (start, end) in zip(steps, pairwise(accumulate(numbers, initial=0)), strict=True):
            step = cut[start:end]
            rows, longest = (
                max(map(len, step), default=0),
                max((lengths[row] for each in step for row in each), default=0),
            )
            assert rows <= (max_rows or rows)
            assert rows <= told.rows
            assert longest <= told.length
            assert rows * longest <= (max_tokens or rows * longest)


@pytest.mark.parametrize("limits", [((6, None), (2, None)), ((None, 60), (None, 20))])
def test_the_smallest_limit_of_the_ranks_counts(limits):
    steps = choose_steps([tell([10] * 12, limit) for limit in limits], int, 1.0)
    assert [(each.num_microbatches, each.rows) for each in steps] == [(6, 2)]


def test_equal_lengths_are_one_step():
    for limit in ((2, None), (None, 100)):
        (step,) = choose_steps([tell([7] * 9, limit), tell([7] * 5, limit)], int, 3.0)
        assert step.above == -1
        assert step.num_microbatches == (5 if limit[0] else 1)


def test_one_step_where_another_would_wait_longer_than_it_saves():
    """Two microbatches of 10 and two of 9 tokens: with a bubble of 3, one step costs (4 + 3) 10, two (2 + 3) 19."""
    lengths = [10, 10, 9, 9]
    assert [each.num_microbatches for each in choose_steps([tell(lengths, (1, None))], int, 3.0)] == [4]
    assert [each.num_microbatches for each in choose_steps([tell(lengths, (1, None))], int, 0.0)] == [2, 2]


def test_a_given_cost_decides():
    """A launch that costs as much as 100 tokens."""
    lengths, launches = [10, 10, 2, 2], CostModel(100.0, 1.0, 0.0)
    assert len(choose_steps([tell(lengths, (1, None), CostModel(0.0, 1.0, 0.0))], int, 1.0)) == 2
    assert len(choose_steps([tell(lengths, (1, None), launches)], int, 1.0)) == 1


@pytest.mark.parametrize("limit", [(4, None), (None, 4096)])
def test_skewed_lengths_compute_less_than_six_tenths(limit):
    """Of what one shape for all computes, with 4 stages, on each of 4 data ranks."""
    ranks = [skewed(128, seed) for seed in range(4)]
    steps = choose_steps([tell(each, limit) for each in ranks], partial(filled, "1F1B", 4), 3.0)
    for lengths in ranks:
        cut = deal_into_steps(lengths, steps)
        in_steps = Plan(cut, tuple(lengths), steps=tuple(each.num_microbatches for each in steps))
        longest = max(map(max, ranks))
        rows = limit[0] or limit[1] // longest
        assert in_steps.padded_tokens < 0.6 * -(-len(lengths) // rows) * rows * longest


def test_more_lengths_than_are_compared():
    lengths = list(range(1, 4 * MOST_LENGTHS))
    steps = choose_steps([tell(lengths, (None, 1000))], int, 1.0)
    assert sorted(row for rows in deal_into_steps(lengths, steps) for row in rows) == list(range(len(lengths)))
    for rows in deal_into_steps(lengths, steps):
        assert len(rows) * max(lengths[row] for row in rows) <= 1000


def test_a_rank_with_few_long_samples_takes_shorter_ones_along():
    """So that its microbatches lie beside those of the others, and dummies come last."""
    told = [tell([9] * 4 + [1] * 4, (1, None)), tell([9] + [1] * 5, (1, None))]
    steps = choose_steps(told, int, 0.0)
    assert [each.num_microbatches for each in steps] == [4, 5]
    assert deal_into_steps([9] + [1] * 5, steps) == ((0,), (1,), (2,), (3,), (4,), (5,))


def test_microbatches_of_an_evaluation_are_grouped_by_their_columns():
    groups = group_microbatches([(2, 5), (2, 40), (3, 6), (1, 39), (2, 5)], partial(filled, "1F1B", 2), 1.0)
    assert groups == [[1, 3], [2, 0, 4]]
    assert group_microbatches([(2, 5)], partial(filled, "1F1B", 2), 1.0) == [[0, 0]]
