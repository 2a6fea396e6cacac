"""Early stopping: the best evaluation, the end, and a resumed run that decides as one that was never stopped."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megabatch import GradientAccumulator, Learner, losses
from megabatch.train.callbacks.evaluation import BestLossTracker, EarlyStopping
from megabatch.train.config import EvalConfig
from tests.train.contexts import config_of, context_of
from tests.unit.failures.table import line_of


def seen(losses: list[float | None], **config: Any) -> tuple[list[bool], list[bool]]:
    """For each evaluation, one an update: True if it is the best, and True if the run stops after it."""
    watch = BestLossTracker(EvalConfig(every=1, **config), ["held-out"])
    best, stop = [], []
    for step, loss in enumerate(losses):
        watch.update(step, loss)
        best.append(watch.best_step == step)
        stop.append(watch.should_stop)
    return best, stop


def test_the_lowest_loss_is_best_and_its_equal_is_not() -> None:
    best, stop = seen([3.0, 2.0, 2.0, 2.5, 1.0])
    assert best == [True, True, False, False, True]
    assert stop == [False] * 5


def test_patience_counts_evaluations_since_the_best() -> None:
    _, stop = seen([3.0, 4.0, 2.0, 2.0, 5.0, 2.5], patience=3)
    assert stop == [False, False, False, False, False, True]


def test_no_number_is_never_the_best() -> None:
    best, stop = seen([None, float("nan"), float("inf"), 9.0, float("-inf"), float("nan")], patience=2)
    assert best == [False, False, False, True, False, False]
    assert stop == [False, True, True, False, False, True]


@given(
    losses=st.lists(st.one_of(st.none(), st.floats(0, 9), st.just(float("nan"))), min_size=2, max_size=12),
    cut=st.integers(0, 11),
    patience=st.integers(1, 4),
)
def test_a_resumed_run_decides_the_same(losses: list[float | None], cut: int, patience: int) -> None:
    config = EvalConfig(every=2, patience=patience)
    whole, before, after = (BestLossTracker(config, ["held-out"]) for _ in range(3))
    cut = min(cut, len(losses))
    expected = []
    for turn, loss in enumerate(losses):
        whole.update(2 * turn, loss)
        expected.append((whole.should_stop, whole.best, whole.best_step))
    for turn in range(cut):
        before.update(2 * turn, losses[turn])
    before.update(2 * cut - 1, -1.0)  # the last of a run that stopped out of turn
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    found = []
    for turn in range(cut, len(losses)):
        after.update(2 * turn, losses[turn])
        found.append((after.should_stop, after.best, after.best_step))
    assert found == expected[cut:]


def test_the_last_evaluation_of_a_run_can_be_the_best_of_it() -> None:
    watch = BestLossTracker(EvalConfig(every=5), ["held-out"])
    watch.update(5, 2.0)
    watch.update(7, 1.0)
    assert (watch.best, watch.best_step) == (1.0, 7)
    assert watch.state_dict() == {"set": "held-out", "best": 2.0, "best_step": 5, "num_worse": 0}


@pytest.mark.parametrize(("watch", "names", "expected"), [
    (None, ["code", "held-out"], "held-out"),
    (None, ["code", "prose"], "code"),
    (None, [], None),
    ("prose", ["code", "prose", "held-out"], "prose"),
])  # fmt: skip
def test_the_set_is_the_one_asked_for_or_the_held_out_one_or_the_first(
    watch: str | None, names: list[str], expected: str | None
) -> None:
    assert BestLossTracker(EvalConfig(watch=watch), names).name == expected


def test_only_the_watched_set_counts() -> None:
    model = torch.nn.Linear(1, 1)
    learner = Learner(model, torch.optim.SGD(model.parameters()), GradientAccumulator(model, micro_batch_size=1))
    context = context_of(learner, losses.mse, config=config_of(eval={"watch": "code", "every": 1, "patience": 2}))
    context.data.sets.update({"code": [], "prose": []})
    early_stopping = EarlyStopping(context)
    for learner.step, losses_of_sets in enumerate([(2.0, 9.0), (1.0, 0.1), (3.0, 0.2), (4.0, 0.3)]):
        for name, loss in zip(("code", "prose"), losses_of_sets, strict=True):
            context.row = {"set": name, "eval_loss": loss}
            early_stopping.after_evaluation(context)
        assert context.should_stop == (learner.step == 3)
    assert (context.best.set, context.best.loss, context.best.step) == ("code", 1.0, 1)


def test_another_set_begins_anew() -> None:
    one, other = (
        BestLossTracker(EvalConfig(watch="code"), ["code", "prose"]),
        BestLossTracker(EvalConfig(watch="prose"), ["code", "prose"]),
    )
    one.update(0, 1.0)
    other.load_state_dict(one.state_dict())
    assert other.best is None


@pytest.mark.parametrize(("config", "names", "line"), [
    ({"watch": "cod"}, ["prose", "code"], "eval.watch is 'cod', which is no evaluation set; the nearest of the sets is "
     "code"),
    ({"watch": "code"}, [], "eval.watch is 'code', which is no evaluation set; there is no set: see "),
    ({"patience": 2}, [], "eval.patience is set and there is no evaluation set; set eval.num_samples or eval.sets"),
    ({"patience": 2, "every": None}, ["held-out"], "eval.patience is set and eval.every is not, so no evaluation "),
])  # fmt: skip
def test_a_mistake_is_one_line(config: dict[str, Any], names: list[str], line: str) -> None:
    assert line_of(lambda: BestLossTracker(EvalConfig(**config), names)).startswith(line)
