"""Weights & Biases, MLflow and trackio, the real ones, without a network: told what TensorBoard is told."""

import contextlib
import importlib.util
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.records.metrics import scalars_of
from tests.train.conftest import Bench
from tests.train.processes import Run, overrides

pytestmark = pytest.mark.slow
NOT_HERE = 'is not installed; pip install "megabatch[trackers]" trackio'
needs = {
    name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} {NOT_HERE}")
    for name in ("wandb", "mlflow", "trackio")
}
BLOCK_BYTES, HEADER_BYTES = 32768, 7  # of a log of LevelDB, in which wandb writes; its own header is as long
Told = dict[str, dict[int, float]]  # number of each step, of each tag


def expected(rows: list[dict[str, Any]]) -> Told:
    """The numbers of a run's rows, in float64."""
    told: Told = {}
    for row in rows:
        for tag, number in scalars_of(row).items():
            told.setdefault(tag, {})[row["step"]] = number
    return told


def records(path: Path) -> Iterator[Any]:
    """The records of a file of wandb's, as its own protocol reads them."""
    from wandb.proto import wandb_internal_pb2

    data, start, piece = path.read_bytes(), HEADER_BYTES, b""
    assert data[:4] == b":W&B"
    while start + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - start % BLOCK_BYTES
        if left < HEADER_BYTES:
            start += left
            continue
        _, length, kind = struct.unpack("<IHB", data[start : start + HEADER_BYTES])
        start += HEADER_BYTES + length
        piece += data[start - length : start]
        if kind in (1, 4):  # whole, or the last of several
            record = wandb_internal_pb2.Record()
            record.ParseFromString(piece)
            yield record
            piece = b""


