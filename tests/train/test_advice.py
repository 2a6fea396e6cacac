"""Updates that are measured, in runs: the same updates, the same numbers on any ranks and wherever a run is stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.callbacks.noise_scale import NOISE, SCALE, SIGNAL
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.test_metrics import events
from tests.train.test_resume import timeless

pytestmark = pytest.mark.slow

Refuse = Callable[..., str]
EVERY: dict[str, Any] = {"advice__every": 2, "run__max_epochs": 2}  # six updates of twelve
UNWEIGHED = """
from megabatch import losses

def next_token(model, microbatch):
    return losses.next_token(model, microbatch)
"""
TWO_TERMS = """
import megabatch
from megabatch import losses

def weights(microbatch):
    weight = (microbatch["labels"][:, 1:] != -100).sum()
    return {"one": weight, "other": weight}

@megabatch.loss(weigh=weights)
def loss(model, microbatch):
    pair = losses.next_token(model, microbatch)
    return {"one": pair, "other": pair}
"""


def measured(rows: list[dict[str, Any]]) -> list[float]:
    """The numbers of the updates that were measured."""
    return [row[key] for row in rows if NOISE in row for key in (NOISE, SIGNAL)]


def test_measured_updates_are_the_same_updates(bench: Bench, tmp_path: Path) -> None:
    """Without them and with them, with a loss that does not tell its weight before, and where nothing is clipped."""
    plain, unweighed, unclipped = (tmp_path / name for name in ("plain", "unweighed", "unclipped"))
    bench.train(run__folder=plain, run__max_epochs=2, **NO_DROPOUT)
    said = bench.train(**EVERY, **NO_DROPOUT)
    assert "plan  the gradient's noise is measured every 2 updates (advice.every)" in said
    assert bench.losses() == pytest.approx(bench.losses(plain), rel=1e-10)
    rows = [row for row in bench.rows() if "loss" in row]
    assert [row["step"] for row in rows if NOISE in row] == [2, 4, 6, 8, 10, 12]
    assert not any(key in row for row in bench.rows(plain) for key in (NOISE, SIGNAL, SCALE))
    assert said.count("measurements of their noise (docs/batch-size.md)") == 0  # the last three are too few
    assert [value for _, value in events(bench.folder)[f"train/{NOISE}"]] == pytest.approx(
        measured(rows)[::2], rel=1e-6
    )
    (tmp_path / "own.py").write_text(UNWEIGHED)
    own = f"{tmp_path}/own.py:next_token"
    bench.train(run__folder=unweighed, run__max_steps=4, loss__function=own, **EVERY, **NO_DROPOUT)
    assert measured(bench.rows(unweighed)) == pytest.approx(measured(rows)[:4], rel=1e-8)
    bench.train(run__folder=unclipped, run__max_steps=2, update__max_norm="none", **EVERY, **NO_DROPOUT)
    first, second = (row for row in bench.rows(unclipped) if "loss" in row)
    assert first["grad_norm"] is None
    assert second["grad_norm"] is not None


def test_a_stopped_run_measures_as_if_never_stopped(bench: Bench, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    often = {"advice__every": 1, "run__max_epochs": 2}
    said = bench.train(run__folder=whole, **often)
    for last in (3, 5, None):
        stop = {} if last is None else {"run__max_steps": last}
        told = bench.train(run__resume=last != 3, **stop, **often)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    lines = [line for line in said.splitlines() if "gradients agree" in line or line.startswith("updates ")]
    assert len(lines) == 2
    assert lines == [line for line in told.splitlines() if "gradients agree" in line or line.startswith("updates ")]


@pytest.mark.parametrize(
    ("ranks", "wrapper"),
    [(2, {"wrapper": "ddp"}), (3, {"wrapper": "fsdp2"}), (4, {"wrapper": "fsdp2", "dp_replicate": 2, "dp_shard": 2})],
    ids=["ddp", "fsdp2", "hsdp"],
)
def test_ranks_measure_what_one_does(bench: Bench, tmp_path: Path, ranks: int, wrapper: dict[str, Any]) -> None:
    alone = tmp_path / "alone"
    bench.train(run__folder=alone, run__max_steps=4, **EVERY, **NO_DROPOUT)
    parallel = {f"parallel__{key}": value for key, value in wrapper.items()}
    bench.train(ranks=ranks, run__max_steps=4, **parallel, **EVERY, **NO_DROPOUT)
    assert len(measured(bench.rows())) == 4
    assert measured(bench.rows()) == pytest.approx(measured(bench.rows(alone)), rel=1e-8)
    assert bench.losses() == pytest.approx(bench.losses(alone), rel=1e-10)


def test_what_cannot_be_measured_is_refused(bench: Bench, refuse: Refuse, tmp_path: Path) -> None:
    said = "advice.every is 2 and {}; leave one of them out"
    refusals = {
        "checkpoint.partial is True, which makes the calls of an update itself": {"checkpoint__partial": "true"},
        "update.on_nonfinite is skip_microbatch, which makes an update again of some of its samples": {
            "update__on_nonfinite": "skip_microbatch"
        },
        "model.dtype is bfloat16, in which a norm has two digits": {"model__dtype": "bfloat16"},
    }
    for text, values in refusals.items():
        assert refuse(advice__every=2, **values) == said.format(text)
    assert "parallel.tp is 2, whose ranks hold" in refuse(ranks=2, advice__every=2, parallel__tp=2)
    (tmp_path / "terms.py").write_text(TWO_TERMS)
    finished = bench.finish(advice__every=2, loss__function=f"{tmp_path}/terms.py:loss")
    assert [(each.status, each.err) for each in finished] == [
        (
            2,
            "megabatch: advice.every is set and the loss has the terms one, other, each with a weight of its own, of "
            "which the gradient has no one noise scale; leave advice.every out\n",
        )
    ]
