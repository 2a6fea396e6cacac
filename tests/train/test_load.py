"""Load: what a recipe's data becomes, what is held out, and what is refused in one line."""

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from megabatch.errors import MegabatchError
from megabatch.train.data.custom_dataset import drawing
from megabatch.train.data.load import load_data
from megabatch.train.data.sources import MAX_LINE_BYTES
from megabatch.train.data.stream import Stream
from megabatch.train.data.updates import Updates
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from tests.exact.launch import launch
from tests.train.data_for_tests import CPU, ids_of, load, recipe, texts, write_texts
from tests.unit.failures.table import line_of, names

OWN = """
import torch

class Counted(list):
    pass

def samples(number=20, first=0, **others):
    return [{"x": torch.full((index % 5 + 1,), float(first + index)), "y": index} for index in range(number)]

def sets():
    return {"train": samples(), "other": samples(6, 100)}

def measured():
    found = Counted(samples(4))
    found.lengths = [7, 8, 9, 7]
    return found

def badly_measured():
    found = Counted(samples(4))
    found.lengths = [7, 8]
    return found

def held_out():
    return {"train": samples(), "held-out": samples()}

def own():
    return {"train": samples(), "own": samples()}

def no_train():
    return {"training": samples()}

def generator():
    return (sample for sample in samples())

def nothing():
    return []

def pairs():
    return [(1, 2)]

def words():
    return [{"x": "word"}]

def fails():
    raise ZeroDivisionError("no luck")
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


def job(name: str) -> Any:
    """``name``: a folder with data.jsonl and own.py, and what of it is read."""
    folder, kind = Path(name).parent, Path(name).name
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), CPU)
    os.environ["RANK_OF_OWN"] = str(ranks.rank)
    data = {
        "plain": {"path": str(folder / "data.jsonl"), "num_workers": 1},
        "stream": {"path": str(folder / "data.jsonl"), "streaming": True},
        "same": {"function": f"{folder / 'own.py'}:same"},
        "different": {"function": f"{folder / 'own.py'}:different"},
    }[kind]
    config = recipe(folder, data=data)
    try:
        loaded = load_data(config, ByT5Tokenizer(), ranks, Console(enabled=False, loss_digits=4))
    except MegabatchError as error:
        return str(error)
    return [ids_of(update) for update in Updates(loaded, config, ranks)]


@pytest.fixture
def path(tmp_path):
    return write_texts(tmp_path / "data.jsonl", texts(50))


def test_held_out_samples_are_chosen_by_the_seed_and_never_trained_on(tmp_path, path):
    def of(seed):
        data = load(recipe(tmp_path, data={"path": path}, eval={"num_samples": 4}, run={"folder": "run", "seed": seed}))
        return set(ids_of(data.train)), set(ids_of(data.sets["held-out"]))

    train, held_out = of(1)
    assert (len(train), len(held_out)) == (46, 4)
    assert not train & held_out
    assert of(1) == (train, held_out)
    assert of(2)[1] != held_out


def test_at_most_a_tenth_is_held_out(tmp_path, path):
    data = load(recipe(tmp_path, data={"path": path}, eval={"num_samples": 1000}))
    assert len(data.sets["held-out"]) == 5
    assert load(recipe(tmp_path, data={"path": path, "max_samples": 9}, eval={"num_samples": 5})).sets == {}


def test_sets_to_evaluate_on_lie_beside(tmp_path, path):
    other = write_texts(tmp_path / "other.jsonl", texts(7, seed=1))
    sets = {"other": {"path": other}, "few": {"path": other, "max_samples": 3}}
    data = load(recipe(tmp_path, data={"path": path}, eval={"num_samples": 4, "sets": sets}))
    assert {name: len(samples) for name, samples in data.sets.items()} == {"held-out": 4, "other": 7, "few": 3}
    streaming = {"path": path, "streaming": True}
    assert load(recipe(tmp_path, data=streaming, eval={"num_samples": 4, "sets": sets})).sets.keys() == data.sets.keys()


def test_a_mixture_says_what_an_epoch_has_of_each_source(tmp_path, path):
    other = write_texts(tmp_path / "other.jsonl", texts(20, seed=1))
    mixture = {"code": {"path": path, "weight": 1.0}, "math": {"path": other, "weight": 2.0}}
    data = load(recipe(tmp_path, data={"mixture": mixture}, eval={"num_samples": 7}))
    held_out = [ids[0] for ids in ids_of(data.sets["held-out"])]
    assert len(held_out) == 7  # at most a tenth of each
    num_math = sum(first == ord("1") + 3 for first in held_out)
    assert num_math <= 2
    assert data.words[1:] == [
        f"an epoch has {20 - num_math + (20 - num_math) // 2} samples: {(20 - num_math) // 2} of code "
        f"(of its {43 + num_math}), {20 - num_math} of math"
    ]
    assert data.order is not None
    firsts = [ids_of([data.train[index]])[0][0] for index in data.order(0)]
    assert firsts.count(ord("1") + 3) == 20 - num_math


def test_packed_documents(tmp_path, path):
    data = load(recipe(tmp_path, data={"path": path, "pack_tokens": 64}, eval={"num_samples": 4}))
    plain = load(recipe(tmp_path, data={"path": path}, eval={"num_samples": 4}))
    assert sum(data.lengths) == sum(plain.lengths)
    assert max(data.lengths) <= 64
    fill = sum(data.lengths) / len(data.lengths) / 64
    (words,) = data.words
    num_targets = sum(int((plain.train[index]["labels"][1:] != -100).sum()) for index in range(len(plain.train)))
    assert plain.words == [
        f"{len(plain.lengths):,} samples of {sum(plain.lengths):,} tokens, {num_targets:,} of them to be learned; "
        f"the longest has {max(plain.lengths)}"
    ]
    assert words == f"data: packed 46 documents into {len(data.lengths)} rows of at most 64 tokens, {fill:.1%} full"
    assert ids_of(data.sets["held-out"]) == ids_of(plain.sets["held-out"])  # a document each
    assert "2 of them cut" not in words
    cut = load(recipe(tmp_path, data={"path": path, "pack_tokens": 20}))
    assert f"{sum(length > 20 for length in whole_lengths(tmp_path, path))} of them cut" in cut.words[0]


def whole_lengths(tmp_path, path):
    return load(recipe(tmp_path, data={"path": path})).lengths


def test_samples_of_a_function(tmp_path, own):
    data = load(recipe(tmp_path, data={"function": own("samples"), "options": {"first": 3}}))
    assert len(data.train) == 20
    assert data.train[2]["x"].tolist() == [5.0, 5.0, 5.0]
    assert data.lengths.tolist() == [1] * 20  # nobody counts tokens
    measured = load(with_cap(tmp_path, 6, data={"function": own("samples")}))
    assert measured.lengths.tolist() == [index % 5 + 1 for index in range(20)]
    assert load(recipe(tmp_path, data={"function": own("measured")})).lengths.tolist() == [7, 8, 9, 7]


def test_sets_of_a_function(tmp_path, own):
    data = load(recipe(tmp_path, data={"function": own("sets")}, eval={"num_samples": 9}))
    assert {name: len(samples) for name, samples in data.sets.items()} == {"held-out": 2, "other": 6}
    seen = [sample["y"] for sample in data.train] + [sample["y"] for sample in data.sets["held-out"]]
    assert sorted(seen) == list(range(20))


def test_the_identity_is_of_what_is_read_and_not_of_where_it_lies(tmp_path, path):
    (tmp_path / "copy").mkdir()
    copy = write_texts(tmp_path / "copy" / "data.jsonl", texts(50))
    other = write_texts(tmp_path / "copy" / "other.jsonl", texts(50, seed=1))
    for kind in ({}, {"streaming": True}):
        identities = [load(recipe(tmp_path, data={"path": each, **kind})).identity for each in (path, copy, other)]
        assert identities[0] == identities[1] != identities[2]
        assert json.loads(json.dumps(identities[0])) == identities[0]
    packed = load(recipe(tmp_path, data={"path": path, "pack_tokens": 64})).identity
    assert packed != load(recipe(tmp_path, data={"path": path})).identity
    assert packed["num_tokens"] == sum(whole_lengths(tmp_path, path))


def test_longest_tokens(tmp_path, path, own):
    other = write_texts(tmp_path / "other.jsonl", ["z" * 99])
    data = load(recipe(tmp_path, data={"path": path}, eval={"sets": {"other": {"path": other}}, "num_samples": 3}))
    assert data.longest_tokens == 100
    stream = load(recipe(tmp_path, data={"path": path, "streaming": True}))
    assert isinstance(stream.train, Stream)
    assert stream.longest_tokens is None
    assert load(recipe(tmp_path, data={"function": own("samples")})).longest_tokens is None


def with_cap(tmp_path, cap, **sections):
    update = {"global_batch_size": 8, "micro_batch_size": None, "max_microbatch_tokens": cap}
    return recipe(tmp_path, update=update, **sections)


def test_a_sample_that_fits_into_no_microbatch_is_named(tmp_path):
    path = write_texts(tmp_path / "data.jsonl", ["short", "l" * 30, "short too"])
    expected = f"the sample {path}:2 has 31 tokens, more than update.max_microbatch_tokens=20; raise it to 31 or "
    assert (
        line_of(lambda: load(with_cap(tmp_path, 20, data={"path": path})))
        == expected + "leave such samples out with data.max_sample_tokens"
    )
    said = line_of(lambda: load(with_cap(tmp_path, 20, data={"path": path, "pack_tokens": 64})))
    assert "has 47 tokens" in said
    assert said.endswith("or lower data.pack_tokens")
    data = load(with_cap(tmp_path, 20, data={"path": path, "pack_tokens": 20}))
    assert max(data.lengths) <= 20


def test_a_long_sample_of_a_set_is_named_too(tmp_path, path):
    other = write_texts(tmp_path / "other.jsonl", ["l" * 130])
    with pytest.raises(MegabatchError, match=r"other\.jsonl:1 has 131 tokens, more than update"):
        load(with_cap(tmp_path, 100, data={"path": path}, eval={"sets": {"other": {"path": other}}, "num_samples": 1}))


def test_a_sample_without_tokens_to_count(tmp_path, own):
    with pytest.raises(MegabatchError, match=r"sample 0 of .* has no tensor as its first value, .*\.micro_batch_size"):
        load(with_cap(tmp_path, 100, data={"function": own("words")}))


@given(st.integers(0, 2**40), st.integers(0, 100))
def test_what_a_sample_draws_is_its_own_and_nobody_elses_numbers_change(seed, number):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    drawn = []
    for _ in range(2):
        with drawing(seed, number):
            drawn.append((torch.rand(1).item(), np.random.rand()))
    assert drawn[0] == drawn[1]
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == np.random.get_state()[1].tolist()


@pytest.mark.slow
def test_two_processes(tmp_path):
    """They share one cache, deal the same updates among them, and refuse a function that gives each its own samples."""
    write_texts(tmp_path / "data.jsonl", texts(30))
    (tmp_path / "own.py").write_text(
        "import os, torch\n"
        "def same(): return [{'input_ids': torch.full((2,), number)} for number in range(20)]\n"
        "def different(): return same()[int(os.environ['RANK_OF_OWN']):]\n"
    )
    kinds = ["plain", "stream", "same", "different"]
    found = launch(2, "tests.train.test_load:job", [str(tmp_path / kind) for kind in kinds], tmp_path / "ranks")
    plain, stream, same, different = ([result["value"] for result in found[str(tmp_path / kind)]] for kind in kinds)
    expected = set(ids_of(load(recipe(tmp_path, data={"path": str(tmp_path / "data.jsonl")})).train))
    for shares in (plain, stream):
        assert [sum(map(len, update)) for update in zip(*shares, strict=True)] == [8, 8, 8, 6]
        seen = [tuple(ids) for share in shares for update in share for ids in update]
        assert len(seen) == 30
        assert set(seen) == expected
    assert sorted(ids[0] for share in same for update in share for ids in update) == list(range(20))
    refused = f"data.function {tmp_path / 'own.py'}:different does not return the same samples on every process"
    assert different == [f"{refused}; draw with a seed of its own"] * 2


SOURCE = {"path": "x.jsonl"}
REFUSED = {  # [data], [eval] -> what the error names
    "function and path": ({"function": "FILE:samples", "path": "x"}, {}, "data.function … data.path … leave one"),
    "function and streaming": ({"function": "FILE:samples", "streaming": True}, {}, "data.function … data.streaming"),
    "function and packing": ({"function": "FILE:samples", "pack_tokens": 8}, {}, "data.function … data.pack_tokens"),
    "options of nothing": ({"options": {"a": 1}}, {}, "data.options … data.function; set that"),
    "mixture and path": ({"mixture": {"a": SOURCE}, "path": "x"}, {}, "data.mixture … data.path … [data.mixture.NAME]"),
    "some weights": (
        {"mixture": {"a": {**SOURCE, "weight": 1.0}, "b": SOURCE}}, {}, "data.mixture.a … data.mixture.b",
    ),
    "a weight of one source": ({**SOURCE, "weight": 1.0}, {}, "data.weight … [data.mixture.NAME]"),
    "a weight of a set": (SOURCE, {"sets": {"a": {**SOURCE, "weight": 1.0}}}, "eval.sets.a.weight … remove it"),
    "rows of one token": ({**SOURCE, "pack_tokens": 1}, {}, "data.pack_tokens is 1 … at least 2"),
    "a name that is taken": (
        SOURCE, {"sets": {"held-out": SOURCE}, "num_samples": 3}, 'eval.sets … "held-out" … rename it',
    ),
    "no sequence": ({"function": "FILE:generator"}, {}, '"train" … FILE:generator is a generator; return'),
    "nothing": ({"function": "FILE:nothing"}, {}, '"train" of data.function FILE:nothing is empty; return'),
    "no mappings": ({"function": "FILE:pairs"}, {}, "FILE:pairs is a tuple; expected a mapping of tensors"),
    "no training set": ({"function": "FILE:no_train"}, {}, "FILE:no_train … ['training'] … \"train\""),
    "a held-out set of one's own": (
        {"function": "FILE:held_out"}, {"num_samples": 2}, 'FILE:held_out … "held-out" … eval.num_samples to 0',
    ),
    "a set named own": ({"function": "FILE:own"}, {"function": "FILE:fails"}, 'FILE:own … "own" … rename it'),
    "lengths of other samples": ({"function": "FILE:badly_measured"}, {}, "FILE:badly_measured is no list of 4"),
    "a function that fails": (
        {"function": "FILE:fails"}, {}, "data.function 'FILE:fails' raised ZeroDivisionError: no luck (FILE, line",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path, own):
    data, evaluation, seen = REFUSED[name]
    file = own("").removesuffix(":")
    data = {key: value.replace("FILE", file) if key == "function" else value for key, value in data.items()}
    said = line_of(lambda: load(recipe(tmp_path, data=data, eval={"num_samples": 0} | evaluation)))
    assert names(said, seen.replace("FILE", file)), said
    assert not (tmp_path / "run").exists()


def test_a_line_that_is_too_long_is_never_held_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it is a sample that is too long, where such are left out."""
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "one"}\n')
        file.seek(300_000_000, os.SEEK_CUR)
        file.write(b'\n{"text": "two"}\n')
    tracemalloc.start()
    try:
        keys = {"path": str(path), "max_sample_tokens": 256, "cache": str(tmp_path / "cache")}
        data = load_data(
            recipe(tmp_path, data=keys), ByT5Tokenizer(), Ranks(0, 1, CPU), Console(enabled=True, loss_digits=4)
        )
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_LINE_BYTES  # joined from pieces
    finally:
        tracemalloc.stop()
    assert len(data.train) == 2
    assert "data: left out 1 samples longer than data.max_sample_tokens" in capsys.readouterr().out
