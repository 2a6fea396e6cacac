"""`deal`: the samples of an update over ranks, grouped by length before they are dealt."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch import CostModel
from megabatch.planning import dealing
from megabatch.planning.balancing import balance_lengths
from megabatch.planning.dealing import FEW_SAMPLES, deal
from megabatch.planning.finer_cut import split_into
from megabatch.planning.partition import split

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


@pytest.mark.parametrize(
    ("kind", "num_ranks", "per_rank"),
    [("log-normal", 32, 32), ("chat", 32, 32), ("long tail", 32, 32), ("long tail", 128, 32), ("long tail", 256, 32)],
)
def test_ranks_finish_together(kind: str, num_ranks: int, per_rank: int) -> None:
    """The slowest rank takes little longer than the mean of the ranks would without padding."""
    lengths = LENGTHS[kind](num_ranks * per_rank)
    seconds = seconds_of_ranks(lengths, deal(lengths, num_ranks, max_tokens=CAP), num_ranks)
    launches = PRICE.seconds_per_microbatch * math.ceil(sum(lengths) / num_ranks / CAP)
    ideal = sum(map(PRICE.sample_seconds, lengths.tolist())) / num_ranks + launches
    assert max(seconds) <= 1.12 * ideal
    assert max(seconds) <= 1.06 * sum(seconds) / num_ranks


@pytest.mark.parametrize("limit", [{"max_tokens": CAP}, {"max_rows": 8}])
@pytest.mark.parametrize("per_rank", [16, 64, 2048])
def test_a_slow_rank_is_dealt_less(limit: dict[str, int], per_rank: int) -> None:
    lengths = LENGTHS["log-normal"](4 * per_rank)
    ranks = deal(lengths, 4, speeds=[1.0, 1.0, 0.5, 1.0], **limit)
    tokens = np.bincount(ranks, weights=lengths, minlength=4)
    assert 0.3 * tokens[[0, 1, 3]].max() <= tokens[2] <= 0.65 * tokens[[0, 1, 3]].min()


def test_launches_alone_are_dealt() -> None:
    ranks = deal(LENGTHS["chat"](64), 4, CostModel(1.0, 0.0, 0.0), max_rows=4)
    assert np.bincount(ranks).tolist() == [16] * 4


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


def test_single_samples_are_dealt_where_that_is_cheaper_for_who_counts_samples() -> None:
    lengths = np.array([1] * 13 + [100_000] * 3)
    ranks = deal(lengths, 2, max_rows=3)
    shares = [lengths[ranks == rank].tolist() for rank in range(2)]
    cuts = [split(share, CostModel().seconds, max_rows=3) for share in shares]
    padded = [sum(len(group) * share[group[0]] for group in cut) for share, cut in zip(shares, cuts, strict=True)]
    assert max(padded) < 2.1 * 100_000  # a group of all three on one rank takes 3


def test_a_very_slow_rank_is_not_dealt_one_of_few_samples() -> None:
    ranks = deal(np.array([8000, 1, 8000]), 8, max_rows=1, speeds=[1.0] + [1 / 64] * 7)
    assert ranks[0] == ranks[2] == 0


def test_a_slow_rank_leaves_few_numbers_of_microbatches_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    class Filled(dealing._Filled):
        def __init__(self, dealer: dealing._Dealer, full: Sequence[int], number: int, num_rounds: int) -> None:
            tried.append(number)
            super().__init__(dealer, full, number, num_rounds)

    monkeypatch.setattr(dealing, "_Filled", Filled)
    deal(LENGTHS["chat"](1024), 2, max_rows=2, speeds=[1.0, 0.25])
    assert len(tried) <= 12  # not the 159 of 256 to 414
    assert math.ceil(512 / 1.25) in tried  # by which both finish together


def test_lengths_of_any_size_are_dealt_in_little_memory() -> None:
    lengths = np.array([2**40, 5, 2**33, 7])
    for limit in ({"max_rows": 1}, {"max_tokens": 2**40}):
        ranks = deal(lengths, 2, **limit)
        assert ranks[0] != ranks[2]
