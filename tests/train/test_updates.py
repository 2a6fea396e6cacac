"""Updates: every sample as often as it should be, the same whoever reads it and wherever the run is taken up again."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megabatch.errors import MegabatchError, PlanError
from megabatch.train.config import EvalConfig
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
        update={"global_batch_size": 8, "micro_batch_size": 4} | (update or {}),
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
    """What is trained on, read without a stream."""
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


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "mixed", "stream"])
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
    assert updates_of(config_of("plain", tmp_path, update={"tail": "drop"}), data=data).num_updates.of_data == 8
    assert updates_of(config_of("plain", tmp_path, update={"tail": "carry"}), data=data).num_updates.of_data == 8
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
