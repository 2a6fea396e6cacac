"""Runs with samples that are not finite, from the command line: what they say, write and end with."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.cli import commands as cli
from tests.train.conftest import NO_DROPOUT, Bench, timeless

OWN = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1).double()

def samples(bad=()):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=draw, dtype=torch.float64)
    for index in range(24) if bad == "all" else bad:
        x[index, 0] = float("inf")
    return [{"x": x[index], "y": x[index].sum()} for index in range(24)]

def loss(model, microbatch):
    return (model(microbatch["x"]).squeeze(-1) - 1).square().sum(), len(microbatch["y"])

def with_a_root(model, microbatch):
    total, weight = loss(model, microbatch)
    return total + (0 * model.weight.sum()).sqrt(), weight  # of which the value is 0 and the derivative none

def without_token(model, microbatch):
    from megabatch import losses
    total, weight = losses.next_token(model, microbatch)
    return total * torch.where((microbatch["input_ids"] == ord("7") + 3).any(), float("nan"), 1.0), weight
"""
RECIPE = """
[model]
function = "{folder}/own.py:model"
dtype = "float64"
[loss]
function = "{folder}/own.py:loss"
[data]
function = "{folder}/own.py:samples"
[data.options]
bad = {bad}
[update]
global_batch_size = 6
micro_batch_size = 2
on_nonfinite = "{how}"
[optim]
ema_decay = 0.5
warmup_steps = 4
[eval]
num_samples = 0
[run]
folder = "{folder}/run"
max_epochs = 8
max_steps = 8
tensorboard = false
"""


def train(folder: Path, bad: Any, how: str, *overrides: str) -> int:
    (folder / "own.py").write_text(OWN)
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, bad=json.dumps(bad), how=how))
    return cli.run(["train", str(folder / "recipe.toml"), *overrides])


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def test_skipped_updates_are_rows_lines_and_words(tmp_path, capsys):
    assert train(tmp_path, [5], "skip_update") == 0
    metrics, skipped = (rows(tmp_path, name) for name in ("metrics.jsonl", "skipped.jsonl"))
    assert [row["step"] for row in metrics] == list(range(1, 9))
    bad = [row for row in metrics if "skipped_samples" in row]
    assert [row["step"] for row in bad] == [row["step"] for row in skipped]
    assert len(bad) == 2  # one in each epoch of four updates
    for row, line in zip(bad, skipped, strict=True):
        assert (row["loss"], row["grad_norm"], row["num_samples"], row["skipped_samples"]) == (None, None, 0, 6)
        assert len(line["samples"]) == 6
        assert any(name.startswith("5 of ") for name in line["samples"])
    for before, after in pairwise(metrics):  # the schedule has not moved
        assert (before["lr"] == after["lr"]) == (before in bad)
    said = capsys.readouterr().out
    assert f"warning: update {bad[0]['step']} was skipped: the loss is not finite on data rank 0 of 1" in said
    assert "2 updates not finite and skipped: 12 samples left out (skipped.jsonl)" in said
    assert "data ran out: its last update" not in said


def test_a_run_goes_on_with_what_it_had_left_out(tmp_path, capsys):
    assert train(tmp_path, [5], "skip_update", "--run.max_steps=5", "--run.save_every=2") == 0
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-4")
    whole = {name: rows(tmp_path, name) for name in ("skipped.jsonl", "metrics.jsonl")}
    capsys.readouterr()
    assert cli.run(["train", str(tmp_path / "run"), "--run.max_steps=8"]) == 0
    again = {name: rows(tmp_path, name) for name in whole}
    assert [row["step"] for row in again["metrics.jsonl"]] == list(range(1, 9))
    assert timeless(again["metrics.jsonl"][:5]) == timeless(whole["metrics.jsonl"])
    assert [len(row["samples"]) for row in again["skipped.jsonl"]] == [6, 6]
    assert "2 updates not finite and skipped: 12 samples left out" in capsys.readouterr().out


def test_ten_skipped_updates_in_a_row_are_an_error(tmp_path, capsys):
    assert train(tmp_path, "all", "skip_update", "--run.max_steps=20") == 2
    assert capsys.readouterr().err == (
        "megabatch: 10 updates in a row were skipped, the last of them 10 (the loss is not finite on data rank 0 of 1)"
        ": it is not the samples but the weights; resume from an earlier checkpoint with a lower optim.lr\n"
    )
    assert len(rows(tmp_path, "skipped.jsonl")) == 10


def test_an_update_that_is_not_finite_ends_the_run_unless_it_is_told_not_to(tmp_path, capsys):
    assert train(tmp_path, [5], "raise") == 2
    assert "was not stepped: the loss is not finite on data rank 0 of 1" in capsys.readouterr().err
    assert not (tmp_path / "run" / "skipped.jsonl").exists()


@pytest.mark.parametrize("how", ["raise", "skip_update"])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, capsys, how):
    """Nobody looks at a gradient that is not clipped and whose loss is finite."""
    given = ["--update.max_norm=none", f"--loss.function={tmp_path}/own.py:with_a_root", "--run.save_every=1"]
    status = train(tmp_path, [], how, "--run.max_steps=2", *given)
    said = capsys.readouterr()
    assert not (tmp_path / "run" / "checkpoints" / "step-1").exists() or how == "skip_update"
    if how == "raise":
        assert (status, said.err) == (2, (
            "megabatch: weights are not finite after update 1, and are not saved: with update.max_norm = none no "
            "gradient is checked; set it, or lower optim.lr, and resume from the last checkpoint\n"
        ))  # fmt: skip
    else:
        assert status == 0
        assert "2 updates not finite and skipped" in said.out


@pytest.mark.full
def test_layouts_leave_out_the_same_samples(bench: Bench, tmp_path, capsys):
    """Prompts with a 7 are at fault."""
    (tmp_path / "own.py").write_text(OWN)
    values = {
        "loss__function": f"{tmp_path / 'own.py'}:without_token", "update__on_nonfinite": "skip_update",
        "eval__num_samples": 0, "run__max_steps": 3, "model__config__tie_word_embeddings": "false",
        **NO_DROPOUT,
    }  # fmt: skip
    layouts = {
        "plain": {},
        "fsdp2": {"parallel__wrapper": "fsdp2"},
        "pp": {"parallel__pp": 2},
        "tp": {"parallel__tp": 2},
    }
    found = {}
    for name, keys in layouts.items():
        bench.train(ranks=1 if name == "plain" else 2, run__folder=tmp_path / name, **values, **keys)
        found[name] = [json.loads(line) for line in (tmp_path / name / "skipped.jsonl").read_text().splitlines()]
        left_out = [(row["step"], row["samples"]) for row in found[name]]
        assert left_out == [(row["step"], row["samples"]) for row in found["plain"]]
        assert bench.losses(tmp_path / name) == pytest.approx(bench.losses(tmp_path / "plain"), rel=1e-10)
    assert found["plain"]
