"""Losses over labels: classes, and numbers.

Each checks the shape of the model's output against the labels, since shapes that broadcast would give another loss.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.core.contract import Term, loss, skips_ignored_labels
from megabatch.core.right_padding import has_padded_numbers
from megabatch.core.samples import Microbatch
from megabatch.errors import LossContractError
from megabatch.inspection.model_facts import with_config
from megabatch.losses.token_loss import predict, sum_cross_entropy
from megabatch.torch_private.loss_nodes import IGNORED_LABEL


def count_labels(microbatch: Microbatch) -> Tensor:
    """Count the samples (or positions) that have a class."""
    return (_labels(microbatch) != IGNORED_LABEL).sum()


@skips_ignored_labels
@loss(weigh=count_labels)
def classification(model: nn.Module, microbatch: Microbatch) -> Term:
    """Sum of the cross-entropy of each label.

    Args:
        model: Returns logits [B, C] or [B, ..., C], or an object with ``.logits``.
        microbatch: The model's inputs and ``labels`` [B] or [B, ...], the number of a class each. -100 is ignored.

    Returns:
        The sum, and the number of labels that are not -100.

    Raises:
        LossContractError: A label is not a class, or the logits have another shape.
    """
    labels = _labels(microbatch)  # [B, ...]
    if labels.is_floating_point():
        raise LossContractError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}, probabilities perhaps; classification wants "
            "the number of a class for each, or give a loss of your own"
        )
    logits = _predict_labels(model, microbatch)  # [B, ..., C]
    is_square = logits.ndim > 3 and logits.shape[2:] == labels.shape[1:]  # classes may be in dim 1, as torch has them
    if logits.shape[:-1] != labels.shape or is_square:
        raise LossContractError(
            f"the model returns logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}; "
            "classification wants the classes in the last dim: [*labels.shape, C]"
        )
    total = sum_cross_entropy(logits.flatten(0, -2), labels.flatten())
    return Term(total, count_labels(microbatch))


def count_values(microbatch: Microbatch) -> int:
    """Count the numbers that are predicted."""
    return _labels(microbatch).numel()


def without_padding(microbatch: Microbatch) -> Microbatch:
    """Return the microbatch. Raises `LossContractError` where its labels were padded."""
    if has_padded_numbers(_labels(microbatch)):
        raise LossContractError(
            "labels of samples have unequal lengths and were padded with -100, and mse counts every number; give "
            "samples of one shape, or a loss of your own that leaves padding out"
        )
    return microbatch


@loss(weigh=count_values, prepare=without_padding)
def mse(model: nn.Module, microbatch: Microbatch) -> Term:
    """Sum of the squared error, ``sum((predictions - labels) ** 2)``.

    Args:
        model: Returns predictions [B, ...], or an object with ``.logits``.
        microbatch: The model's inputs and ``labels`` [B, ...] of the same shape. Samples must have one shape, since
            padded numbers would count.

    Returns:
        The sum, and the number of values.

    Raises:
        LossContractError: The shapes differ, or labels were padded.
    """
    predictions, labels = _predict_labels(model, microbatch), _labels(microbatch)  # [B, ...]
    if predictions.shape != labels.shape:
        raise LossContractError(
            f"the model returns predictions of shape {tuple(predictions.shape)} for labels of shape "
            f"{tuple(labels.shape)}; mse wants one shape: labels.unsqueeze(-1) in the data, say"
        )
    total = F.mse_loss(predictions, labels.to(predictions.dtype), reduction="sum")
    return Term(total, count_values(microbatch))


def _labels(microbatch: Microbatch) -> Tensor:
    labels = microbatch.get("labels") if isinstance(microbatch, Mapping) else None
    if not isinstance(labels, Tensor):
        found_keys = f"the keys {', '.join(map(str, microbatch))}" if isinstance(microbatch, Mapping) else "no keys"
        raise LossContractError(f"the samples have no labels, but {found_keys}; name what is predicted 'labels'")
    return labels


def _predict_labels(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """Return the logits of a model that predicts the label of each position, an encoder-decoder among them."""
    inner: Any = with_config(model)
    decodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False) is True
    if decodes and not any(name.startswith("decoder_") for name in microbatch):
        raise LossContractError(
            f"{type(inner).__name__} is an encoder-decoder and the samples have no decoder_input_ids; "
            "make them with model.prepare_decoder_input_ids_from_labels(labels), or give a loss of your own"
        )
    return predict(model, microbatch)[0]
