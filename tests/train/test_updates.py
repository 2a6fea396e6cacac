"""Updates: every sample as often as it should be, the same whoever reads it and wherever the run is taken up again."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabatch.errors import MegabatchError, PlanError
from megabatch.planning.packing import best_fit
from megabatch.train.config import EvalConfig
from megabatch.train.data.samples import Joined, Mixture, PackedSamples, counts_of, split_off
from megabatch.train.data.updates import NumUpdates
from tests.train.data_for_tests import Ids, ids_of, load, recipe, texts, updates_of, whole_updates, write_texts

KINDS = ["plain", "mixed", "weighted", "packed", "function", "stream", "weighted stream", "packed stream"]
IN_EPOCHS_OF_ALL = ["plain", "mixed", "packed", "stream"]  # kinds whose epoch is every sample once
OWN = """
import random
import numpy as np
import torch

class Samples:
    def __len__(self):
        return 30
    def __getitem__(self, index):
        if index == BROKEN:
            raise KeyError("no such picture")
        drawn = [random.randrange(99), int(np.random.randint(99)), int(torch.randint(99, ()))]
        ids = np.array([*drawn[::-1], index])[::-1]  # as of a picture that is mirrored
        return {"input_ids": ids, "label": index, "half": torch.ones(2, dtype=torch.bfloat16)}

def samples():
    return Samples()
