"""A bound that is chosen leaves everything as it was, in one process: gradients and attributes, to the bit."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from megabatch import GradientAccumulator, MegabatchError, loss, losses
from megabatch.batching.deferred import Deferred
from megabatch.core.contract import loss_hooks
from megabatch.errors import MicrobatchLimit
from megabatch.planning import limits
from megabatch.planning.limits import TunedLimit
from megabatch.train.runtime.plugins import in_place_of
from tests.exact.spikes import Spikes
from tests.unit.failures.table import squares, weighed_squares

ALL = 10**9  # tokens: one microbatch


@pytest.fixture(autouse=True)
def whatever_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory alone end a search."""
    monkeypatch.setattr(limits, "LEAST_GAIN", -math.inf)


def samples(number: int, width: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(width, generator=generator, dtype=torch.float64)} for _ in range(number)]


def tokens_of(gradient: GradientAccumulator) -> int:
    assert gradient.fit is not None
    return gradient.fit.max_microbatch_tokens


def linear() -> nn.Module:
    return nn.Linear(8, 1).double()


def gradients(make: Callable[[], nn.Module], loss_fn: Any, batch: Any, **bound: Any) -> Tensor:
    torch.manual_seed(0)
    model = make()
    gradient = GradientAccumulator(model, **bound)
    gradient.forward_backward(batch, loss_fn)
    gradient.finalize()
    return gradient_of(model)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def first_eight(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return squares(model, {"x": microbatch["x"][:, :8]})


class Noting(nn.Module):
    """Notes in its forward what modules note: counters, first values, tables, tensors that are written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1).double()
        self.num_calls, self.seen, self.scales = 0, Counter[int](), [1.0]
        self.moving = torch.zeros(8, dtype=torch.float64)

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0), persistent=False)
            self.spread = x.std(0, unbiased=False) + 1
        self.num_calls += 1
        self.seen[len(x)] += 1
        self.scales.append(self.scales[-1] * 1.5)
        self.moving += x.mean(0)
        scale = self.num_calls + self.scales[-1] + sum(self.seen.values())
        return self.linear((x - self.mean) / self.spread + self.moving) * scale


def dynamic() -> nn.Module:
    """Its rotary embedding remembers the longest sequence that it has seen."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, rope_parameters=rope,
        )
    )  # fmt: skip


def test_what_a_module_notes_is_as_if_nothing_had_been_measured() -> None:
    expected = gradients(Noting, weighed_squares, samples(6), max_microbatch_tokens=ALL)
    assert torch.equal(gradients(Noting, weighed_squares, samples(6)), expected)


def test_an_embedding_that_has_seen_a_long_sequence_has_not() -> None:
    ids = [torch.arange(96) * step % 64 for step in range(1, 7)]
    batch = [{"input_ids": each, "labels": each} for each in ids]
    expected = gradients(dynamic, losses.next_token, batch, max_microbatch_tokens=ALL)
    assert torch.equal(gradients(dynamic, losses.next_token, batch), expected)


def test_a_frozen_parameter_that_is_no_number_has_not_moved() -> None:
    model = nn.Linear(8, 1).double()
    model.register_parameter("unused", nn.Parameter(torch.full((2,), float("nan")), requires_grad=False))
    GradientAccumulator(model).forward_backward(samples(4), weighed_squares)


