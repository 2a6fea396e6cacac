"""`update.shapes` and `update.cost` of a run: the same weights but for rounding, as many graphs, and a resumed run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megabatch import MegabatchError, losses
from megabatch.autotune.shapes_planner import check_loss
from megabatch.train.callbacks.checkpointing import GradientState
from megabatch.train.checkpoints.metadata import read_meta
from megabatch.train.checkpoints.retention import Checkpoints
from megabatch.train.config.recipe import load_config
from megabatch.train.context import Callback, Callbacks, RunContext
from megabatch.train.loop import prepare_run, train
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.plugins import in_place_of
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal
from tests.train.conftest import NO_DROPOUT, Bench
from tests.train.contexts import ALONE
from tests.train.planning import plan
from tests.train.processes import overrides

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # torch's own use
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
NUM_UPDATES, NUM_SHAPES = 6, 3
SHAPES = {"update__shapes": NUM_SHAPES, "model__compile": True, **NO_DROPOUT}
LATER = {**NO_DROPOUT, "optim__schedule": "constant"}  # and a run that may have more epochs
COST = {"update__cost": "measure", **LATER}


class Shapes(Callback):
    """Notes the shapes that microbatches had."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def after_update(self, context: RunContext) -> None:
        """Look at the plan that was run."""
        self.seen |= set(context.plan.shapes.values())


def run(bench: Bench, folder: str, **values: Any) -> RunContext:
    """A finished run in this process."""
    given = {"run__folder": bench.path / folder, "eval__num_samples": 5, **values}
    config = load_config(bench.recipe, overrides(given))
    context = prepare_run(config, ALONE, StopSignal(speaks=False), Heartbeat(Rendezvous(), None))
    context.callbacks = Callbacks([Shapes(), *context.callbacks.all])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    train(context)
    return context


def weights_of(context: RunContext) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in context.model.base.named_parameters()}


def assert_close(found: RunContext, expected: RunContext) -> None:
    one, other = weights_of(found), weights_of(expected)
    assert one.keys() == other.keys()
    for name, each in one.items():
        torch.testing.assert_close(each, other[name], rtol=1e-9, atol=1e-11)


def kept(context: RunContext) -> Any:
    """What the last checkpoint has of the accumulator."""
    return read_meta(Checkpoints(context.folder).latest_valid(ALONE).path)["gradient"]


@pytest.mark.usefixtures("in_float64")
def test_a_run_chooses_its_shapes_in_the_first_update(bench: Bench) -> None:
    with torch.compiler.set_stance("force_eager"):
        plain, filled = (
            run(bench, name, **keys, run__max_steps=2) for name, keys in (("plain", NO_DROPOUT), ("filled", SHAPES))
        )
    assert_close(filled, plain)
    assert len(kept(filled)["shapes"]) == NUM_SHAPES


@pytest.mark.slow
def test_as_many_graphs_as_shapes_and_the_same_weights(bench: Bench, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    plain = run(bench, "plain", **NO_DROPOUT)
    filled = run(bench, "filled", **SHAPES)
    assert filled.step == plain.step == NUM_UPDATES
    assert_close(filled, plain)
    chosen = kept(filled)["shapes"]
    assert len(chosen) == NUM_SHAPES
    seen = next(each.seen for each in filled.callbacks.all if isinstance(each, Shapes))
    assert seen == set(map(tuple, chosen))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == NUM_SHAPES, "layers share their graphs"


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_a_resumed_run_has_the_shapes_of_the_checkpoint(bench: Bench, monkeypatch) -> None:
    with torch.compiler.set_stance("force_eager"):
        whole = run(bench, "whole", **SHAPES)
        run(bench, "parts", **SHAPES, run__max_steps=2)
        resumed = run(bench, "parts", **SHAPES, run__resume=True)
    assert bench.losses(resumed.folder) == bench.losses(whole.folder), "the same bits"
    assert kept(resumed) == kept(whole)
    assert all(map(torch.equal, weights_of(resumed).values(), weights_of(whole).values()))
    # Planted: a checkpoint without them. The next update chooses others.
    monkeypatch.setattr(GradientState, "load_state_dict", lambda *_: None)
    with torch.compiler.set_stance("force_eager"):
        run(bench, "planted", **SHAPES, run__max_steps=2)
        planted = run(bench, "planted", **SHAPES, run__resume=True)
    assert kept(planted) != kept(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_a_resumed_run_measures_on_from_the_cost_of_the_checkpoint(bench: Bench, monkeypatch) -> None:
    plain, whole = run(bench, "plain", **LATER), run(bench, "measured", **COST)
    assert_close(whole, plain)
    cost = kept(whole)["cost"]
    assert cost["seconds_per_microbatch"] > 0
    given: list[Any] = []
    load = GradientState.load_state_dict

    def note(self: GradientState, state: dict[str, Any]) -> None:
        load(self, state)
        given.append(self._learner.gradient.cost)

    monkeypatch.setattr(GradientState, "load_state_dict", note)
    resumed = run(bench, "measured", **COST, run__resume=True, run__max_epochs=2)
    assert given[0].seconds_per_microbatch == cost["seconds_per_microbatch"]
    assert resumed.learner.gradient.cost is not None
    # A run without the key resumes without a cost, and one that gets it measures from then on.
    without = run(bench, "measured", **LATER, run__resume=True, run__max_epochs=3)
    assert without.learner.gradient.cost is None
    assert run(bench, "measured", **COST, run__resume=True, run__max_epochs=4).learner.gradient.cost is not None


@pytest.mark.slow
def test_losses_of_the_trainer_are_known_by_what_they_stand_for() -> None:
    def own(model: Any, microbatch: Any) -> Any:
        return losses.next_token(model, microbatch)

    wrapped = in_place_of(losses.next_token, in_place_of(losses.next_token, losses.next_token))
    own.__wrapped__ = losses.next_token  # pyright: ignore[reportFunctionMemberAccess]
    for known in (losses.next_token, losses.classification, in_place_of(losses.next_token, losses.next_token), wrapped):
        check_loss(known)
    for unknown in (own, in_place_of(losses.next_token, own), losses.mse, in_place_of(losses.mse, losses.mse)):
        with pytest.raises(MegabatchError, match="known to leave them out"):
            check_loss(unknown)


@pytest.mark.slow
def test_a_plan_counts_no_tokens_that_fill_up(bench: Bench) -> None:
    with pytest.raises(MegabatchError, match=r"update\.shapes is 3, and the plan does not count"):
        plan(bench.recipe, ["--update.shapes=3", "--model.compile=true"])
    (best, *_) = plan(bench.recipe, ["--length=160", "--update.cost=measure", "--json"])
    assert json.loads(json.dumps(best.as_json()))["fits"] == "yes"
