"""Updates dealt over ranks by what samples were measured to cost: the same updates, and the same shares when a run goes
on."""

import json
import re
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch import CostModel
from megabatch.planning import deal
from megabatch.train.autotune.microbatch_limit import even_tokens
from megabatch.train.data.updates import Dealing, Updates, balancing_cost
from tests.elastic.conftest import OWN
from tests.train.conftest import Bench, timeless, write_pairs
from tests.train.data_for_tests import ids_of, load, updates_of
from tests.train.test_checkpoint import reseal
from tests.train.test_updates import KINDS, config_of

EVEN = 16  # tokens; the samples here have up to 50
QUADRATIC = (
    OWN
    + """
import inspect


@loss(weigh=losses.next_token.weigh)
def quadratic(model, microbatch):
    rows, tokens = microbatch["input_ids"].shape
    time.sleep(rows * tokens * (1 + tokens / 32) * 200e-6)
    is_of_update = any(each.filename.endswith("accumulator.py") for each in inspect.stack(0))  # not a measured copy
    return (within if is_of_update else losses.next_token)(model, microbatch)
"""
)


@pytest.mark.parametrize(
    ("token", "pair", "expected"),
    [
        (1.0, 1 / 512, 512),
        (3.0, 3 / 600, 512),  # the nearest power of two
        (1.0, 1 / 8192, 8192),  # an eighth of the longest sample's other work
        (1.0, 1 / 8300, None),  # less
        (1.0, 0.0, None),
        (0.0, 0.0, None),  # a launch alone
        (1.0, 1 / 256, 256),
        (1.0, 1 / 100, 256),  # more than four times it
        (0.0, 1.0, 256),  # attention alone
    ],
)
def test_what_is_kept_of_a_fit(token: float, pair: float, expected: int | None) -> None:
    assert even_tokens(CostModel(0.1, token, pair), 1024) == expected


def test_sums_of_prices_are_exact() -> None:
    cost = balancing_cost(64)
    prices = [cost.sample_seconds(length) for length in range(1, 500)]
    assert sum(prices) == sum(reversed(prices)) == sum(64 * length + length**2 for length in range(1, 500)) / 64


def dealt(updates: Updates, *, peeks: bool = True) -> Updates:
    """The updates, of which the first was looked at before anybody knew what samples cost."""
    if peeks:
        updates.peek()
    updates.deal_by(Dealing(balancing_cost(EVEN)))
    return updates


@pytest.mark.parametrize(("kind", "num_workers"), [*product(KINDS, [0]), ("plain", 2), ("packed stream", 2)])
def test_the_same_updates_are_dealt_by_cost(kind: str, num_workers: int, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path, data={"num_workers": num_workers})
    data = load(config)
    alone = [list(update) for update in updates_of(config, data=data)]
    ranks = [dealt(updates_of(config, rank, 3, data), peeks=rank != 2) for rank in range(3)]
    first = [ids_of(updates.peek()) for updates in ranks]
    shares = [[list(share) for share in updates] for updates in ranks]
    assert first == [ids_of(of_rank[0]) for of_rank in shares]
    for update, *of_ranks in zip(alone, *shares, strict=True):
        assert sorted(ids for share in of_ranks for ids in ids_of(share)) == sorted(ids_of(update))
        lengths = np.array([len(sample["input_ids"]) for sample in update])  # one rank has all samples, in their order
        ranks = deal(lengths, 3, balancing_cost(EVEN), max_rows=4)
        expected = [[ids for ids, rank in zip(ids_of(update), ranks, strict=True) if rank == dealt_to]
                    for dealt_to in range(3)]  # fmt: skip
        assert [ids_of(share) for share in of_ranks] == expected


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_run_that_goes_on_is_dealt_the_same(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path)
    data = load(config)
    running = dealt(updates_of(config, 1, 3, data))
    states, stream = [running.state_dict()], []
    for update in running:
        stream.append(ids_of(update))
        states.append(running.state_dict())
    by_length = [ids_of(update) for update in updates_of(config, 1, 3, data)]
    assert by_length != stream
    for number, state in enumerate(states):
        resumed = dealt(updates_of(config, 1, 3, data))
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert [ids_of(update) for update in resumed] == stream[number:]


