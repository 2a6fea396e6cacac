"""The next update is read and prepared while one runs; what is trained is the same, whatever callbacks do."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch.batching.early_preparation import EarlyPreparation
from megabatch.train.config.recipe import load_config
from megabatch.train.context import Callback, Callbacks, ForwardBackward, RunContext
from megabatch.train.data.updates import Updates
from megabatch.train.loop import prepare_run, train
from megabatch.train.records.timing import LoadingCheck
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal
from tests.train.conftest import Bench
from tests.train.contexts import ALONE
from tests.train.test_updates import config_of, ids_of, updates_of

NUM_UPDATES = 6


class WriteLabels(Callback):
    """Writes to the samples of an update."""

    def before_update(self, context: RunContext) -> None:
        """Ignore a label."""
        for each in context.batch:
            each["labels"][-1] = -100


class OtherSamples(Callback):
    """Trains on other samples than those that were read."""

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Leave half of each sample out."""
        forward_backward([{**each, **{key: each[key][: len(each[key]) // 2] for key in KEYS}} for each in batch])


class Calls(Callback):
    """Makes each update in two calls."""

    splits_updates = True

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Call twice."""
        forward_backward(batch[:2])
        forward_backward(batch[2:])


class WriteByNumpy(WriteLabels):
    """Writes in a way that torch does not see."""

    def before_update(self, context: RunContext) -> None:
        """Ignore a label."""
        for each in context.batch:
            each["labels"].numpy()[-1] = -100


KEYS = ("input_ids", "labels")
OWN = {
    "none": [],
    "writes": [WriteLabels()],
    "by numpy": [WriteByNumpy()],
    "other samples": [OtherSamples()],
    "calls": [Calls()],
}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record, for each preparation that a call takes, if it has succeeded."""
    found: list[bool] = []
    take = EarlyPreparation.take

    def note(self: EarlyPreparation, settings: object) -> Any:
        prepared = take(self, settings)
        found.append(prepared is not None)
        return prepared

    monkeypatch.setattr(EarlyPreparation, "take", note)
    return found


def trained(bench: Bench, folder: str, own: list[Callback], *overrides: str) -> dict[str, torch.Tensor]:
    """The weights of a run."""
    config = load_config(bench.recipe, [f"--run.folder={bench.path / folder}", "--eval.every=100", *overrides])
    context = prepare_run(config, ALONE, StopSignal(speaks=False), Heartbeat(Rendezvous(), None))
    context.callbacks = Callbacks([*own, *context.callbacks.all])
    train(context)
    assert context.step == NUM_UPDATES
    return {name: each.detach().clone() for name, each in context.model.base.named_parameters()}


@pytest.mark.parametrize("own", OWN)
def test_what_is_trained_is_the_same(own: str, bench: Bench, taken: list[bool], monkeypatch) -> None:
    found = trained(bench, "ahead", OWN[own])
    assert taken == [True] * (NUM_UPDATES - 1 if own == "none" else 0)
    monkeypatch.setattr(Updates, "may_read_ahead", False)
    expected = trained(bench, "not ahead", OWN[own])
    assert len(taken) == (NUM_UPDATES - 1 if own == "none" else 0)
    assert all(torch.equal(each, found[name]) for name, each in expected.items())


@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_a_state_is_of_what_was_handed_out(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, tmp_path)
    expected = [ids_of(update) for update in updates_of(config)]
    updates, found = updates_of(config), []
    for update in updates:
        state, size, names = updates.state_dict(), updates.size, updates.names
        following = updates.read_ahead()
        assert following is updates.read_ahead() or not following
        found.append(ids_of(update))
        assert ids_of(following) == (expected[len(found)] if len(found) < len(expected) else [])
        assert (updates.state_dict(), updates.size, updates.names) == (state, size, names)
        resumed = updates_of(config)
        resumed.load_state_dict(state)
        assert ids_of(resumed.peek()) == ids_of(following)
    assert found == expected


def test_an_error_is_raised_when_its_update_is_handed_out(tmp_path: Path) -> None:
    def broken() -> Iterator[Any]:
        raise OSError("the disk is gone")
        yield

    updates = updates_of(config_of("plain", tmp_path))
    running = iter(updates)
    next(running)
    state, updates._rest = updates.state_dict(), broken()
    assert updates.read_ahead() == []
    assert updates.state_dict() == state
    with pytest.raises(OSError, match="the disk is gone"):
        next(running)


SLOW = """
import time, torch

class Samples:
    def __len__(self):
        return 60
    def __getitem__(self, index):
        time.sleep(SECONDS)
        ids = torch.arange(20) % 50
        return {"input_ids": ids, "labels": ids}

def samples():
    return Samples()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "is_told"), [(0.05, True), (0.0, False)])
def test_reading_that_costs_is_told_once_with_its_key(seconds: float, is_told: bool, bench: Bench) -> None:
    own = bench.path / "slow.py"
    own.write_text(SLOW.replace("SECONDS", str(seconds)))
    without = [line for line in bench.recipe.read_text().splitlines() if not line.startswith(("source =", "path ="))]
    bench.recipe.write_text("\n".join(without))
    values = {"data__function": f"{own}:samples", "eval__num_samples": 0}
    (finished,) = bench.finish(**values, run__max_steps=6, optim__schedule="constant")
    assert finished.status == 0, finished.err
    told = [line for line in (finished.out + finished.err).splitlines() if "data.num_workers = 2" in line]
    assert len(told) == is_told, told
    if is_told:
        assert re.search(r"nothing was computed in [4-9]\d% of 4 updates, while samples were read; data", told[0])


@pytest.mark.parametrize(
    ("keys", "is_timed"), [([], True), (["--data.num_workers=1"], False), (["--data.look_ahead=1"], False)]
)
def test_what_others_read_is_not_timed(keys: list[str], is_timed: bool, bench: Bench) -> None:
    config = load_config(bench.recipe, keys)
    context = prepare_run(config, ALONE, StopSignal(speaks=False), Heartbeat(Rendezvous(), None))
    assert any(isinstance(each, LoadingCheck) for each in context.callbacks.all) == is_timed


def test_samples_of_a_function_are_read_in_their_turn(tmp_path: Path) -> None:
    """Its samples may depend on what a callback did after the update before."""
    assert not updates_of(config_of("function", tmp_path)).may_read_ahead
    assert updates_of(config_of("function", tmp_path, data={"num_workers": 1})).may_read_ahead
    assert updates_of(config_of("plain", tmp_path)).may_read_ahead
