"""Public names of the chapters in use, as an application writes them: an evaluation by hand, a packed data set."""

import inspect

import pytest
import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, losses
from megabatch.autotune import check_measurable, device_text, free_on
from megabatch.batching import Padding, context_parallel, pad_right, sample_length, to_device
from megabatch.errors import in_one_line
from megabatch.experts import config_coefficient, has_experts
from megabatch.losses import LossFunction, loss_hooks, terms_of
from megabatch.losses.token_loss import chunk_tokens
from megabatch.pipeline import SCHEDULES
from megabatch.planning import balance, best_fit
from megabatch.simulate import device_named
from megabatch.train.plan.estimate import MIN_CHUNK

CPU = torch.device("cpu")
SAMPLES = [{"input_ids": torch.arange(size), "labels": torch.arange(size)} for size in (3, 5, 2)]


SIGNATURES = {
    balance: "(costs, num_bins)",
    best_fit: "(lengths, row_tokens)",
    sample_length: "(sample)",
    pad_right: "(samples)",
    to_device: "(microbatch, device)",
    context_parallel.stretch: "(microbatch, index, degree)",
    loss_hooks: "(loss_fn)",
    terms_of: "(returned)",
    in_one_line: "(error)",
    free_on: "(device)",
    check_measurable: "(device)",
    device_text: "(device)",
    has_experts: "(model)",
    config_coefficient: "(model)",
    device_named: "(name)",
}


class Tokens(nn.Module):
    """Logits of the next of 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signature(function):
    assert f"({', '.join(inspect.signature(function).parameters)})" == SIGNATURES[function]


def test_a_set_is_evaluated_by_hand_to_the_loss_of_an_update():
    model = Tokens()
    update = GradientAccumulator(model, micro_batch_size=2)
    update.forward_backward(SAMPLES, losses.next_token)
    assert evaluated(model, losses.next_token) == pytest.approx(float(update.finalize().loss))


def evaluated(model: nn.Module, loss_fn: LossFunction) -> float:
    pad, prepare = Padding([model]), loss_hooks(loss_fn).prepare or (lambda microbatch: microbatch)
    total = weight = 0.0
    for start in range(0, len(SAMPLES), 2):
        microbatch = to_device(prepare(pad(SAMPLES[start : start + 2])), CPU)
        term = terms_of(loss_fn(model, microbatch))["loss"]
        total, weight = total + float(term.total.detach()), weight + float(term.weight)
    return total / weight


def test_schedules_say_the_stages_of_a_rank():
    assert SCHEDULES["1F1B"].per_rank == 1
    assert SCHEDULES["Interleaved1F1B"].indices(1, 4, 2) == [1, 5]
    assert SCHEDULES["DualPipeV"].indices(1, 4, 2) == [1, 6]


@pytest.mark.parametrize("sizes", [(32_000, 512), (256, 64), (151_936, 4096)])
def test_the_plan_counts_logits_as_the_loss_makes_them(sizes):
    num_classes, width = sizes
    assert max(width // 2, MIN_CHUNK // num_classes) == chunk_tokens(num_classes, width)


def test_an_error_is_one_line():
    assert in_one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert len(in_one_line(ValueError("a" * 300))) == 200
