"""A profiler's trace: of the updates that were asked for, whole ones, on the main rank."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch import GradientAccumulator, losses
from megabatch.train.callbacks.profiler import Profiler

ROOT = Path(__file__).parents[2]
SAMPLES = [{"inputs": torch.ones(2), "labels": torch.zeros(2)} for _ in range(6)]


def run(profiler: Profiler, updates: int) -> None:
    model = nn.Linear(2, 2)
    accumulator = GradientAccumulator(model, micro_batch_size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, updates + 1):
        with profiler.update(step):
            accumulator.forward_backward(SAMPLES, losses.mse)
            accumulator.finalize()
            optimizer.step()


def test_it_has_every_microbatch_and_the_step_of_the_updates_asked_for(tmp_path: Path) -> None:
    run(Profiler([2, 4, 9], tmp_path, enabled=True), updates=4)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["update-2.json.gz", "update-2.txt", "update-4.json.gz", "update-4.txt"]
    for step in (2, 4):
        with gzip.open(tmp_path / "profile" / f"update-{step}.json.gz", "rt") as file:
            traced = [event.get("name", "") for event in json.load(file)["traceEvents"]]
        assert traced.count("aten::linear") == 3
        assert any(name.startswith("Optimizer.step#SGD") for name in traced)
        table = (tmp_path / "profile" / f"update-{step}.txt").read_text()
        assert "aten::" in table
        assert "Self CPU" in table


def test_it_prints_nothing(tmp_path: Path) -> None:
    """In a process of its own: what torch's profiler prints is settled by the first profile of a process."""
    line = "import sys, pathlib; from tests.train.test_profile import *; "
    line += "run(Profiler([2], pathlib.Path(sys.argv[1]), enabled=True), updates=2)"
    done = subprocess.run([sys.executable, "-c", line, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "profile" / "update-2.txt").exists()


@pytest.mark.parametrize(("steps", "enabled"), [([], True), ([1, 2], False), ([9], True)])
def test_otherwise_nothing_is_written(tmp_path: Path, steps: list[int], enabled: bool) -> None:
    run(Profiler(steps, tmp_path, enabled=enabled), updates=2)
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_fails_leaves_nothing_and_its_error_alone(tmp_path: Path) -> None:
    profiler = Profiler([1, 2], tmp_path, enabled=True)
    with pytest.raises(ZeroDivisionError), profiler.update(1):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with profiler.update(2):
        torch.ones(2).sum()
    assert (tmp_path / "profile" / "update-2.txt").exists()
