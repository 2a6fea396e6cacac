"""Ranks of unlike speed: measured on real processes, and dealt work by it. The samples of each update stay the same."""

import json
import math
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megabatch import CostModel
from megabatch.pipeline import plan_steps
from megabatch.planning import deal
from megabatch.train.autotune.microbatch_limit import relative_cost
from megabatch.train.callbacks.measured_dealing import MeasuredDealing, SpeedMeter
from megabatch.train.data.updates import Dealing, Updates, balancing_cost
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.data_for_tests import ids_of, load, updates_of
from tests.train.test_updates import KINDS, config_of

GRADIENT = ("loss", "grad_norm")
SPEEDS = (1.0, 0.25, 1.0)
OWN = """
import json
import os
import time
from pathlib import Path

from megabatch import loss, losses

RANK, HERE = os.environ.get("RANK", "0"), Path(__file__).parent
TOKENS = [0]


@loss(weigh=losses.next_token.weigh)
def slow_on_rank_1(model, microbatch):
    rows, tokens = microbatch["input_ids"].shape
    TOKENS[0] += rows * tokens
    end = time.thread_time() + rows * tokens * (600e-6 if RANK == "1" else 75e-6)
    while time.thread_time() < end:
        pass
    return losses.next_token(model, microbatch)


def after_update(event):
    with (event.folder / f"tokens-{RANK}.jsonl").open("a") as file:
        file.write(json.dumps([event.step, TOKENS.pop()]) + "\\n")
    TOKENS.append(0)
"""


def test_speeds_are_what_samples_do_not_explain() -> None:
    meter = SpeedMeter()
    for seconds, work in (([1.0, 2.0], [10.0, 10.0]), ([0.5, 3.0], [5.0, 15.0]), ([9.0, 2.0], [10.0, 10.0])):
        meter.add(seconds, work)
    meter.add([0.0, 1.0], [0.0, 10.0])  # no sample
    found = meter.speeds()
    assert found is not None
    assert found.speeds == (1.0, 0.5)
    assert found.seconds == pytest.approx(2.0)
    assert found.balanced_seconds == pytest.approx(20 / 15)
    assert found.gain == pytest.approx(1 / 3)


def test_ranks_that_are_as_fast_gain_nothing_by_their_speeds() -> None:
    meter = SpeedMeter()
    assert meter.speeds() is None
    meter.add([1.0, 3.0], [10.0, 30.0])
    meter.add([3.0, 1.0], [30.0, 10.0])
    found = meter.speeds()
    assert found is not None
    assert found.speeds == (1.0, 1.0)


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (CostModel(0.1, 1e-3, 1e-6), CostModel(128, 1.0, 1 / 1024)),
        (CostModel(0.0, 1e-3, 0.0), CostModel(0, 1.0, 2.0**-40)),
        (CostModel(0.1, 0.0, 0.0), CostModel(0, 1.0, 2.0**-40)),  # a launch alone
    ],
)
def test_a_measured_cost_is_rounded_to_powers_of_two(cost: CostModel, expected: CostModel) -> None:
    assert relative_cost(cost, 1024) == expected


def shares_of(updates: Updates, after: int, dealing: Dealing, *, reads_ahead: bool) -> list[Any]:
    """The ids of this rank's samples of every update, dealt by what was measured after some of them."""
    shares: list[Any] = []
    for samples in updates:
        shares.append(ids_of(samples))
        if reads_ahead:
            updates.read_ahead()
        if len(shares) == after:
            updates.deal_by(dealing)
    return shares