def told_to_wandb(run: Path) -> tuple[Told, set[str]]:
    """Numbers and ids in all files of a run's folder, in the order in which they were begun."""
    told: Told = {}
    ids: set[str] = set()
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in records(path):
            ids |= {record.run.run_id} if record.HasField("run") else set()
            items = {
                (item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            for tag in [tag for tag in items if not tag.startswith("_")]:
                told.setdefault(tag, {})[record.history.step.num] = items[tag]
    return told, ids


def told_to_mlflow(run_id: str, tags: Iterator[str]) -> dict[str, list[tuple[int, float]]]:
    """Every number that it has of the tags."""
    from mlflow import MlflowClient

    history = {tag: MlflowClient().get_metric_history(run_id, tag) for tag in tags}
    return {tag: sorted((each.step, each.value) for each in found) for tag, found in history.items()}


def told_to_trackio(folder: Path, run: str) -> dict[int, dict[str, float]]:
    """Numbers of each step, as trackio's database has them."""
    (path,) = folder.glob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as database:
        found = database.execute("select step, metrics from metrics where run_name = ? order by id", (run,)).fetchall()
    told: dict[int, dict[str, float]] = {}
    for step, numbers in found:
        told.setdefault(step, {}).update(json.loads(numbers))
    return told


def train(bench: Bench, environ: dict[str, str], *, ranks: int = 1, **values: Any) -> str:
    """Run to a good end with variables of a tracker's own, of which the server of processes knows nothing."""
    script = bench.path / "script.py"
    script.write_text(f"import os\nos.environ |= {environ}\nfrom megabatch.train.cli.commands import main\nmain()\n")
    words = ["train", str(bench.recipe), *overrides({"data__cache": bench.path / "cache", **values})]
    finished = Run(words, bench.path / f"logs{next(bench.names)}", ranks, script).wait()
    assert [each.status for each in finished] == [0] * ranks, "\n".join(each.err for each in finished)
    return finished[0].out


@needs["wandb"]
def test_wandb_is_told_and_a_resumed_run_goes_on(bench: Bench) -> None:
    here = {"environ": {"WANDB_MODE": "offline"}, "tracking__trackers": "wandb", "run__save_every": 2, "ranks": 2}
    train(bench, **here, run__max_steps=4)
    (saved,) = json.loads((bench.folder / "tracking.json").read_text()).values()
    train(bench, **here, run__resume="true")
    told, ids = told_to_wandb(bench.folder)
    assert ids == {saved}
    assert told == expected(bench.rows())
    assert len(told["train/loss"]) == 6


@needs["mlflow"]
def test_mlflow_is_told_each_step_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    environ = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_TRACKING_URI": f"file:{bench.path}/mlruns"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    here = {"environ": environ, "tracking__trackers": "mlflow", "tracking__project": "mine", "run__save_every": 2}
    train(bench, **here, run__max_steps=4)
    (saved,) = json.loads((bench.folder / "tracking.json").read_text()).values()
    (bench.folder / "checkpoints/latest").write_text("step-2\n")  # as a kill before the last checkpoint
    train(bench, **here, run__resume="true")
    wanted = {tag: sorted(numbers.items()) for tag, numbers in expected(bench.rows()).items()}
    told = told_to_mlflow(saved, iter(wanted))
    same = [tag for tag in wanted if "second" not in tag and "memory" not in tag]  # an update made again takes its time
    assert {tag: told[tag] for tag in same} == {tag: wanted[tag] for tag in same}
    assert [step for step, _ in told["train/tokens_per_second"]] == [1, 2, 3, 4, 5, 6]
    run = MlflowClient().get_run(saved)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["update.global_batch_size"] == "8"
    assert [each.name for each in MlflowClient().search_experiments()] == ["mine", "Default"]


@needs["trackio"]
def test_trackio_is_told_and_a_resumed_run_goes_on(bench: Bench) -> None:
    environ = {"TRACKIO_DIR": str(bench.path / "trackio"), "TRACKIO_PROJECT": ""}
    here = {"environ": environ, "tracking__trackers": "trackio", "tracking__project": "mine", "run__save_every": 2}
    train(bench, **here, run__max_steps=4)
    (saved,) = json.loads((bench.folder / "tracking.json").read_text()).values()
    train(bench, **here, run__resume="true")
    rows = told_to_trackio(bench.path / "trackio", saved)
    assert sorted(rows) == list(range(7))
    losses = {row["step"]: row["loss"] for row in bench.rows() if "loss" in row}
    assert {step: row["train/loss"] for step, row in rows.items() if step} == losses


@needs["mlflow"]
def test_a_tracker_that_fails_is_one_warning_and_the_run_is_as_without_it(bench: Bench) -> None:
    bench.train(run__folder=bench.path / "plain")
    environ = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    said = train(bench, environ, tracking__trackers="mlflow")
    warnings = [line for line in said.splitlines() if "mlflow" in line]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: mlflow is left out (MlflowException: API request to http://127.0.0.1:9")
    assert warnings[0].endswith("; the run continues without it")
    assert bench.losses() == bench.losses(bench.path / "plain")


def test_a_tracker_that_is_not_installed_is_one_line_before_the_run(bench: Bench, tmp_path: Path) -> None:
    """In a process whose finder of modules does not find it, as where it is not there."""
    script = tmp_path / "without.py"
    script.write_text(
        "import importlib.util as u, sys\n"
        "import megabatch.train.records.loggers as s\n"
        "s.find_spec = lambda name: None if name == 'wandb' else u.find_spec(name)\n"
        "from megabatch.train.cli.commands import main\n"
        "main()\n"
    )
    words = [
        "train",
        str(bench.recipe),
        *overrides({"tracking__trackers": "wandb", "data__cache": bench.path / "cache"}),
    ]
    finished = Run(words, bench.path / "logs", 2, script).wait()
    assert [each.status for each in finished] == [2, 2]
    assert "".join(each.err for each in finished) == (
        "megabatch: tracking.trackers has 'wandb', which is not installed; pip install wandb, or leave it out\n"
    )
    assert not bench.folder.exists()