"""


def data_of(kind: str, folder: Path) -> dict:
    """[data] of a recipe; 60 samples at most."""
    first = write_texts(folder / "first.jsonl", texts(37))
    second = write_texts(folder / "second.jsonl", texts(21, seed=1))
    (folder / "own.py").write_text("BROKEN = None" + OWN)
    weight = {"weight": 1.0} if "weighted" in kind else {}
    twice = {"weight": 2.0} if "weighted" in kind else {}
    mixture = {"mixture": {"a": {"path": first, **weight}, "b": {"path": second, **twice}}}
    if kind == "function":
        return {"function": f"{folder / 'own.py'}:samples"}
    return {
        "cache": str(folder / "cache"),
        **(mixture if kind not in ("plain", "packed", "stream") else {"path": first}),
        **({"pack_tokens": 50} if "packed" in kind else {}),
        **({"streaming": True, "shuffle_window": 10} if "stream" in kind else {}),
    }


def config_of(kind: str, folder: Path, *, data: dict | None = None, update: dict | None = None, **run):
    return recipe(
        folder,
        data=data_of(kind, folder) | (data or {}),
        update={"global_batch_size": 8, "micro_batch_size": 4, "tail": "step"} | (update or {}),
        run={"folder": str(folder / "run"), "max_epochs": 2} | run,
        eval={"num_samples": 2},
    )


@pytest.mark.parametrize("kind", IN_EPOCHS_OF_ALL)
@given(size=st.integers(1, 30), tail=st.sampled_from(["step", "carry"]), num_ranks=st.sampled_from([1, 4]))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_two_epochs_see_each_sample_twice(kind, size, tail, num_ranks, tmp_path):
    config = config_of(kind, tmp_path, update={"global_batch_size": size, "tail": tail})
    data = load(config)
    seen = Counter(ids for update in whole_updates(config, num_ranks, data) for ids in update)
    everything = stream_samples(config) if kind == "stream" else ids_of(data.train)
    missing = Counter(everything * 2) - seen
    assert not seen - Counter(everything * 2)
    assert sum(missing.values()) == (2 * len(everything) % size if tail == "carry" else 0)


def stream_samples(config) -> list[Ids]:
    """The training samples, read without a stream."""
    plain = {"data": config.data.model_copy(update={"streaming": False}), "eval": EvalConfig(num_samples=0)}
    return ids_of(load(config.model_copy(update=plain)).train)[2:]  # the first two are held out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
def test_ranks_make_up_the_same_updates(kind, tail, tmp_path):
    config = config_of(kind, tmp_path, update={"tail": tail})
    data = load(config)
    alone = whole_updates(config, 1, data)
    assert len(alone) > 2
    assert whole_updates(config, 3, data) == alone
    assert {len(update) for update in alone[:-1]} <= ({8} if tail != "step" else set(range(1, 9)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_after_any_update(kind, tmp_path):
    config = config_of(kind, tmp_path, update={"tail": "carry" if "weighted" in kind else "step"})
    data = load(config)
    stream, states = [], []
    running = updates_of(config, 1, 2, data)
    states.append(running.state_dict())
    for update in running:
        stream.append(ids_of(update))
        states.append(running.state_dict())
    for number, state in enumerate(states):
        resumed = updates_of(config, 1, 2, data)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert ids_of(resumed.peek()) == (stream[number] if number < len(stream) else [])
        assert resumed.state_dict() == state
        assert [ids_of(update) for update in resumed] == stream[number:]
        assert resumed.state_dict()["updates"] == len(stream)


@pytest.mark.parametrize("kind", ["plain", "function", "stream", "packed stream"])
def test_processes_that_read_ahead_change_nothing(kind, tmp_path):
    config = config_of(kind, tmp_path)
    ahead = config_of(kind, tmp_path, data={"num_workers": 2})
    data = load(config)
    before = torch.get_rng_state()
    expected = [ids_of(update) for update in updates_of(config, data=data)]
    reading, found = updates_of(ahead, data=data), []
    first = ids_of(reading.peek())
    for update in reading:
        found.append(update)
        if len(found) == 3:
            break
    state = reading.state_dict()
    assert state["updates"] == 3  # not of what was read ahead
    assert first == expected[0]
    resumed = updates_of(ahead, data=data)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    found += resumed
    assert [ids_of(update) for update in found] == expected
    assert all(isinstance(value, torch.Tensor | int) for update in found for one in update for value in one.values())
    assert torch.equal(before, torch.get_rng_state())
    assert resumed.state_dict()["updates"] == len(expected)


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("plain", 0), ("mixed", 0), ("stream", 0), ("mixed", 2), ("stream", 2)]
)
def test_it_names_the_samples_that_were_handed_out_last(kind, num_workers, tmp_path):
    config = config_of(kind, tmp_path, data={"num_workers": num_workers})
    updates = updates_of(config, 1, 2)
    assert updates.names == []
    updates.peek()
    assert updates.names == []
    for samples in updates:
        lines = [bytes(number - 3 for number in ids if number > 2).decode() for ids in ids_of(samples)]
        places = [line.split(" ")[0].split(":") for line in lines]  # source and line, as the texts begin
        files = ["first.jsonl", "second.jsonl"]
        assert [name.split("/")[-1] for name in updates.names] == [f"{files[int(a)]}:{int(b) + 1}" for a, b in places]


def test_a_sample_that_draws_random_numbers_draws_new_ones_each_epoch(tmp_path):
    config = config_of("function", tmp_path)
    seen = [ids for update in whole_updates(config) for ids in update]
    assert len(set(seen)) == len(seen) == 56
    assert len({ids[0] for ids in seen}) == 28


def test_updates_are_counted(tmp_path):
    config = config_of("plain", tmp_path)  # 37 samples, of which two are held out
    assert updates_of(config).num_updates == NumUpdates(10, 10)
    data = load(config)
    assert updates_of(config_of("plain", tmp_path, max_steps=7), data=data).num_updates == NumUpdates(10, 7)
    assert len(whole_updates(config_of("plain", tmp_path, max_steps=7), data=data)) == 7
    assert updates_of(config_of("plain", tmp_path, max_steps=70), data=data).num_updates == NumUpdates(10, 10)
    for tail, number in (("step", 8), ("drop", 6), ("carry", 7)):
        nine = config_of("plain", tmp_path, update={"global_batch_size": 9, "tail": tail})
        assert updates_of(nine, data=data).num_updates.of_data == number
    stream = config_of("stream", tmp_path)
    assert updates_of(stream).num_updates == NumUpdates(None, None)
    shorter = config_of("stream", tmp_path, max_steps=3)
    assert updates_of(shorter).num_updates == NumUpdates(None, 3)
    assert whole_updates(shorter) == whole_updates(stream)[:3]
    weighted = load(config_of("weighted", tmp_path))
    assert weighted.epoch_size == 31  # 21 of b, once, and 10 of a
    assert updates_of(config_of("weighted", tmp_path), data=weighted).num_updates.of_data == 8


def test_max_steps_counts_from_the_first_update(tmp_path):
    config = config_of("plain", tmp_path, max_steps=7)
    running = updates_of(config)
    for _, _ in zip(range(4), running, strict=False):
        pass
    resumed = updates_of(config)
    resumed.load_state_dict(running.state_dict())
    assert len(list(resumed)) == 7 - running.state_dict()["updates"]


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_look_ahead_consumes_nothing(kind, tmp_path):
    config = config_of(kind, tmp_path)
    updates = updates_of(config)
    start = updates.state_dict()
    first = ids_of(updates.peek())
    assert ids_of(updates.peek()) == first
    assert updates.state_dict() == start
    looked_at = []
    for update in updates:
        looked_at.append(ids_of(update))
        following = updates.peek()
        if len(looked_at) == 4:
            break
    found = looked_at + [ids_of(update) for update in updates]
    assert looked_at[0] == first
    assert ids_of(following) == found[4]
    assert found == [ids_of(update) for update in updates_of(config)]
    assert updates.peek() == []


def test_a_state_of_other_data_is_refused(tmp_path):
    state = updates_of(config_of("plain", tmp_path)).state_dict()
    with pytest.raises(PlanError, match="num_samples=35 but this sampler has 56"):
        updates_of(config_of("mixed", tmp_path)).load_state_dict(state)
    state = updates_of(config_of("stream", tmp_path)).state_dict()
    with pytest.raises(PlanError, match="of 1 sources but data has 2"):
        updates_of(config_of("weighted stream", tmp_path)).load_state_dict(state)


@pytest.mark.parametrize(
    ("kind", "update", "reason"),
    [
        ("plain", {"tail": "carry", "global_batch_size": 71}, "make no update of update.global_batch_size=71"),
        ("plain", {"tail": "drop", "global_batch_size": 36}, "make no update of update.global_batch_size=36"),
        ("stream", {"tail": "drop", "global_batch_size": 36}, "make no update of update.global_batch_size=36"),
    ],
)
def test_a_run_without_updates_is_refused(kind, update, reason, tmp_path):
    with pytest.raises(MegabatchError, match=reason) as raised:
        updates_of(config_of(kind, tmp_path, update=update)).peek()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["function", "stream"])
def test_what_cannot_be_read_is_said_in_one_line(kind, num_workers, tmp_path):
    config = config_of(kind, tmp_path, data={"num_workers": num_workers})
    data = load(config)
    if kind == "function":
        (tmp_path / "own.py").write_text("BROKEN = 17" + OWN)
        (tmp_path / "own.py").rename(tmp_path / "broken.py")
        broken = {"num_workers": num_workers, "function": f"{tmp_path}/broken.py:samples"}
        config = config_of(kind, tmp_path, data=broken)
        data = load(config)
        expected = r'sample 17 of "train" .* raised KeyError: .no such picture. \(.*broken.py, line \d+\); mend it'
    else:
        with (tmp_path / "first.jsonl").open("a") as file:
            file.write("{\n")
        expected = r"first.jsonl:38 is not JSON"
    with pytest.raises(MegabatchError, match=expected) as raised:
        list(updates_of(config, data=data))
    assert "\n" not in str(raised.value)


WITH_OPEN_WORKER = """
import multiprocessing, subprocess
from torch.utils.data import DataLoader
from megabatch.train.data.updates import options

