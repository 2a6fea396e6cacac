"""A reader's budget: the files of the trainer that one update enters, and its depth.

A larger number needs a reason in the commit.
"""

from pathlib import Path

import pytest

from megabatch.train import loop
from megabatch.train.config.recipe import load_config
from megabatch.train.context import Callback, Callbacks, RunContext
from megabatch.train.loop import make_update, prepare_run, train
from megabatch.train.runtime import console
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal
from tests.trace import Trace, trace
from tests.train.conftest import Bench
from tests.train.contexts import ALONE

MOST_FILES, MOST_DEPTH = 8, 17


class TraceUpdates(Callback):
    """Traces an update at the end of a run."""

    def end(self, context: RunContext) -> None:
        """Make the last samples an update in the middle, at which nothing is evaluated or saved."""
        context.learner.step = 2
        self.found = trace(lambda: make_update(context, context.batch))


def traced_update(bench: Bench) -> Trace:
    config = load_config(
        bench.recipe, ["--run.max_steps=5", "--eval.every=100", "--run.save_every=100", "--model.config.resid_pdrop=0"]
    )
    context = prepare_run(config, ALONE, StopSignal(speaks=False), Heartbeat(Rendezvous(), None))
    tracer = TraceUpdates()
    context.callbacks = Callbacks([*context.callbacks.all, tracer])
    train(context)
    return tracer.found


def of_trainer(found: Trace) -> list[str]:
    return [file for file in found.files if Path(file).parts[0] == "train"]


def test_an_update_enters_few_files(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows wait to be written together: this update writes none."""
    for module in (console, loop):
        monkeypatch.setattr(module, "SECONDS_BETWEEN_WRITES", 1e9)
    found = traced_update(bench)
    assert len(of_trainer(found)) <= MOST_FILES, of_trainer(found)
    assert found.depth <= MOST_DEPTH, str(found)
