"""Limits learned from microbatches that did not fit, and numbers that must not be counted twice; on one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megabatch import GradientAccumulator, MegabatchError, PlanError, experts, loss
from megabatch.batching.deferred import Deferred
from megabatch.errors import MicrobatchLimit
from tests.exact.experts import samples as sparse_samples
from tests.exact.experts import sparse_lm, unbalanced
from tests.exact.spikes import Spikes
from tests.unit.failures.table import SAMPLES, linear, squares, weighed_squares

TEXTS = [{"x": torch.full((length,), float(length), dtype=torch.float64)} for length in (8, 6, 4, 4, 2, 2)]
OUT = {0: ("backward", 0)}  # of the first forward's backward, when the later layer has its gradient


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        self.spikes = Spikes(self, ("first", "second"))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@loss(weigh=lambda microbatch: microbatch["x"].numel())
def all_numbers(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return (model(microbatch["x"][..., None]) ** 2).sum(), microbatch["x"].numel()


def squares_of_a_copy(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return squares(model, {"x": microbatch["x"].clone()})


def after_a_shortage(model: nn.Module, batch: Any, loss_fn: Any, **settings: Any) -> GradientAccumulator:
    """An accumulator whose first microbatch did not fit once."""
    gradient = GradientAccumulator(model, **settings)
    model.spikes.set(OUT)
    gradient.forward_backward(batch, loss_fn)
    return gradient


def check_same(model: nn.Module, reference: nn.Module) -> None:
    for mine, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-14, atol=0)


def test_a_smaller_bound_is_learned_and_a_longer_sample_still_goes():
    gradient = after_a_shortage(Two(), TEXTS[2:], all_numbers, max_microbatch_tokens=16)
    planned = GradientAccumulator(Two(), max_microbatch_tokens=16).plan(TEXTS[2:])
    assert (gradient.last_plan.num_split, gradient.last_plan.num_microbatches) == (1, planned.num_microbatches + 1)
    assert "1 microbatch did not fit in memory and ran in parts" in gradient.last_plan.explain()
    assert gradient.oom_limit.tokens < 16
    cut = gradient.plan(TEXTS)
    most = max(gradient.oom_limit.tokens, 8)  # the longest sample
    assert max(map(cut.tokens_of, cut.microbatches)) <= most < 16
    assert sorted(row for rows in cut.microbatches for row in rows) == list(range(len(TEXTS)))
    with pytest.raises(PlanError, match="sample 0 has 17 tokens, more than max_microbatch_tokens=16"):
        gradient.plan([{"x": torch.ones(17)}])


def test_what_is_learned_beside_a_long_sample_is_less_than_what_failed():
    gradient = GradientAccumulator(Two(), max_microbatch_tokens=16)
    texts = [{"x": torch.ones(length, dtype=torch.float64)} for length in (16, 2, 2, 2, 2)]
    gradient.lower_limit(MicrobatchLimit(2, 4))
    cut = gradient.plan(texts)
    assert sorted(cut.tokens_of(rows) for rows in cut.microbatches) == [4, 4, 16]
    assert cut.lengths == (16, 2, 2, 2, 2)


def test_the_allocator_of_the_cpu_is_heard():
    """It really refuses: more than there is of addresses."""

    def greedy(model: nn.Module, microbatch: Any) -> Any:
        if len(microbatch["x"]) > 1:
            torch.empty(1 << 60, dtype=torch.uint8)
        return squares(model, microbatch)

    model, reference = linear(), linear()
    gradient = GradientAccumulator(model, micro_batch_size=4)
    gradient.forward_backward(SAMPLES, greedy)
    gradient.finalize()
    assert gradient.last_plan.microbatches == ((0,), (1,), (2,), (3,))
    (squares(reference, {"x": torch.stack([sample["x"] for sample in SAMPLES])})[0] / 4).backward()
    check_same(model, reference)


def test_what_was_weighed_wrong_is_still_said():
    miscounted = loss(weigh=lambda microbatch: 2 * len(microbatch["x"]))(lambda *given: squares(*given))
    model = Two()
    model.spikes.set({0: ("forward", 0)})
    with pytest.raises(MegabatchError, match="weigh counted 4 from the data but the loss returned the weight 2 on"):
        GradientAccumulator(model, micro_batch_size=4).forward_backward(SAMPLES, miscounted)


def test_the_first_microbatch_of_reentrant_checkpointing_is_whole_again():
    class Again(Two):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.second, self.first(x), use_reentrant=True)

    model, reference = Again(), Again()
    after_a_shortage(model, SAMPLES, weighed_squares, micro_batch_size=4).finalize()
    gradient = GradientAccumulator(reference, micro_batch_size=4)
    gradient.forward_backward(SAMPLES, weighed_squares)
    gradient.finalize()
    check_same(model, reference)


@pytest.mark.parametrize("index", [0, 1])
def test_wider_gradients_stay_wide(index: int):
    found = []
    for when in ({}, {index: ("backward", 0)}):
        model = Two().bfloat16()
        model.spikes.set(when)
        batch = [{"x": sample["x"].bfloat16()} for sample in SAMPLES]
        gradient = GradientAccumulator(model, micro_batch_size=2, accumulate_dtype=torch.float32)
        gradient.forward_backward(batch, weighed_squares)
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        gradient.finalize()
    for mine, expected in zip(*found, strict=True):  # of parts that are rounded to bfloat16 each
        torch.testing.assert_close(mine, expected, rtol=2**-7, atol=0)


def test_a_batch_may_be_of_inference_tensors():
    with torch.inference_mode():
        rows = {"x": torch.ones(4, 1, dtype=torch.float64)}
    for when in ({}, OUT):
        model = Two()
        model.spikes.set(when)
        gradient = GradientAccumulator(model, micro_batch_size=4)
        gradient.forward_backward(rows, squares_of_a_copy)
        assert gradient.last_plan.num_split == len(when)


def test_deferred_samples_are_loaded_again():
    loads: list[int] = []

    def load(index: int) -> Any:
        loads.append(index)
        return SAMPLES[index]

    model, reference = Two(), Two()
    batch = Deferred(load, [1] * 4, [1.0] * 4)
    gradient = after_a_shortage(model, batch, weighed_squares, micro_batch_size=2)
    gradient.finalize()
    assert sorted(set(loads)) == [0, 1, 2, 3]
    whole = GradientAccumulator(reference, micro_batch_size=4)
    whole.forward_backward(SAMPLES, weighed_squares)
    whole.finalize()
    check_same(model, reference)


def test_experts_are_counted_once():
    """Memory runs out in the backward when every router has had its gradient."""
    found = []
    for when in ({}, {1: ("backward", 0)}):
        model = sparse_lm()
        Spikes(model, ("embedding", "head")).set(when)
        gradient = GradientAccumulator(model, micro_batch_size=2)
        bias = experts.ExpertBias(gradient)
        gradient.forward_backward(sparse_samples(0, 8), unbalanced)
        gradient.finalize()
        found.append(bias.update())
        assert gradient.last_plan.num_split == len(when)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("collate", [None, list], ids=["a mapping", "samples"])
def test_a_loss_that_writes_to_its_microbatch_runs_again_in_parts(collate: Any) -> None:
    """It is given a copy, so that the parts see the batch as it was."""

    def doubling(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        for each in microbatch if isinstance(microbatch, list) else [microbatch]:
            each["x"].mul_(2)
        x = microbatch["x"] if collate is None else torch.stack([each["x"] for each in microbatch])
        return squares(model, {"x": x})

    given = [{"x": each["x"].clone()} for each in SAMPLES]
    batch = given if collate else {"x": torch.stack([each["x"] for each in given])}
    made = Two(), Two()
    gradients = [GradientAccumulator(model, micro_batch_size=2, collate=collate) for model in made]
    made[0].spikes.set(OUT)
    for gradient in gradients:
        gradient.forward_backward(batch, doubling)
        gradient.finalize()
    assert gradients[0].last_plan.num_split == 1
    check_same(*made)
    assert all(torch.equal(mine["x"], each["x"]) for mine, each in zip(given, SAMPLES, strict=True))