items = iter(DataLoader(range(8), **options(1) | {"collate_fn": None}))
first = next(items)
(worker,) = multiprocessing.active_children()
subprocess.run(["kill", str(worker.pid)], check=True)
print(first, *(next(items) for _ in range(6)))
"""


def test_a_worker_outlives_a_signal_to_the_run_and_ends_with_its_parent():
    ended = subprocess.run([sys.executable, "-c", WITH_OPEN_WORKER], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0 1 2 3 4 5 6\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_process_that_is_killed_ends_the_run_in_one_line(kind, tmp_path):
    config = config_of(kind, tmp_path, data={"num_workers": 1}, max_epochs=1000)
    updates = iter(updates_of(config))
    next(updates)
    for process in multiprocessing.active_children():
        os.kill(process.pid, signal.SIGKILL)
    time.sleep(0.5)  # of other work, in which nothing is raised
    start = time.monotonic()
    with pytest.raises(MegabatchError, match=r"data\.num_workers is 1: lower it") as raised:
        for _ in updates:
            pass
    assert "\n" not in str(raised.value)
    assert time.monotonic() - start < 30


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


def test_a_row_each_where_documents_are_not_to_lie_together():
    rows = PackedSamples(Documents([5, 12, 3]), 10, together=False)
    assert rows.lengths.tolist() == [5, 10, 2, 3]
    assert [rows.name(index) for index in range(4)] == ["document 0", "document 1", "document 1", "document 2"]
    assert "position_ids" in rows[0]


def test_joined_sources_are_one_after_another():
    joined = Joined([Documents([2, 3]), Documents([4])])
    assert joined.lengths.tolist() == [2, 3, 4]
    assert [len(sample["input_ids"]) for sample in joined] == [2, 3, 4]
    assert [joined.name(index) for index in range(3)] == ["document 0", "document 1", "document 0"]
    assert [len(sample["input_ids"]) for sample in joined[1:]] == [3, 4]
    assert len(joined[-1]["input_ids"]) == 4
    with pytest.raises(IndexError):
        joined[3]


mixtures = st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0.1, 0.25, 1.0, 3.0])), min_size=1, max_size=4).map(
    lambda sources: ([size for size, _ in sources], [weight for _, weight in sources])
)


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
