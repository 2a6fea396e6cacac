"""Ready-made losses against plain torch, and their weights against what they sum."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megabatch import losses
from megabatch.core.contract import weigh_of

B, T, C = 3, 5, 7
LOGITS = torch.randn(B, T, C, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, 3, 4, 5], [-100, -100, 6, 0, -100], [0, -100, -100, -100, -100]])
VALUES = torch.randn(B, T, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Answers(nn.Module):
    """Gives what it was told to give, and remembers what it was asked."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.given = answer, None

    def forward(self, *args, **kwargs):
        self.given = (args, kwargs)
        return self.answer


def summed(logits, labels):
    """The sum of -log p(label), by hand."""
    rows, targets = logits.reshape(-1, C), labels.reshape(-1)
    return -sum(row.log_softmax(-1)[target] for row, target in zip(rows, targets, strict=True) if target >= 0)


ROWS = {  # loss, logits, labels -> total, weight
    "next token": (losses.next_token, LOGITS, LABELS, summed(LOGITS[:, :-1], LABELS[:, 1:]), 6),
    "next token, no target": (losses.next_token, LOGITS[2:], LABELS[2:], 0.0, 0),
    "classes of samples": (losses.classification, LOGITS[:, 0], LABELS[:, 0], summed(LOGITS[:, 0], LABELS[:, 0]), 2),
    "classes of positions": (losses.classification, LOGITS, LABELS, summed(LOGITS, LABELS), 8),
    "squared error": (losses.mse, VALUES, VALUES + 2, 4.0 * B * T, B * T),
}


@pytest.mark.parametrize("name", ROWS)
def test_total_and_weight(name):
    loss_fn, answer, labels, total, weight = ROWS[name]
    microbatch = {"input_ids": torch.zeros(len(labels), T), "labels": labels}
    term = loss_fn(Answers(answer), microbatch)
    assert float(term.total) == pytest.approx(float(total), rel=1e-14)
    assert float(term.weight) == weight
    assert float(weigh_of(loss_fn)(microbatch)) == weight


def test_a_lone_input_goes_by_position_and_several_by_name():
    lone, several = Answers(VALUES), Answers(VALUES)
    losses.mse(lone, {"anything": VALUES, "labels": VALUES})
    losses.mse(several, {"input_ids": LABELS, "attention_mask": LABELS, "labels": VALUES})
    assert (len(lone.given[0]), lone.given[1]) == (1, {})
    assert (several.given[0], set(several.given[1])) == ((), {"input_ids", "attention_mask"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_thousands_keeps_its_digits(dtype):
    """In float32, where the type of the logits has but two or three digits."""
    logits, labels = LOGITS.to(dtype).repeat(1, 800, 1), LABELS.clamp(min=0).repeat(1, 800)
    term = losses.classification(Answers(logits), {"x": labels, "labels": labels})
    exact = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert float(term.total) == pytest.approx(float(exact), rel=1e-5)