@pytest.mark.parametrize(("kind", "num_workers"), [*product(KINDS, [0]), ("plain", 2), ("packed stream", 2)])
def test_a_run_that_goes_on_is_dealt_by_speeds(kind: str, num_workers: int, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path, data={"num_workers": num_workers})
    data, dealing = load(config), Dealing(balancing_cost(16), speeds=SPEEDS)
    alone = [list(update) for update in updates_of(config, data=data)]
    # Workers may read ahead on one rank and not on another.
    shares = [shares_of(updates_of(config, rank, 3, data), 2, dealing, reads_ahead=rank > 0) for rank in range(3)]
    for number, (update, *of_ranks) in enumerate(zip(alone, *shares, strict=True)):
        lengths = np.array([len(sample["input_ids"]) for sample in update])
        options = {"cost": dealing.cost, "speeds": SPEEDS} if number >= 2 else {}
        ranks = deal(lengths, 3, max_rows=4, **options)
        expected = [[ids for ids, rank in zip(ids_of(update), ranks, strict=True) if rank == dealt_to]
                    for dealt_to in range(3)]  # fmt: skip
        assert of_ranks == expected


def test_a_limit_that_was_measured_groups_samples(tmp_path: Path) -> None:
    for kind in ("plain", "stream"):
        config = config_of(kind, tmp_path, update={"micro_batch_size": None})
        data, dealing = load(config), Dealing(max_microbatch_tokens=100)
        ranks = [updates_of(config, rank, 2, data) for rank in range(2)]
        for updates in ranks:
            updates.deal_by(dealing)
        update = [sample for updates in ranks for sample in updates.peek()]
        lengths = [len(sample["input_ids"]) for sample in ranks[0].peek()]
        (whole,) = [next(iter(updates_of(config, data=data)))]
        tokens = np.array([len(sample["input_ids"]) for sample in whole])
        assert sorted(ids_of(update)) == sorted(ids_of(whole))
        assert lengths == tokens[deal(tokens, 2, max_tokens=100) == 0].tolist()


def test_speeds_of_another_number_of_ranks_are_measured_again(tmp_path: Path) -> None:
    config = config_of("plain", tmp_path, update={"balance": "measured"})
    data = load(config)

    def resumed(num_ranks: int) -> Dealing:
        updates = updates_of(config, 0, num_ranks, data)
        ranks = Ranks(0, num_ranks, torch.device("cpu"))
        context: Any = SimpleNamespace(config=config, updates=updates, ranks=ranks, positions={})
        callback = MeasuredDealing(context, has_seconds=True)
        callback.load_state_dict({"speeds": [1.0, 0.5], "cost": None})
        assert context.positions == {"dealing": callback}
        assert callback.state_dict()["speeds"] == updates.dealing.speeds
        return updates.dealing

    assert resumed(2) == Dealing(speeds=(1.0, 0.5))
    assert resumed(3) == Dealing()


# In runs


def updates_in(folder: Path, *keys: str) -> list[list[float]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[row[key] for key in keys] for row in rows if "num_tokens" in row]


def tokens_of(folder: Path, rank: int) -> dict[int, int]:
    lines = (folder / f"tokens-{rank}.jsonl").read_text().splitlines()
    return dict(map(json.loads, lines))


def share_of_rank_1(folder: Path, steps: range) -> float:
    """Tokens of rank 1 over those of rank 0."""
    zero, one = (tokens_of(folder, rank) for rank in (0, 1))
    return sum(one[step] for step in steps) / sum(zero[step] for step in steps)


