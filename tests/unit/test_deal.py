"""`deal`: the samples of an update over ranks, grouped by length before they are dealt."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import CostModel
from megabatch.planning.dealing import FEW_SAMPLES, deal
from megabatch.planning.finer_cut import split_into
from megabatch.planning.partition import balance_lengths, split

CAP = 8192
PRICE = CostModel(seconds_per_microbatch=CAP / 16)  # as plan_share prices without a measured cost
LENGTHS = {
    "log-normal": lambda n: np.random.default_rng(0).lognormal(5.1, 0.42, n).clip(20, 600).astype(int),
    "chat": lambda n: np.random.default_rng(1).lognormal(5.0, 0.8, n).clip(20, 2048).astype(int),
    "long tail": lambda n: np.random.default_rng(2).lognormal(5.5, 1.3, n).clip(10, CAP).astype(int),
}


def seconds_of_ranks(lengths: np.ndarray, ranks: np.ndarray, num_ranks: int) -> list[float]:
    """Seconds of each rank for its share, cut at the least price, and again into as many as the rank with the most."""
    shares = [lengths[ranks == rank].tolist() for rank in range(num_ranks)]
    cuts = [split(share, PRICE.seconds, max_tokens=CAP) for share in shares]
    most = max(map(len, cuts))
    seconds: list[float] = []
    for share, cut in zip(shares, cuts, strict=True):
        groups = split_into(share, cut, most, PRICE.seconds)
        prices = [PRICE.seconds(len(group), share[group[0]]) for group in groups]
        seconds.append(sum(prices) + (most - len(prices)) * (prices[-1] if prices else 0.0))
    return seconds


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 50))
def test_a_finer_cut_has_every_item_once_and_as_many_groups_as_there_are_items_for(
    lengths: list[int], rows: int, number: int
) -> None:
    groups = split(lengths, PRICE.seconds, max_rows=rows)
    finer = split_into(lengths, groups, number, PRICE.seconds)
    assert sorted(item for group in finer for item in group) == list(range(len(lengths)))
    assert len(finer) == max(len(groups), min(number, len(lengths)))
    assert all(any(set(group) <= set(whole) for whole in groups) for group in finer)
    longest = [lengths[group[0]] for group in finer]
    assert longest == sorted(longest, reverse=True) == [max(lengths[item] for item in group) for group in finer]


def test_a_finer_cut_saves_the_most_padding_and_halves_equal_items() -> None:
    assert split_into([9, 9, 2, 2, 8], [(0, 1, 2, 3), (4,)], 3, PRICE.seconds) == [(0, 1), (4,), (2, 3)]
    assert split_into([5, 5, 5, 5], [(0, 1, 2, 3)], 2, PRICE.seconds) == [(0, 1), (2, 3)]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, CAP), min_size=0, max_size=90),
    st.integers(1, 9),
    st.sampled_from([{"max_tokens": CAP}, {"max_rows": 1}, {"max_rows": 3}]),
    st.sampled_from([None, CostModel(1.0, 2.0**-10, 2.0**-22), CostModel(0.0, 0.0, 1.0)]),
)
def test_every_sample_has_one_rank(lengths: list[int], num_ranks: int, limit: dict, cost: CostModel | None) -> None:
    ranks = deal(np.array(lengths, dtype=np.int64), num_ranks, cost, **limit)
    assert ranks.shape == (len(lengths),)
    assert set(ranks.tolist()) <= set(range(num_ranks))
    speeds = [1.0 + rank % 2 for rank in range(num_ranks)]
    assert deal(np.array(lengths, dtype=np.int64), num_ranks, cost, speeds=speeds, **limit).shape == (len(lengths),)


@pytest.mark.parametrize(("kind", "num_ranks", "per_rank"), [*itertools.product(LENGTHS, (2, 8, 32), (8, 32, 128))])
def test_the_slowest_rank_is_no_slower_than_with_single_samples(kind: str, num_ranks: int, per_rank: int) -> None:
    lengths = LENGTHS[kind](num_ranks * per_rank)
    before = max(seconds_of_ranks(lengths, balance_lengths(lengths, PRICE.sample_seconds, num_ranks), num_ranks))
    now = max(seconds_of_ranks(lengths, deal(lengths, num_ranks, max_tokens=CAP), num_ranks))
    assert now <= before
    if (kind, per_rank) in (("log-normal", 8), ("chat", 8)):
        assert now <= 0.9 * before


def test_single_samples_are_dealt_where_that_is_cheaper() -> None:
    """Two ranks and few samples: groups of neighbors would leave one rank with both long samples."""
    lengths = np.array([8000, 7900, 500, 400])
    ranks = deal(lengths, 2, max_tokens=CAP)
    assert ranks[0] != ranks[1]
    assert len(lengths) <= FEW_SAMPLES


def test_a_rank_with_one_long_sample_gets_short_ones_for_its_other_microbatches() -> None:
    """Without them it would run the long sample again, as a dummy."""
    lengths = np.array([CAP] * 10 + [10] * (FEW_SAMPLES + 1))
    ranks = deal(lengths, 16, max_tokens=CAP)
    seconds = seconds_of_ranks(lengths, ranks, 16)
    assert np.bincount(ranks[:10], minlength=16).max() == 1
    assert max(seconds) <= 1.5 * PRICE.seconds(1, CAP)


def test_a_slow_rank_is_dealt_less() -> None:
    lengths = LENGTHS["log-normal"](256)
    ranks = deal(lengths, 4, max_tokens=CAP, speeds=[1.0, 1.0, 0.5, 1.0])
    tokens = np.bincount(ranks, weights=lengths, minlength=4)
    assert tokens[2] <= 0.6 * tokens[[0, 1, 3]].min()


def test_who_counts_samples_gets_the_fewest_microbatches() -> None:
    lengths = LENGTHS["chat"](96)
    ranks = deal(lengths, 4, max_rows=8)
    assert np.bincount(ranks).max() <= 24


def test_equal_lengths_are_dealt_evenly() -> None:
    assert np.bincount(deal(np.full(64, 512), 8, max_tokens=CAP)).tolist() == [8] * 8


def test_lengths_of_any_integer_type_are_dealt_alike() -> None:
    lengths = LENGTHS["chat"](200)
    ranks = {deal(lengths.astype(kind), 8, max_tokens=CAP).tobytes() for kind in (np.uint16, np.int32, np.int64)}
    assert len(ranks) == 1
