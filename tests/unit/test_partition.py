"""balance and split, against what they promise and against every possible answer where there are few."""

import heapq
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.planning import partition
from megabatch.planning.balancing import balance, balance_lengths
from megabatch.planning.plan import CostModel

COST = CostModel(seconds_per_microbatch=32.0)
price = COST.seconds
split = partial(partition.split, seconds=price)

costs = st.lists(st.floats(0, 1e6), max_size=40)
few_lengths = st.lists(st.integers(0, 12), max_size=6)
bounds = st.one_of(
    st.fixed_dictionaries({"max_rows": st.integers(1, 7)}),
    st.fixed_dictionaries({"max_tokens": st.integers(12, 40)}),
    st.fixed_dictionaries({"max_rows": st.integers(1, 7), "max_tokens": st.integers(12, 40)}),
)

BALANCED = [  # costs, bins, shares
    ([], 3, [[], [], []]),
    ([5], 3, [[0], [], []]),
    ([1, 2, 3, 4], 1, [[0, 1, 2, 3]]),
    ([1, 2, 3, 4], 2, [[0, 3], [1, 2]]),
    ([7, 7, 7], 2, [[0, 2], [1]]),
    ([9, 1, 1, 1], 2, [[0, 3], [1, 2]]),  # as many to each, not as much
]
SPLIT = [  # lengths, bound, microbatches
    ([], {"max_rows": 2}, []),
    ([3, 9, 1], {"max_rows": 8}, [(1, 0, 2)]),
    ([3, 9, 1, 2, 2], {"max_rows": 2}, [(1,), (0, 3), (4, 2)]),
    ([5, 5, 5], {"max_tokens": 10}, [(0,), (1, 2)]),
    ([5, 5, 5], {"max_tokens": 14}, [(0,), (1, 2)]),  # one token more than the cap is too many
    ([5, 5, 5], {"max_tokens": 15}, [(0, 1, 2)]),
    ([100, 1, 1, 1], {"max_tokens": 100}, [(0,), (1, 2, 3)]),
    ([0, 0], {"max_tokens": 2}, [(0, 1)]),
]


@pytest.mark.parametrize(("costs", "num_bins", "bins"), BALANCED)
def test_balanced(costs, num_bins, bins):
    assert balance(costs, num_bins) == bins


@given(costs, st.integers(1, 9))
def test_every_item_is_in_one_share_in_rising_order(costs, num_bins):
    bins = balance(costs, num_bins)
    assert len(bins) == num_bins
    assert sorted(item for items in bins for item in items) == list(range(len(costs)))
    assert all(items == sorted(items) for items in bins)


@given(costs, st.integers(1, 9))
def test_sizes_differ_by_at_most_one(costs, num_bins):
    sizes = [len(items) for items in balance(costs, num_bins)]
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=40), st.integers(1, 9))
def test_loads_differ_by_at_most_the_costliest_item(costs, num_bins):
    loads = [sum(costs[item] for item in items) for items in balance(costs, num_bins)]
    assert max(loads) - min(loads) <= max(costs)