@pytest.mark.slow
def test_a_slow_rank_is_dealt_less_and_nothing_else_changes(bench: Bench, tmp_path: Path) -> None:
    (bench.path / "own.py").write_text(OWN)
    own = bench.path / "own.py"
    values = {
        "loss__function": f"{own}:slow_on_rank_1", "run__after_update": f"{own}:after_update", "eval__every": None,
        "run__max_epochs": 3, "update__tail": "carry", "update__global_batch_size": 12, "parallel__wrapper": "ddp",
        **NO_DROPOUT,
    }  # fmt: skip
    even, measured, stopped = tmp_path / "even", tmp_path / "measured", tmp_path / "stopped"
    said = bench.train(ranks=2, run__folder=even, **values)
    gains = re.findall(r'rank 1 has 0\.\d\d times the speed of the fastest; with update.balance = "measured"', said)
    assert len(gains) == 1
    values["update__balance"] = "measured"
    said = bench.train(ranks=2, run__folder=measured, run__save_every=7, **values)
    first, *_ = re.findall(r"dealt by measured speeds from (\d+) on: rank 1 has 0\.\d\d times the speed", said)
    num_updates = len(updates_in(even))
    assert share_of_rank_1(even, range(1, num_updates + 1)) > 0.7
    assert share_of_rank_1(measured, range(1, int(first))) > 0.7
    assert share_of_rank_1(measured, range(int(first), num_updates + 1)) < 0.6
    saved = json.loads((measured / "checkpoints" / "step-7" / "meta.json").read_text())["dealing"]
    assert saved["speeds"][0] == 1.0
    assert saved["speeds"][1] < 0.7  # 1 / 8, and what the machine does besides

    shutil.copytree(measured, stopped)
    (stopped / "checkpoints" / "latest").write_text("step-7")
    for rank in (0, 1):
        (stopped / f"tokens-{rank}.jsonl").unlink()
    bench.train(ranks=2, run__folder=stopped, run__resume=True, **values)
    assert share_of_rank_1(stopped, range(8, num_updates + 1)) < 0.6
    for folder in (measured, stopped):
        assert updates_in(folder, "num_tokens", "weight") == updates_in(even, "num_tokens", "weight")
        for row, expected in zip(updates_in(folder, *GRADIENT), updates_in(even, *GRADIENT), strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_updates_are_dealt_by_the_cost_that_a_run_measures(bench: Bench, tmp_path: Path, wrapper: str) -> None:
    values = {"eval__every": None, "run__max_epochs": 3, "parallel__wrapper": wrapper, **NO_DROPOUT}
    stated, measured, stopped = tmp_path / "stated", tmp_path / "measured", tmp_path / "stopped"
    bench.train(ranks=2, run__folder=stated, **values)
    bench.train(ranks=2, run__folder=measured, run__save_every=12, update__cost="measure", **values)
    saved = json.loads((measured / "checkpoints" / "step-12" / "meta.json").read_text())["dealing"]
    assert saved["speeds"] is None
    assert all(not number or math.log2(number).is_integer() for number in saved["cost"])
    shutil.copytree(measured, stopped)
    (stopped / "checkpoints" / "latest").write_text("step-12")
    bench.train(ranks=2, run__folder=stopped, run__resume=True, update__cost="measure", **values)
    for folder in (measured, stopped):
        assert updates_in(folder, "num_tokens", "weight") == updates_in(stated, "num_tokens", "weight")
        for row, expected in zip(updates_in(folder, *GRADIENT), updates_in(stated, *GRADIENT), strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_speeds_that_nothing_measures_are_refused(refuse: Callable[..., str]) -> None:
    said = refuse(ranks=2, parallel__wrapper="fsdp2", update__balance="measured")
    assert said.startswith('update.balance is "measured", and the time of each rank is measured under Distributed')


def test_data_ranks_of_a_pipeline_get_samples_of_all_lengths(tmp_path: Path) -> None:
    """Their schedule steps have one shape: groups of similar length would compute a quarter more."""
    for kind in ("plain", "stream"):
        config = config_of(kind, tmp_path)
        config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"pp": 2})})
        data = load(config)
        whole = [[len(sample["input_ids"]) for sample in update] for update in updates_of(config, data=data)]
        shares = [[[len(sample["input_ids"]) for sample in share] for share in updates_of(config, rank, 2, data)]
                  for rank in range(2)]  # fmt: skip
        work = {"dealt": 0, "grouped": 0}
        for lengths, *dealt in zip(whole, *shares, strict=True):
            ranks = deal(np.array(lengths), 2, max_rows=4)
            grouped = [[length for length, rank in zip(lengths, ranks, strict=True) if rank == dealt_to]
                       for dealt_to in range(2)]  # fmt: skip
            for name, ranked in (("dealt", dealt), ("grouped", grouped)):
                steps = plan_steps(ranked, "1F1B", 2, 1, micro_batch_size=4)
                work[name] += sum((step.num_microbatches + 1) * step.rows * step.length for step in steps)
        assert work["grouped"] > 1.1 * work["dealt"]