def test_samples_of_another_kind_are_as_long_as_their_batch_says() -> None:
    def collate(pairs: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        return {"x": torch.stack([image.flatten() for image, _ in pairs])}

    def load(index: int) -> tuple[Tensor, int]:
        return torch.full((2, 4), float(index), dtype=torch.float64), index

    def batch() -> Deferred:
        return Deferred(load, [16] * 8, [1.0] * 8, measured=False)

    expected = gradients(linear, weighed_squares, batch(), collate=collate, micro_batch_size=8)
    assert torch.equal(gradients(linear, weighed_squares, batch(), collate=collate), expected)


def test_the_longest_sample_is_kept_for_calls_with_more() -> None:
    """Shorter samples must not choose the limit; and none is chosen for more samples that fit."""
    lengths = {"long": [9], "more": [3] * 20, "few": [3] * 5}
    batches = {name: [{"x": torch.ones(each, 1).double()} for each in all_of] for name, all_of in lengths.items()}
    gradient = GradientAccumulator(nn.Linear(1, 1).double())
    fits: list[TunedLimit] = []
    for name in ("long", "few", "more", "long"):
        gradient.tune(batches[name], weighed_squares)
        assert gradient.fit is not None
        fits.append(gradient.fit)
    assert fits[0] is fits[1]
    assert [fit.longest_tokens for fit in fits] == [9] * 4
    assert [fit.max_microbatch_tokens for fit in fits] == [17, 17, 21 * 9 - 1, 21 * 9 - 1]
    assert fits[2] is fits[3]


@pytest.mark.parametrize("is_watched", [True, False])
def test_what_watches_a_loss_is_no_other_loss(is_watched: bool) -> None:
    """A limit remembers the samples that it was chosen with, and no others."""

    def watched(model: nn.Module, microbatch: Any) -> Any:
        return weighed_squares(model, microbatch)

    weigh = loss_hooks(weighed_squares).weigh
    assert weigh is not None
    other = in_place_of(weighed_squares, watched) if is_watched else loss(weigh=weigh)(watched)
    gradient = GradientAccumulator(nn.Linear(1, 1).double())
    gradient.tune([{"x": torch.ones(9, 1).double()}], weighed_squares)
    gradient.tune([{"x": torch.ones(3, 1).double()}] * 20, other)
    assert tokens_of(gradient) == (21 * 9 - 1 if is_watched else 17)


@pytest.mark.parametrize("shown", [9, 8])
def test_who_goes_on_with_a_fit_remembers_the_longest_sample_that_it_is_shown(shown: int) -> None:
    first = GradientAccumulator(nn.Linear(1, 1).double())
    first.tune([{"x": torch.ones(9, 1).double()}], weighed_squares)
    second = GradientAccumulator(nn.Linear(1, 1).double(), max_microbatch_tokens=first.fit)
    second.tune([{"x": torch.ones(shown, 1).double()}], weighed_squares)
    assert second.fit is first.fit
    second.tune([{"x": torch.ones(3, 1).double()}] * 20, weighed_squares)
    assert tokens_of(second) == (21 * 9 - 1 if shown == 9 else 17)


def test_memory_alone_bounds_what_it_has_bounded() -> None:
    gradient = GradientAccumulator(nn.Linear(8, 1).double())
    gradient.lower_limit(MicrobatchLimit(4, 32))
    gradient.tune(samples(300), weighed_squares)
    assert gradient.fit is not None
    assert [each.rows for each in gradient.fit.measured] == [1, 4]
    assert gradient.fit.outgrown_rows is None


def test_another_begins_with_what_was_chosen() -> None:
    first = GradientAccumulator(nn.Linear(8, 1).double())
    first.tune(samples(3), weighed_squares)
    second = GradientAccumulator(nn.Linear(8, 1).double(), max_microbatch_tokens=first.fit)
    second.tune(samples(3), weighed_squares)
    assert second.fit is first.fit
    second.tune(samples(1, width=9), first_eight)
    assert second.fit is not first.fit


def test_a_call_without_samples_chooses_nothing_and_the_next_may() -> None:
    expected = gradients(linear, weighed_squares, samples(4), micro_batch_size=4)
    torch.manual_seed(0)
    model = nn.Linear(8, 1).double()
    gradient = GradientAccumulator(model)
    gradient.forward_backward([], weighed_squares)
    gradient.forward_backward(samples(4), weighed_squares)
    assert gradient.finalize().num_samples == 4
    assert torch.equal(gradient_of(model), expected)


def test_one_sample_that_runs_out_while_measuring_is_an_error() -> None:
    model = linear()
    Spikes(model, ("",)).set({0: ("forward", 0)})
    with pytest.raises(MegabatchError) as raised:
        GradientAccumulator(model).tune(samples(8), weighed_squares)
    assert raised.value.shortage is not None
    assert raised.value.shortage.bound is None


def test_several_that_run_out_while_measuring_do_not_fit() -> None:
    model = linear()
    Spikes(model, ("",)).set({4: ("forward", 0)})  # the first of eight samples
    gradient = GradientAccumulator(model)
    gradient.tune(samples(8), weighed_squares)
    assert gradient.fit is not None
    assert [each.rows for each in gradient.fit.measured] == [1, 7]
    assert tokens_of(gradient) == 8 * 8 - 1
    assert all(each.grad is None for each in model.parameters())
