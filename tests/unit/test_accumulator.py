"""GradientAccumulator in one process: the gradient of an update, to the bit, however it is cut and called."""

import copy
import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megabatch import CostModel, GradientAccumulator, MegabatchError, PlanError
from megabatch.core.right_padding import pad_right
from megabatch.errors import MicrobatchLimit
from megabatch.planning.limits import TunedLimit
from tests.unit.small import expected, gradients, model_of_integers, same_bits, samples, squares, weighed

TARGETS = [3, 1, 0, 5, 2, 4, 1]  # 16 of them: dividing by a power of two rounds nothing
BATCH = samples(TARGETS)
BOUNDS = [
    {"micro_batch_size": 1}, {"micro_batch_size": 3}, {"micro_batch_size": 99}, {"max_microbatch_tokens": 7},
    {"max_microbatch_tokens": 16},
]  # fmt: skip


def run(batch, loss_fn=weighed, *, finalize=None, model=None, **bound):
    """One update of one call, and the model that now has its gradient."""
    model = model_of_integers() if model is None else model
    gradient = GradientAccumulator(model, **bound or {"micro_batch_size": 2})
    gradient.forward_backward(batch, loss_fn)
    return gradient.finalize(**finalize or {}), model


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("loss_fn", [squares, weighed])
def test_any_cut_gives_the_same_bits(bound, loss_fn):
    update, model = run(BATCH, loss_fn, **bound)
    assert same_bits(gradients(model), expected(model, BATCH))
    assert (update.num_samples, update.num_tokens, float(update.weight)) == (7, 16 + 2 * 7, 16)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, 9), st.sampled_from([squares, weighed]))
def test_any_update_gives_the_same_bits(targets, micro_batch_size, loss_fn):
    whole = sum(targets)
    batch = samples([*targets, (1 << whole.bit_length()) - whole])  # brings their number to a power of two
    _, model = run(batch, loss_fn, micro_batch_size=micro_batch_size)
    assert same_bits(gradients(model), expected(model, batch))


@pytest.mark.parametrize("batch", [[], samples([0, 0, 0])])
@pytest.mark.parametrize("loss_fn", [squares, weighed])
def test_an_update_without_weight_leaves_no_gradient(batch, loss_fn):
    update, model = run(batch, loss_fn, finalize={"max_norm": 1.0})
    assert gradients(model) == [None, None, None]
    assert (bool(update.finite), float(update.weight), update.problem()) == (False, 0, None)
    assert update.num_samples == len(batch)


def test_plan_runs_nothing():
    model = model_of_integers()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(BATCH, weighed)
    used, before = gradient.last_plan, [None if each is None else each.clone() for each in gradients(model)]
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    plan = gradient.plan(BATCH[:3])
    assert plan.lengths == (5, 3, 2)
    assert plan.microbatches == ((0,), (1, 2))  # the longest on its own: less padding
    assert (plan.sync, plan.reason) == ("last", "one rank, nothing to reduce")
    assert gradient.last_plan is used
    assert same_bits(gradients(model), before)


class BreaksAt:
    """A loss that raises at its n-th microbatch."""

    def __init__(self, microbatch: int) -> None:
        self.left = microbatch

    def __call__(self, model, microbatch):
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("the loss broke")
        return squares(model, microbatch)


@pytest.mark.parametrize("breaks_at", range(4))
@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_loss_that_raises_leaves_nothing_behind(breaks_at, calls_before):
    model = model_of_integers()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    for _ in range(calls_before):
        gradient.forward_backward(BATCH, squares)
    with pytest.raises(ArithmeticError, match="the loss broke"):
        gradient.forward_backward(BATCH, BreaksAt(breaks_at))
    assert gradients(model) == [None, None, None]
    if calls_before:  # what they gave is lost, and nobody is to go on without it
        for verb in (lambda: gradient.forward_backward(BATCH, weighed), gradient.finalize):
            with pytest.raises(MegabatchError, match="an update was lost"):
                verb()
    gradient.forward_backward(BATCH, weighed)
    assert float(gradient.finalize().weight) == 16
    assert same_bits(gradients(model), expected(model, BATCH))


def test_a_batch_that_is_refused_leaves_the_open_update_as_it_was():
    """Nothing of it has run: the caller may leave it out and go on."""
    model = model_of_integers()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(BATCH, squares)
    with pytest.raises(PlanError):
        gradient.forward_backward([BATCH[0], {}], squares)
    gradient.finalize()
    assert same_bits(gradients(model), expected(model, BATCH))


def test_random_numbers_are_drawn_as_in_a_plain_loop():
    """The library draws none of its own, so dropout is that of a plain loop over the same microbatches."""
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(2, 1).double())
    other = copy.deepcopy(model)
    gradient = GradientAccumulator(model, micro_batch_size=2)
    torch.manual_seed(3)
    gradient.forward_backward(BATCH, weighed)
    gradient.finalize()
    torch.manual_seed(3)
    for rows in gradient.last_plan.microbatches:
        total, _ = squares(other, pad_right([BATCH[row] for row in rows]))
        (total / 16).backward()
    assert same_bits(gradients(model), gradients(other))


@pytest.mark.parametrize(
    ("changed", "text"),
    [({"cost": {"seconds_per_token": 1.0}}, "expected a CostModel"), ({"max_microbatch_tokens": 57.5}, "57.5")],
)
def test_a_tuned_limit_from_a_file_is_checked(changed, text):
    fit = TunedLimit(64, CostModel(), 9, (), 2.0**30, 2.0**30)
    with pytest.raises(PlanError, match=text):
        GradientAccumulator(model_of_integers(), max_microbatch_tokens=replace(fit, **changed))


def test_a_lowered_limit_is_a_count():
    gradient = GradientAccumulator(model_of_integers(), micro_batch_size=2)
    gradient.lower_limit(MicrobatchLimit(0, 0))
    with pytest.raises(PlanError, match="micro_batch_size is 0"):
        gradient.plan(samples([1, 2, 3]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    gradient = GradientAccumulator(model_of_integers(), micro_batch_size=2)
    with pytest.raises(PlanError, match="nested"):
        gradient.plan([{"x": nested}])


def two_models(models, microbatch):
    first, second = models
    return (second(first(microbatch["x"])) ** 2).sum(), float(len(microbatch["x"]))


def test_models_of_a_list_are_freed_without_the_garbage_collector() -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 1)]
    gradient = GradientAccumulator(models, micro_batch_size=2)
    gradient.forward_backward({"x": torch.ones(3, 2)}, two_models)
    gradient.finalize()
    alive = list(map(weakref.ref, models))
    gc.collect()
    gc.disable()
    try:
        del models, gradient
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()
