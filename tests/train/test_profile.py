"""A profiler's trace: of the updates that were asked for, whole ones, on the main rank."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from megabatch import GradientAccumulator, Learner, losses
from megabatch.train.context import Callbacks, RunContext
from megabatch.train.loop import make_update
from megabatch.train.records.timing import Profiler
from tests.train.contexts import config_of, context_of
from tests.train.processes import Finished, Run

SAMPLES = [{"inputs": torch.ones(2), "labels": torch.zeros(2)} for _ in range(6)]


def context_with(steps: list[int], folder: Path) -> RunContext:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    learner = Learner(model, optimizer, GradientAccumulator(model, micro_batch_size=2))
    context = context_of(learner, losses.mse, config=config_of(folder, run={"profile_steps": steps}))
    context.callbacks = Callbacks([Profiler(context)])
    return context


def run(context: RunContext, updates: int) -> None:
    with context.exits:
        for _ in range(updates):
            make_update(context, SAMPLES)


def test_it_has_every_microbatch_and_the_step_of_the_updates_asked_for(tmp_path: Path) -> None:
    run(context_with([2, 4, 9], tmp_path), updates=4)
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
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, pathlib\n"
        "from tests.train.test_profile import context_with, run\n"
        "run(context_with([2], pathlib.Path(sys.argv[1])), updates=2)\n"
    )
    assert Run([str(tmp_path)], tmp_path / "logs", 1, script).wait() == [Finished(0, "", "")]
    assert (tmp_path / "profile" / "update-2.txt").exists()


def test_otherwise_nothing_is_written(tmp_path: Path) -> None:
    run(context_with([9], tmp_path), updates=2)
    assert list(tmp_path.iterdir()) == []


def test_an_update_that_fails_leaves_nothing_and_its_error_alone(tmp_path: Path) -> None:
    context, loss_fn = context_with([1, 2], tmp_path), losses.mse
    context.loss_fn = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run(context, updates=1)
    assert list(tmp_path.iterdir()) == []
    context = context_with([1], tmp_path)
    context.loss_fn = loss_fn
    run(context, updates=1)
    assert (tmp_path / "profile" / "update-1.txt").exists()