def test_one_rank_and_no_price_change_nothing(tmp_path: Path) -> None:
    config = config_of("plain", tmp_path)
    data = load(config)
    alone = updates_of(config, data=data)
    first = alone.peek()
    alone.deal_by(Dealing(balancing_cost(EVEN)))
    assert alone.peek() is first
    two = updates_of(config, 0, 2, data)
    first = two.peek()
    two.deal_by(Dealing())
    assert two.peek() is first


# In runs


@pytest.fixture
def quadratic(bench: Bench) -> dict[str, Any]:
    """A loss that takes as long for the square of 32 tokens as for all the rest, and notes where a run stands."""
    write_texts_of(bench, 50)
    (bench.path / "own.py").write_text(QUADRATIC)
    own = bench.path / "own.py"
    values = {"loss__function": f"{own}:quadratic", "run__after_update": f"{own}:after_update", "eval__every": None}
    return values | {"update__max_microbatch_tokens": "auto", "parallel__wrapper": "ddp"}


def write_texts_of(bench: Bench, number: int) -> None:
    """So many samples of very different lengths."""
    pairs = [(f"{index}: ", "ab" * (1 + 60 * index**2 // number**2)) for index in range(number)]
    write_pairs(bench.path / "data.jsonl", pairs)


def without_peaks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without what the second update of a process has besides."""
    return [{key: row[key] for key in row if not key.endswith("peak_gib")} for row in timeless(rows)]


def meta_of(folder: Path, step: int) -> dict[str, Any]:
    return json.loads((folder / "checkpoints" / f"step-{step}" / "meta.json").read_text())["bound"]


def rewrite(folder: Path, step: int, bound: dict[str, Any]) -> None:
    """Let a checkpoint keep that bound."""
    path = folder / "checkpoints" / f"step-{step}" / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bound": bound}))
    reseal(path.parent)


def lines_of(folder: Path, name: str, *keys: str) -> list[list[Any]]:
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [[row[key] for key in keys] for row in rows if "set" not in row]


@pytest.mark.slow
def test_a_run_is_dealt_by_the_fit_that_its_checkpoint_keeps(
    bench: Bench, tmp_path: Path, quadratic: dict[str, Any]
) -> None:
    whole = tmp_path / "whole"
    said = bench.train(ranks=2, run__folder=whole, run__save_every=3, **quadratic)
    (tokens,) = re.findall(r"dealt over ranks by cost: attention counts as much as the rest at (\d+) tokens", said)
    assert int(tokens) in (32, 64, 128, 256)
    assert meta_of(whole, 3)["even_tokens"] == int(tokens)
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped)
    (stopped / "checkpoints" / "latest").write_text("step-3")
    said = bench.train(ranks=2, run__folder=stopped, run__resume=True, **quadratic)
    assert f"as much as the rest at {tokens} tokens" in said
    assert without_peaks(bench.rows(stopped)) == without_peaks(bench.rows(whole))
    assert (stopped / "cuts.jsonl").read_text() == (whole / "cuts.jsonl").read_text()

    by_length = tmp_path / "by_length"
    stated = quadratic | {"update__max_microbatch_tokens": 256}
    assert "dealt over ranks" not in bench.train(ranks=2, run__folder=by_length, **stated)
    assert lines_of(by_length, "cuts.jsonl", "cut") != lines_of(whole, "cuts.jsonl", "cut")
    keys = ("step", "num_samples", "num_tokens", "weight", "lr", "run_hash")
    assert lines_of(by_length, "metrics.jsonl", *keys) == lines_of(whole, "metrics.jsonl", *keys)
