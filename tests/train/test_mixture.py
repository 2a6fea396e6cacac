"""Mixture: shares by weight, epochs that can be asked for in any order, and every sample of a source equally often."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.train.data.samples import Mixture, counts_of, split_off
from tests.train.data_for_tests import load, recipe, texts, write_texts

COUNTS = {  # sizes, weights -> samples of an epoch
    ((100, 100), (1, 1)): (100, 100),
    ((100, 50), (1, 1)): (50, 50),
    ((100, 50), (3, 1)): (100, 33),
    ((100, 50), (0.1, 0.2)): (25, 50),
    ((3, 30, 300), (0.1, 0.3, 0.6)): (3, 9, 18),
    ((1000, 10), (1000, 1)): (1000, 1),
    ((10, 10), (1e-9, 1)): (1, 10),  # at least one
    ((7,), (2.5,)): (7,),
}

mixtures = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.25, 1.0, 3.0])), min_size=1, max_size=4).map(
    lambda sources: ([size for size, _ in sources], [weight for _, weight in sources])
)


@pytest.mark.parametrize(("sizes", "weights"), COUNTS)
def test_counts_of_an_epoch(sizes, weights):
    assert counts_of(sizes, weights) == COUNTS[sizes, weights]


@given(mixtures)
def test_counts_are_in_proportion_and_as_large_as_the_sources(mixture):
    sizes, weights = mixture
    counts = counts_of(sizes, weights)
    assert all(1 <= count <= size for count, size in zip(counts, sizes, strict=True))
    assert any(count == size for count, size in zip(counts, sizes, strict=True))
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    for count, weight in zip(counts, weights, strict=True):
        assert count == 1 or abs(count - scale * weight) <= 0.5 + 1e-9


@given(mixtures, st.integers(0, 3), st.integers(1, 12))
@settings(max_examples=50)
def test_samples_of_a_source_are_seen_equally_often(mixture, seed, num_epochs):
    sizes, weights = mixture
    counts = counts_of(sizes, weights)
    order = Mixture(tuple(sizes), counts, seed)
    seen = Counter(sample for epoch in range(num_epochs) for sample in order(epoch).tolist())
    start = 0
    for size, count in zip(sizes, counts, strict=True):
        times = [seen[sample] for sample in range(start, start + size)]
        assert sum(times) == num_epochs * count
        assert max(times) - min(times) <= 1
        start += size


def test_an_epoch_follows_from_its_number_and_the_seed():
    first, again, other = (Mixture((30, 20), (15, 20), seed) for seed in (1, 1, 2))
    later = again(7)
    assert [again(epoch).tolist() for epoch in range(8)] == [first(epoch).tolist() for epoch in range(8)]
    assert later.tolist() == first(7).tolist()
    assert first(0).tolist() != other(0).tolist()
    assert sorted(first(0)) != sorted(first(1))  # what the first leaves out comes in the second
    assert set(first(0)) | set(first(1)) == set(range(50))


def test_sources_are_mixed_within_an_epoch():
    picks = Mixture((1000, 1000), (1000, 1000), 0)(0)
    halves = [(picks[:1000] < 1000).mean(), (picks[1000:] < 1000).mean()]
    assert all(0.4 < share < 0.6 for share in halves)


def test_a_far_epoch_costs_what_the_first_does():
    order = Mixture((1000, 10), (1000, 10), 0)
    assert len(order(10**12)) == 1010


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 20), st.integers(0, 3))
def test_at_most_a_tenth_of_each_source_is_held_out(sizes, num_samples, seed):
    held_out = split_off(sizes, num_samples, seed)
    assert sum(map(len, held_out)) == min(num_samples, sum(size // 10 for size in sizes))
    for ids, size in zip(held_out, sizes, strict=True):
        assert len(set(ids.tolist())) == len(ids) <= size // 10
        assert np.array_equal(ids, np.sort(ids))
        assert all(0 <= sample < size for sample in ids)
    assert all(map(np.array_equal, held_out, split_off(sizes, num_samples, seed)))


def test_fewer_held_out_samples_are_some_of_those_that_more_would_be():
    few, many = (split_off([1000, 3000], num_samples, 0) for num_samples in (40, 80))
    assert all(set(some) < set(more) for some, more in zip(few, many, strict=True))
    assert 3 < len(few[0]) < 20  # as many of each source as its size would have it
    assert set(few[0]) != set(split_off([1000, 3000], 40, 1)[0])


def test_samples_are_held_out_of_millions_at_once():
    start = time.monotonic()
    assert sum(map(len, split_off([3_000_000, 2_000_000], 1000, 0))) == 1000
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("kind", [{}, {"streaming": True}])
def test_the_identity_has_the_order_of_the_sources(kind, tmp_path):
    path = write_texts(tmp_path / "data.jsonl", texts(50))
    other = write_texts(tmp_path / "other.jsonl", texts(50, seed=1))
    mixture = {"a": {"path": path}, "b": {"path": other}}
    there, here = (
        load(recipe(tmp_path, data={"mixture": dict(order), **kind})).identity
        for order in (mixture.items(), reversed(mixture.items()))
    )
    assert there.pop("sources") == [*reversed(here["sources"])] == ["data.mixture.a", "data.mixture.b"]
    assert here.pop("sources") != here
    assert there == here  # nothing else tells them apart
