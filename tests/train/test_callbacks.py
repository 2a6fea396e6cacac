"""Callbacks: who is called, in which order, and callbacks of one's own in a run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megabatch import MegabatchError
from megabatch.train import Callback, RunContext
from megabatch.train.callbacks.order import load_callback
from megabatch.train.config.recipe import load_config
from megabatch.train.context import Callbacks
from megabatch.train.loop import prepare_run, surround_backward, train
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal
from tests.train.conftest import Bench
from tests.train.contexts import ALONE

GUIDE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
OWN = """
from megabatch.train import Callback

class Fails(Callback):
    def after_update(self, context):
        raise ValueError("of my own")

def number():
    return 3

def make():
    return Fails()
"""


class Around(Callback):
    def __init__(self, name: str, calls: list[str], num_parts: int = 1) -> None:
        self._name, self._calls, self._num_parts = name, calls, num_parts

    def around_backward(self, context: Any, batch: Any, forward_backward: Any) -> None:
        self._calls.append(f"{self._name} begins")
        for _ in range(self._num_parts):
            forward_backward(batch)
        self._calls.append(f"{self._name} ends")


class AtEnd(Callback):
    def end(self, context: RunContext) -> None: ...


def test_an_event_holds_the_callbacks_that_override_it() -> None:
    around, end = Around("a", []), AtEnd()
    callbacks = Callbacks([around, Callback(), end])
    assert (callbacks.around_backward, callbacks.end) == ([around], [end])
    assert callbacks.start == callbacks.before_update == callbacks.after_update == callbacks.after_evaluation == []
    assert callbacks.without(around).around_backward == []


def test_the_last_callback_surrounds_the_others() -> None:
    calls: list[str] = []
    callbacks = Callbacks([Around("inner", calls), Around("outer", calls)])
    context: Any = SimpleNamespace(
        callbacks=callbacks, num_calls=1, forward_backward=lambda batch: calls.append(f"call {batch}")
    )
    surround_backward(context, [1])
    assert calls == ["outer begins", "inner begins", "call [1]", "inner ends", "outer ends"]


def test_an_update_in_parts_of_ones_own_is_refused() -> None:
    callbacks = Callbacks([Around("parts", [], num_parts=2)])
    context: Any = SimpleNamespace(callbacks=callbacks, num_calls=2, step=0, forward_backward=lambda batch: None)
    with pytest.raises(MegabatchError, match="called forward_backward 2 times in update 1; call it once"):
        surround_backward(context, [1])


def run_with(bench: Bench, name: str) -> RunContext:
    bench.recipe.write_text(f'{bench.recipe.read_text()}callbacks = ["{name}"]\n')
    config = load_config(bench.recipe, ["--run.max_steps=3", f"--data.cache={bench.path / 'cache'}"])
    context = prepare_run(config, ALONE, StopSignal(speaks=False), Heartbeat(Rendezvous(), None))
    train(context)
    return context


def test_the_callback_of_the_guide_stops_a_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [
        each for each in re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE) if "Callback" in each
    ]
    (bench.path / "mine.py").write_text(block.replace("< 2.0", "< 99"))
    context = run_with(bench, f"{bench.path / 'mine.py'}:StopWhenLow")
    said = capsys.readouterr().out
    assert re.search(r"^update 1: \d+\.\d{3} s, loss \d+\.\d+$", said, re.MULTILINE)
    assert "stopped after update 1: a callback has asked for it" in said
    assert context.step == 1
    assert (bench.folder / "checkpoints" / "step-1").is_dir()  # evaluated and saved as at any end
    assert [row["step"] for row in bench.rows() if "set" in row] == [0, 1]


def test_what_ones_own_callback_raises_is_one_line(bench: Bench) -> None:
    (bench.path / "own_callbacks.py").write_text(OWN)
    for name in ("Fails", "make"):
        callback = load_callback(f"{bench.path / 'own_callbacks.py'}:{name}")
        context: Any = SimpleNamespace()
        with pytest.raises(MegabatchError, match=r"run.callbacks '.*' raised ValueError: of my own \(.*, line 6\)"):
            callback.after_update(context)
    with pytest.raises(MegabatchError, match=r"made a int; name a subclass of megabatch.train.Callback"):
        load_callback(f"{bench.path / 'own_callbacks.py'}:number")
