"""A reader's budget: the files of the trainer that one update enters, and its depth. The numbers only go down."""

from pathlib import Path

from megabatch.train.config.recipe import load_config
from megabatch.train.context import Callback, Callbacks, RunContext
from megabatch.train.loop import make_update, prepare_run, train
from megabatch.train.runtime.heartbeat import Pulse
from megabatch.train.runtime.ranks import Meeting
from megabatch.train.runtime.signals import Stop
from tests.trace import Trace, trace
from tests.train.conftest import Bench
from tests.train.contexts import ALONE

MOST_FILES, MOST_DEPTH = 6, 14


class TraceUpdates(Callback):
    """Traces an update at the end of a run, three times: one of them writes no waiting rows."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def end(self, context: RunContext) -> None:
        """Make the last samples an update in the middle, at which nothing is evaluated or saved."""
        for _ in range(3):
            context.learner.step = 2
            self.traces.append(trace(lambda: make_update(context, context.batch)))


def traced_update(bench: Bench) -> Trace:
    config = load_config(bench.recipe, ["--run.max_steps=5", "--eval.every=100", "--run.save_every=100"])
    context = prepare_run(config, ALONE, Stop(speaks=False), Pulse(Meeting(), None))
    tracer = TraceUpdates()
    context.callbacks = Callbacks([*context.callbacks.all, tracer])
    train(context)
    return min(tracer.traces, key=lambda found: len(found.files))


def of_trainer(found: Trace) -> list[str]:
    return [file for file in found.files if Path(file).parts[0] == "train"]


def test_an_update_enters_few_files(bench: Bench) -> None:
    found = traced_update(bench)
    assert len(of_trainer(found)) <= MOST_FILES, of_trainer(found)
    assert found.depth <= MOST_DEPTH, str(found)