def by_heap(costs, num_bins):
    """The rule, one item at a time."""
    heap = [(0.0, index, len(costs) // num_bins + (index < len(costs) % num_bins)) for index in range(num_bins)]
    bins = [[] for _ in heap]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, index, room = heapq.heappop(heap)
        bins[index].append(item)
        if room > 1:
            heapq.heappush(heap, (load + costs[item], index, room - 1))
    return [sorted(items) for items in bins]


few_kinds = st.lists(st.integers(0, 3), max_size=200)
many_kinds = st.lists(st.integers(0, 2**21), max_size=200)


@given(st.one_of(few_kinds, many_kinds), st.integers(1, 20))
def test_rounds_deal_as_a_heap_does(lengths, num_bins):
    price = CostModel().sample_seconds
    expected = by_heap([price(length) for length in lengths], num_bins)
    assert balance([price(length) for length in lengths], num_bins) == expected
    bins = balance_lengths(np.array(lengths, dtype=np.int64), price, num_bins)
    assert [np.flatnonzero(bins == index).tolist() for index in range(num_bins)] == expected


def test_a_heap_deals_what_rounds_are_slow_with():
    lengths = [*range(50, 0, -1), *[0] * 1000]  # those without cost all go to one bin, until it is full
    assert balance(lengths, 10) == by_heap(lengths, 10)


@pytest.mark.parametrize(("lengths", "bound", "microbatches"), SPLIT)
def test_split(lengths, bound, microbatches):
    assert split(lengths, **bound) == microbatches


@given(st.lists(st.integers(0, 64), max_size=40), bounds)
def test_every_item_is_in_one_microbatch_under_the_cap(lengths, bound):
    lengths = [min(length, bound.get("max_tokens", 64)) for length in lengths]
    microbatches = split(lengths, **bound)
    assert sorted(item for rows in microbatches for item in rows) == list(range(len(lengths)))
    assert all(rows for rows in microbatches)
    assert all(len(rows) <= bound.get("max_rows", len(rows)) for rows in microbatches)
    for rows in microbatches:
        assert len(rows) * max(lengths[item] for item in rows) <= bound.get("max_tokens", 10**9)


@given(st.lists(st.integers(1, 64), max_size=40), st.integers(1, 9))
def test_by_rows_alone_there_are_as_few_as_can_be(lengths, max_rows):
    assert len(split(lengths, max_rows=max_rows)) == -(-len(lengths) // max_rows)


@given(st.lists(st.integers(1, 64), max_size=40), bounds)
def test_the_longest_come_first(lengths, bound):
    lengths = [min(length, bound.get("max_tokens", 64)) for length in lengths]
    flat = [lengths[item] for rows in split(lengths, **bound) for item in rows]
    assert flat == sorted(flat, reverse=True)


@cache
def groupings(size: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Every way to group the items 0 to size - 1."""
    if size == 0:
        return ((),)
    last = size - 1
    found = []
    for groups in groupings(last):
        found.append((*groups, (last,)))
        found += [(*groups[:i], (*group, last), *groups[i + 1 :]) for i, group in enumerate(groups)]
    return tuple(found)


def key_of(groups, lengths, bound) -> tuple[int, float] | None:
    """The number and price that split minimises; None for groups over the cap."""
    shapes = [(len(rows), max(1, *(lengths[item] for item in rows))) for rows in groups]
    max_rows, max_tokens = bound.get("max_rows", len(lengths)), bound.get("max_tokens", 999)
    if any(rows > max_rows or rows * longest > max_tokens for rows, longest in shapes):
        return None
    return (0 if "max_tokens" in bound else len(groups), sum(price(*shape) for shape in shapes))


def by_neighbors(lengths, bound) -> float:
    """The price of the cheapest cut of the sorted items, by all ends of all groups."""
    longest = sorted((max(1, length) for length in lengths), reverse=True)
    best = [0.0]
    for end in range(1, len(longest) + 1):
        shapes = [(end - start, longest[start]) for start in range(end)]
        allowed = [rows <= bound.get("max_rows", rows) and rows * size <= bound["max_tokens"] for rows, size in shapes]
        prices = zip(best, shapes, allowed, strict=True)
        best.append(min(before + price(*shape) for before, shape, is_allowed in prices if is_allowed))
    return best[-1]


@given(st.lists(st.integers(0, 64), max_size=80), st.integers(64, 900), st.integers(1, 30))
def test_no_cut_of_many_neighbors_is_cheaper(lengths, max_tokens, max_rows):
    bound = {"max_tokens": max_tokens, "max_rows": max_rows}
    assert key_of(split(lengths, **bound), lengths, bound)[1] == pytest.approx(by_neighbors(lengths, bound), rel=1e-12)


@settings(max_examples=60)
@given(few_lengths, bounds)
def test_no_other_grouping_is_cheaper(lengths, bound):
    best = min(key for groups in groupings(len(lengths)) if (key := key_of(groups, lengths, bound)) is not None)
    mine = key_of(split(lengths, **bound), lengths, bound)
    assert mine == pytest.approx(best, rel=1e-12)
