"""The losses of the tables: plain functions of a batch that sum and count, {name: (total, weight)}.

A label is for the token before it (the causal shift), so the label at position 0 is never used.
Each function has the part that counts (`weights_*`, from the data alone) apart from the part that sums.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    labels = batch["labels"][:, 1:]
    return labels, labels != -100


def tokens_weights(batch: Batch) -> dict[str, Tensor]:
    labels, valid = _targets(batch)
    return {"loss": valid.sum(), "positive": (valid & (labels > 0)).sum()}


def tokens_sums(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Squared error over targets; squared output over positive targets; a count of outputs above zero."""
    labels, valid = _targets(batch)
    outputs = model(batch["input_ids"])[:, :-1]
    weights = tokens_weights(batch)
    squares = torch.where(valid, (outputs - labels) ** 2, 0)
    positive = torch.where(valid & (labels > 0), outputs**2, 0)
    above = (valid & (outputs.detach() > 0)).sum()
    return {
        "loss": (squares.sum(), weights["loss"]),
        "positive": (positive.sum(), weights["positive"]),
        "above": (above.to(outputs.dtype), weights["loss"]),
    }


def image_weights(batch: Batch) -> dict[str, Tensor]:
    return {"loss": batch["weight"].sum(), "positive": batch["positive"].sum()}


def image_sums(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """The same three sums for images, each with integer weights of its own."""
    outputs, weights = model(batch["image"]), image_weights(batch)
    squares = batch["weight"] * (outputs - batch["label"]) ** 2
    above = (batch["weight"] * (outputs.detach() > 0)).sum()
    return {
        "loss": (squares.sum(), weights["loss"]),
        "positive": ((batch["positive"] * outputs**2).sum(), weights["positive"]),
        "above": (above.to(outputs.dtype), weights["loss"]),
    }


def language_weights(batch: Batch) -> dict[str, Tensor]:
    labels, valid = _targets(batch)
    return {"loss": valid.sum(), "positive": (valid & (labels % 2 == 1)).sum()}


def language_sums(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Cross-entropy over targets; a z-loss over odd targets; a count of right predictions."""
    labels, valid = _targets(batch)
    logits, weights = model(batch["input_ids"]).logits[:, :-1], language_weights(batch)
    entropy = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    z_loss = torch.where(valid & (labels % 2 == 1), logits.logsumexp(-1) ** 2, 0).sum()
    right = (valid & (logits.detach().argmax(-1) == labels)).sum()
    return {
        "loss": (entropy, weights["loss"]),
        "positive": (z_loss, weights["positive"]),
        "above": (right.to(logits.dtype), weights["loss"]),
    }


NAMES = {
    "weigh": ("loss",), "late": ("loss",), "mixed": ("loss",), "given": ("loss",), "library": ("loss",),
    "terms": ("loss", "positive"), "terms-late": ("loss", "positive"),
    "metric": ("loss", "above"), "metric-late": ("loss", "above"),
}  # fmt: skip


def of(model_kind: str) -> tuple[Callable[..., dict], Callable[[Batch], dict]]:
    """(sums, weights) for "tokens", "image" or "language"."""
    return {
        "tokens": (tokens_sums, tokens_weights),
        "image": (image_sums, image_weights),
        "language": (language_sums, language_weights),
    }[model_kind]
