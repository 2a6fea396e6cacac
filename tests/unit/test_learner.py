"""Learner beside a plain loop: the same weights, to the bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch import GradientAccumulator, Learner, losses
from megabatch.core.right_padding import pad_right

MICRO_BATCH_SIZE = 3
NUM_UPDATES = 5


def new_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(update: int, size: int = 8) -> list[dict[str, torch.Tensor]]:
    """Eight samples: dividing by their number rounds nothing."""
    generator = torch.Generator().manual_seed(update)
    inputs = torch.randn(size, 4, generator=generator)
    return [{"x": row, "labels": torch.tensor(number % 3)} for number, row in enumerate(inputs)]


def tools(model: nn.Module):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)


def new_learner(model: nn.Module | None = None, max_norm: float | None = 0.2) -> Learner:
    model = new_model() if model is None else model
    optimizer, scheduler = tools(model)
    gradient = GradientAccumulator(model, micro_batch_size=MICRO_BATCH_SIZE)
    return Learner(model, optimizer, gradient, scheduler=scheduler, max_norm=max_norm)


def train(learner: Learner, updates: range) -> list[float]:
    """Some updates, and their losses."""
    found = []
    for update in updates:
        learner.forward_backward(batch(update), losses.classification)
        found.append(float(learner.optim_step().loss))
    return found


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.parameters(), other.parameters()))


def plain_loop(model: nn.Module, max_norm: float | None) -> list[float]:
    optimizer, scheduler = tools(model)
    cut = GradientAccumulator(model, micro_batch_size=MICRO_BATCH_SIZE).plan(batch(0)).microbatches
    found = []
    for update in range(NUM_UPDATES):
        optimizer.zero_grad()
        samples, summed = batch(update), 0.0
        for rows in cut:
            microbatch = pad_right([samples[row] for row in rows])
            loss = F.cross_entropy(model(microbatch["x"]), microbatch["labels"], reduction="sum")
            (loss / len(samples)).backward()
            summed += float(loss.detach())
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
        found.append(summed / len(samples))
    return found


@pytest.mark.parametrize("max_norm", [None, 0.2, 1e9])
def test_the_same_weights_as_a_plain_loop(max_norm):
    model = new_model()
    learner = new_learner(max_norm=max_norm)
    assert train(learner, range(NUM_UPDATES)) == plain_loop(model, max_norm)
    assert same_weights(learner.model, model)
    assert learner.step == NUM_UPDATES


def test_without_schedule():
    model = new_model()
    learner = Learner(
        model, torch.optim.SGD(model.parameters(), lr=0.1), GradientAccumulator(model, micro_batch_size=8)
    )
    train(learner, range(1))
    other = new_model()
    F.cross_entropy(other(pad_right(batch(0))["x"]), pad_right(batch(0))["labels"]).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs - 0.1 * theirs.grad, rtol=1e-6, atol=1e-8)
    assert "scheduler" not in learner.state_dict()


def test_a_learner_goes_on_from_its_state():
    whole = new_learner()
    expected = train(whole, range(5))
    first = new_learner()
    found = train(first, range(3))
    second = new_learner(new_model(seed=1))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.step == 3
    assert found + train(second, range(3, 5)) == expected
    assert same_weights(second.model, whole.model)
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_a_state_before_the_first_step_moves_nothing():
    """To describe an optimizer's state torch makes one, by a step that would count as the first."""
    whole, first, second = new_learner(), new_learner(), new_learner(new_model(seed=1))
    expected = train(whole, range(3))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for learner in (first, second):
        assert not learner.optimizer.state
        assert train(learner, range(3)) == expected
        assert same_weights(learner.model, whole.model)


def test_a_state_before_the_first_step_is_none_after_updates_without_weight():
    """Nor are the gradients that an update leaves which was not stepped."""
    whole, first, second = new_learner(), new_learner(), new_learner(new_model(seed=1))
    bad = [sample | {"x": sample["x"] * float("nan")} for sample in batch(7)]
    for learner in (whole, first):
        learner.forward_backward(bad, losses.classification)
        assert not learner.optim_step().finite
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.step == 1
    assert not first.optimizer.state
    expected = train(whole, range(3))
    for learner in (first, second):
        assert train(learner, range(3)) == expected
        assert same_weights(learner.model, whole.model)
