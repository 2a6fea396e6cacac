"""Ready-made losses: each sums, counts, and says how its weight is counted from the data."""

from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import masks
from megabatch.batch import IGNORED_LABEL, Microbatch
from megabatch.contract import Term, loss
from megabatch.vocabulary import HALF_TYPES, summing


def next_targets(microbatch: Microbatch) -> Tensor:
    """What each position predicts: ``shift_labels`` [B, T], or ``labels`` but the first of each row [B, T - 1]."""
    shifted: Tensor | None = microbatch.get("shift_labels")
    return microbatch["labels"][:, 1:] if shifted is None else shifted


def count_targets(microbatch: Microbatch) -> Tensor:
    """Targets of a causal model: what its positions predict, where that is not -100."""
    return (next_targets(microbatch) != IGNORED_LABEL).sum()


@loss(weigh=count_targets, prepare=masks.noted)
def next_token(model: nn.Module, microbatch: Microbatch) -> Term:
    """Cross-entropy of each next token: ``-sum log p(labels[t + 1] | input_ids[..t])`` over its targets.

    ``microbatch``: ``labels`` [B, T], unshifted, -100 where there is no target, and the model's inputs; or
    ``shift_labels`` [B, T] in place of ``labels``, whose entry t is what position t predicts. The model returns logits
    [B, T, V] or an object with ``.logits``. An ``attention_mask`` [B, T] is left out where that changes nothing: a
    causal model of transformers, padded on the right. Where logits would be large, the causal models of transformers
    that `megabatch.vocabulary` knows never have all of them.
    """
    targets = next_targets(microbatch)  # [B, T], or [B, T - 1] where the last position predicts nothing
    with summing(model, targets) as summed:
        predicted = _predict(model, masks.without_needless(model, microbatch))  # [B, T, V]; a scalar where it is summed
    if summed.is_there:
        return Term(predicted, count_targets(microbatch))
    logits = predicted[:, : targets.shape[1]]  # [B, T or T - 1, V]
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
    """The model's output for everything but targets: a lone input by position, several by name."""
    targets = ("labels", "shift_labels")
    inputs = {name: value for name, value in microbatch.items() if name not in targets}
    output: Any = model(*inputs.values()) if len(inputs) == 1 else model(**inputs)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits.float() if logits.dtype in HALF_TYPES else logits  # a sum of thousands needs more digits than theirs
