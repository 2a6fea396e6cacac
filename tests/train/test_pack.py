"""Pack: the same tokens in fewer rows, nothing split that fits, nothing learned across a border."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.planning.partition import Spaces, best_fit
from megabatch.train.data.samples import Joined, PackedSamples, Part, pack_samples

IGNORED = -100
documents_of = st.lists(st.integers(1, 70), min_size=1, max_size=40)


class Documents(list):
    """Documents in memory that say of themselves what tokenized ones do; each token is its own, so none gets lost."""

    fingerprint = "documents"

    def __init__(self, lengths, num_prompt=0):
        starts = np.cumsum([0, *lengths])
        super().__init__()
        for start, length in zip(starts.tolist(), lengths, strict=False):
            ids = torch.arange(start, start + length)
            labels = ids.clone()
            labels[: min(num_prompt, length)] = IGNORED
            self.append({"input_ids": ids, "labels": labels})
        self.lengths = np.array(lengths, dtype=np.int64)

    def at(self, index):
        return self[index]

    def name(self, index):
        return f"document {index}"


def targets_in(samples):
    return sum(int((sample["labels"][1:] != IGNORED).sum()) for sample in samples)


def tokens_of(samples):
    return Counter(token for sample in samples for token in sample["input_ids"].tolist())


@given(documents_of, st.integers(2, 50), st.integers(0, 5))
@settings(max_examples=100)
def test_the_tokens_of_the_rows_are_those_of_the_documents(lengths, row_tokens, num_prompt):
    documents = Documents(lengths, num_prompt)
    rows = PackedSamples(documents, row_tokens)
    assert tokens_of(rows) == tokens_of(documents)
    assert rows.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert max(rows.lengths) <= row_tokens
    assert rows.fill == pytest.approx(sum(lengths) / (len(rows) * row_tokens))
    cuts = [start for length in lengths for start in range(row_tokens, length, row_tokens)]
    assert targets_in(rows) == targets_in(documents) - sum(start >= num_prompt for start in cuts)


@given(documents_of, st.integers(2, 50))
@settings(max_examples=100)
def test_nothing_is_split_that_fits_and_what_does_not_is_cut_as_rarely_as_can_be(lengths, row_tokens):
    rows = PackedSamples(Documents(lengths), row_tokens)
    pieces = [piece for row in rows for piece in pieces_of(row)]
    ends = np.cumsum(lengths)
    owners = Counter(int(np.searchsorted(ends, piece[0], side="right")) for piece in pieces)
    assert owners == {index: -(-length // row_tokens) for index, length in enumerate(lengths)}
    assert rows.num_cut == sum(length > row_tokens for length in lengths)


def pieces_of(row):
    """Tokens between the places where positions begin anew."""
    starts = [*(row["position_ids"] == 0).nonzero()[:, 0].tolist(), len(row["input_ids"])]
    return [row["input_ids"][start:stop].tolist() for start, stop in pairwise(starts)]


@given(documents_of, st.integers(2, 50))
def test_borders(lengths, row_tokens):
    for row in PackedSamples(Documents(lengths), row_tokens):
        first = row["position_ids"] == 0
        assert first[0]
        assert torch.equal(row["labels"] == IGNORED, first)  # of plain text all is learned, but what begins a piece
        assert torch.equal(row["labels"][~first], row["input_ids"][~first])
        steps = row["position_ids"].diff()
        assert bool(((steps == 1) | first[1:]).all())
        assert bool((row["input_ids"].diff()[~first[1:]] == 1).all())  # a piece is one run of its document


def test_prompts_stay_unlearned():
    (row,) = PackedSamples(Documents([5, 4], num_prompt=3), 10)
    assert row["labels"].tolist() == [IGNORED, IGNORED, IGNORED, 3, 4, IGNORED, IGNORED, IGNORED, 8]


def first_fit_rows(lengths, row_tokens):
    """Best-fit decreasing as the textbook has it: look at every row."""
    rooms, rows = [], []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        able = [row for row, room in enumerate(rooms) if room >= lengths[item]]
        if able:
            row = min(able, key=lambda row: rooms[row])
        else:
            row = len(rows)
            rows.append([])
            rooms.append(row_tokens)
        rows[row].append(item)
        rooms[row] -= lengths[item]
    return rows, rooms


@given(
    st.one_of(
        st.tuples(st.lists(st.integers(1, 8), min_size=1, max_size=30), st.integers(8, 12)),  # rooms of one are used
        st.tuples(st.lists(st.integers(1, 3000), min_size=1, max_size=60), st.integers(3000, 5000)),
    )
)
@settings(max_examples=100)
def test_rows_are_as_full_as_the_textbook_fills_them(drawn):
    lengths, row_tokens = drawn
    rows = best_fit(lengths, row_tokens)
    expected, rooms = first_fit_rows(lengths, row_tokens)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert len(rows) == len(expected)
    assert sorted(row_tokens - sum(lengths[item] for item in row) for row in rows) == sorted(rooms)


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 5000), st.data())
def test_spaces_find_the_least_that_is_enough(numbers, least, data):
    spaces, kept = Spaces(5000), set(numbers)
    for number in kept:
        spaces.add(number)
    gone = set(data.draw(st.lists(st.sampled_from(sorted(kept)), unique=True))) if kept else set()
    for number in gone:
        spaces.remove(number)
    assert spaces.at_least(least) == min((number for number in kept - gone if number >= least), default=None)


def test_a_row_each_where_documents_are_not_to_lie_together():
    rows = PackedSamples(Documents([5, 12, 3]), 10, together=False)
    assert rows.lengths.tolist() == [5, 10, 2, 3]
    assert [rows.name(index) for index in range(4)] == ["document 0", "document 1", "document 1", "document 2"]
    assert "position_ids" in rows[0]


def test_names_of_rows():
    rows = PackedSamples(Documents([6, 4, 9]), 10)
    assert [rows.name(index) for index in range(len(rows))] == ["document 2", "document 0 and 1 more"]


def test_rows_in_memory_are_the_same():
    documents = Documents([5, 12, 3, 8, 8])
    for row, again in zip(PackedSamples(documents, 10), pack_samples(documents, 10), strict=True):
        assert row.keys() == again.keys()
        assert all(torch.equal(row[key], again[key]) for key in row)


def test_a_part_is_some_of_them() -> None:
    part = Part(Documents([5, 12, 3, 8]), np.array([0, 2, 3]))
    assert part.lengths.tolist() == [len(sample["input_ids"]) for sample in part] == [5, 3, 8]
    assert [part.name(index) for index in range(len(part))] == ["document 0", "document 2", "document 3"]


def test_joined_sources_are_one_after_another():
    joined = Joined([Documents([2, 3]), Documents([4])])
    assert joined.lengths.tolist() == [2, 3, 4]
    assert [len(sample["input_ids"]) for sample in joined] == [2, 3, 4]
    assert [joined.name(index) for index in range(3)] == ["document 0", "document 1", "document 0"]
    assert [len(sample["input_ids"]) for sample in joined[1:]] == [3, 4]
    assert len(joined[-1]["input_ids"]) == 4
    with pytest.raises(IndexError):
        joined[3]
