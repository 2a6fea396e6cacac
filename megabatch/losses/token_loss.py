"""The loss of next tokens, which returns a sum and its weight and counts the weight from the data.

It checks the shape of the model's output against the labels, since shapes that broadcast would give another loss.
"""

from typing import Any
from weakref import WeakSet

import torch.nn.functional as F
from torch import Tensor, nn

from megabatch.core.contract import Term, loss, skips_ignored_labels
from megabatch.core.samples import HALF_TYPES, Microbatch
from megabatch.errors import LossContractError
from megabatch.inspection.model_facts import MASK, with_config
from megabatch.inspection.padding_masks import RIGHT_PADDED, next_targets, note_padding, without_needless
from megabatch.torch_private.loss_nodes import IGNORED_LABEL

TARGETS = ("labels", "shift_labels")
MIN_CHUNK_LOGITS = 2**22  # of a chunk: 16 MiB in float32; smaller ones save nothing, and at 1 MiB are slower
# With fewer chunks than this (measured), all logits take no more memory than a chunk and the weight's gradient. Then a
# smaller microbatch, which computes all logits, never needs more than a larger one.
BREAK_EVEN = 4 / 3
compared_models: WeakSet[nn.Module] = WeakSet()  # whose own loss is known to have no other term


def count_targets(microbatch: Microbatch) -> Tensor:
    """Count the targets of a causal model: the labels its positions predict, without -100."""
    return (next_targets(microbatch) != IGNORED_LABEL).sum()


@skips_ignored_labels
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
    causal_model = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # inside of its adapter
    if causal_model not in compared_models:
        from megabatch.losses.dropped_terms import refuse_dropped_terms

        if refuse_dropped_terms(model, causal_model, microbatch):
            compared_models.add(causal_model)
    if MASK in microbatch or RIGHT_PADDED in microbatch:
        microbatch = without_needless(model, microbatch)
    head, summed = getattr(inner, "lm_head", None), None
    if isinstance(head, nn.Linear) and len(targets) * num_positions >= BREAK_EVEN * chunk_tokens(
        head.out_features, head.in_features
    ):
        from megabatch.losses.chunked_cross_entropy import summing

        with summing(model, F.pad(targets, (0, num_positions - targets.shape[1]), value=IGNORED_LABEL)) as summed:
            predicted, output = predict(model, microbatch, **options)  # [B, T, V]; a scalar where it is summed
    else:
        predicted, output = predict(model, microbatch, **options)  # [B, T, V]
    if summed is not None and summed.total is not None:
        return Term(predicted, (targets != IGNORED_LABEL).sum()), output
    if predicted.ndim != 3 or predicted.shape[:2] != (len(targets), num_positions):
        raise LossContractError(
            f"the model returns logits of shape {tuple(predicted.shape)} for labels of shape "
            f"{(len(targets), num_positions)}; next_token wants [B, T, V] for [B, T] (give virtual or image tokens in "
            "front labels of -100)"
        )
    logits = predicted[:, : targets.shape[1]]  # [B, T or T - 1, V]
    total = sum_cross_entropy(logits.flatten(0, 1), targets.flatten())
    return Term(total, (targets != IGNORED_LABEL).sum()), output


def chunk_tokens(num_classes: int, width: int) -> int:
    """Return the number of positions whose logits are computed at once, for a head's weight [V, D].

    Half as many as there are columns: the weight's gradient is written for every chunk, and its logits are then half
    as large as it is.
    """
    return max(width // 2, MIN_CHUNK_LOGITS // num_classes)


def predict(model: nn.Module, microbatch: Microbatch, **options: Any) -> tuple[Tensor, Any]:
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


def sum_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
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
