"""Ready-made losses: each sums, counts, and says how its weight is counted from the data."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.batch import IGNORED_LABEL, Microbatch
from megabatch.contract import Term, loss

HALF_TYPES = (torch.bfloat16, torch.float16)


def count_targets(microbatch: Microbatch) -> Tensor:
    """Targets of a causal model: labels but the first of each row, which no position predicts."""
    return (microbatch["labels"][:, 1:] != IGNORED_LABEL).sum()


@loss(weigh=count_targets)
def next_token(model: nn.Module, microbatch: Microbatch) -> Term:
    """Cross-entropy of each next token: ``-sum log p(labels[t + 1] | input_ids[..t])`` over its targets.

    ``microbatch``: ``labels`` [B, T], unshifted, -100 where there is no target, and the model's inputs. The model
    returns logits [B, T, V] or an object with ``.logits``.
    """
    logits = _predict(model, microbatch)[:, :-1]  # [B, T - 1, V]
    targets = microbatch["labels"][:, 1:]  # [B, T - 1]
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return Term(total, count_targets(microbatch))


def count_labels(microbatch: Microbatch) -> Tensor:
    """Samples (or positions) that have a class."""
    return (microbatch["labels"] != IGNORED_LABEL).sum()


@loss(weigh=count_labels)
def classification(model: nn.Module, microbatch: Microbatch) -> Term:
    """Cross-entropy of ``labels`` [B] or [B, ...], each a class; -100 is ignored.

    The model returns logits [B, C] or [B, ..., C], or an object with ``.logits``.
    """
    logits = _predict(model, microbatch)  # [B, ..., C]
    labels = microbatch["labels"]  # [B, ...]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return Term(total, count_labels(microbatch))


def count_values(microbatch: Microbatch) -> int:
    """Numbers that are predicted."""
    return cast(Tensor, microbatch["labels"]).numel()


@loss(weigh=count_values)
def mse(model: nn.Module, microbatch: Microbatch) -> Term:
    """Squared error ``sum (prediction - labels)^2`` over every number of ``labels`` [B, ...].

    The model returns predictions of that shape, or an object with ``.logits``. Samples must be of one shape:
    padded numbers would count.
    """
    predictions = _predict(model, microbatch)  # [B, ...]
    total = F.mse_loss(predictions, microbatch["labels"], reduction="sum")
    return Term(total, count_values(microbatch))


def _predict(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """The model's output for everything but ``labels``: a lone input by position, several by name."""
    inputs = {name: value for name, value in microbatch.items() if name != "labels"}
    output: Any = model(*inputs.values()) if len(inputs) == 1 else model(**inputs)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float() if logits.dtype in HALF_TYPES else logits  # a sum of thousands needs more digits than theirs
