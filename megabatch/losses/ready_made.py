"""Ready-made losses, which return a sum and its weight and count the weight from the data.

Each checks the shape of the model's output against the labels, since shapes that broadcast would give another loss.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.batching.padding import (
    MASK,
    RIGHT_PADDED,
    next_targets,
    note_padding,
    with_config,
    without_needless,
)
from megabatch.batching.samples import HALF_TYPES, IGNORED_LABEL, Microbatch, has_padded_numbers
from megabatch.errors import LossContractError
from megabatch.losses.contract import Term, loss
from megabatch.losses.dropped_terms import refuse_dropped_terms

TARGETS = ("labels", "shift_labels")
MIN_CHUNK_LOGITS = 2**22  # of a chunk: 16 MiB in float32; smaller ones save nothing, and at 1 MiB are slower
# With fewer chunks than this (measured), all logits take no more memory than a chunk and the weight's gradient. Then a
# smaller microbatch, which computes all logits, never needs more than a larger one.
BREAK_EVEN = 4 / 3


def count_targets(microbatch: Microbatch) -> Tensor:
    """Count the targets of a causal model: the labels its positions predict, without -100."""
    return (next_targets(microbatch) != IGNORED_LABEL).sum()


@loss(weigh=count_targets, prepare=note_padding)
def next_token(model: nn.Module, microbatch: Microbatch) -> Term:
    """Sum of the next-token cross-entropy, ``-sum(log p(labels[t + 1] | input_ids[:t + 1]))`` over the targets.

    A needless ``attention_mask`` [B, T] is left out: the model is a causal model of transformers, padding is on the
    right, and no target lies under the mask. If the logits would be large, they are computed in chunks for the models
    that `megabatch.losses.chunked_cross_entropy` knows.

    Args:
        model: Returns logits [B, T, V], or an object with ``.logits``.
        microbatch: The model's inputs and ``labels`` [B, T], not shifted, with -100 where there is no target. You may
            give ``shift_labels`` [B, T] instead, whose entry t is the target of position t.

    Returns:
        The sum, and the number of targets.

    Raises:
        LossContractError: Labels and logits have different shapes, the model is an encoder-decoder, it returns an
            auxiliary loss, or its own loss of the same ``labels`` has another term (a z-loss): both would be left out.
    """
    term, output = next_token_beside(model, microbatch)
    if getattr(output, "aux_loss", None) is not None:
        raise LossContractError(
            "the model returns an auxiliary loss of its routers (output_router_logits), which next_token leaves out; "
            "give experts.next_token_with_balance(), or set model.config.output_router_logits = False"
        )
    return term


def next_token_beside(model: nn.Module, microbatch: Microbatch, **options: Any) -> tuple[Term, Any]:
    """Return the term of `next_token` and the output of the model, which is called with ``options`` too.

    The output's logits may be their summed cross-entropy instead.
    """
    targets = next_targets(microbatch)  # [B, T], or [B, T - 1] where the last position predicts nothing
    num_positions = targets.shape[1] + (microbatch.get("shift_labels") is None)
    inner: Any = model if hasattr(model, "config") else with_config(model)  # of a wrapper
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False) is True:
        raise LossContractError(
            f"{type(inner).__name__} is an encoder-decoder, whose position t predicts label t; give "
            "losses.classification, with decoder_input_ids in the samples, in place of next_token"
        )
    refuse_dropped_terms(model, microbatch)
    if MASK in microbatch or RIGHT_PADDED in microbatch:
        microbatch = without_needless(model, microbatch)
    head, summed = getattr(inner, "lm_head", None), None
    if isinstance(head, nn.Linear) and len(targets) * num_positions >= BREAK_EVEN * chunk_tokens(
        head.out_features, head.in_features
    ):
        from megabatch.losses.chunked_cross_entropy import summing

        with summing(model, F.pad(targets, (0, num_positions - targets.shape[1]), value=IGNORED_LABEL)) as summed:
            predicted, output = _predict(model, microbatch, **options)  # [B, T, V]; a scalar where it is summed
    else:
        predicted, output = _predict(model, microbatch, **options)  # [B, T, V]
    if summed is not None and summed.total is not None:
        return Term(predicted, (targets != IGNORED_LABEL).sum()), output
    if predicted.ndim != 3 or predicted.shape[:2] != (len(targets), num_positions):
        raise LossContractError(
            f"the model returns logits of shape {tuple(predicted.shape)} for labels of shape "
            f"{(len(targets), num_positions)}; next_token wants [B, T, V] for [B, T] (give virtual or image tokens in "
            "front labels of -100)"
        )
    logits = predicted[:, : targets.shape[1]]  # [B, T or T - 1, V]
    total = _cross_entropy(logits.flatten(0, 1), targets.flatten())
    return Term(total, (targets != IGNORED_LABEL).sum()), output


def chunk_tokens(num_classes: int, width: int) -> int:
    """Return the number of positions whose logits are computed at once, for a head's weight [V, D].

    Half as many as there are columns: the weight's gradient is written for every chunk, and its logits are then half
    as large as it is.
    """
    return max(width // 2, MIN_CHUNK_LOGITS // num_classes)


def count_labels(microbatch: Microbatch) -> Tensor:
    """Count the samples (or positions) that have a class."""
    return (_labels(microbatch) != IGNORED_LABEL).sum()


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
    total = _cross_entropy(logits.flatten(0, -2), labels.flatten())
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
    return _predict(model, microbatch)[0]


def _predict(model: nn.Module, microbatch: Microbatch, **options: Any) -> tuple[Tensor, Any]:
    """Call the model with everything but targets: one input by position, several by name; return logits and output.

    Logits of half types become float32: a sum of thousands needs more digits than theirs.
    """
    inputs = {name: value for name, value in microbatch.items() if name not in TARGETS}
    takes_one_input = len(inputs) == 1 and next(iter(inputs)) != "inputs_embeds"
    output: Any = model(*inputs.values(), **options) if takes_one_input else model(**inputs, **options)
    logits: Any = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise LossContractError(
            f"the model returns a {type(output).__name__} without logits; expected a tensor, or an object with .logits"
        )
    return logits.float() if logits.dtype in HALF_TYPES else logits, output


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the labels [N] that are not -100; logits are [N, C]."""
    try:
        return F.cross_entropy(logits, labels.long(), ignore_index=IGNORED_LABEL, reduction="sum")
    except IndexError:  # on the CPU; a device stops instead
        raise unknown_classes(labels, logits.shape[-1]) from None


def unknown_classes(labels: Tensor, num_classes: int) -> LossContractError:
    """Return the error for labels that are no classes of the model."""
    real = labels[labels != IGNORED_LABEL]
    return LossContractError(
        f"labels are from {int(real.min())} to {int(real.max())} and the model has {num_classes} classes; "
        f"expected 0 to {num_classes - 1}, or {IGNORED_LABEL} for none"
    )
