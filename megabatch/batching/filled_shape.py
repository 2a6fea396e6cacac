"""Samples that fill a microbatch up to a shape, and add nothing to its loss."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import PlanError
from megabatch.inspection.odd_values import to_dense_tensor
from megabatch.torch_private.loss_nodes import IGNORED_LABEL

# Keys of samples in microbatches that are filled up to a shape: what is known to say nothing about other tokens.
OTHERS = ("attention_mask", "position_ids", "token_type_ids")
FILLED = {"input_ids", "labels", "shift_labels", *OTHERS}


def stretched_keys(columns: Mapping[str, list[Tensor]], length: int) -> list[str]:
    """Return the keys that have a value for each token, which are padded to ``length``."""
    lengths = {name: list(map(len, values)) for name, values in columns.items() if values[0].ndim}
    first = next(iter(lengths), "")
    for name in lengths:
        if lengths[name] != lengths[first] or max(lengths[name]) > length:
            raise PlanError(
                f"Shapes pads samples to {length} tokens, and {name!r} of a sample has another number of entries than "
                f"its {first!r}; leave Shapes out"
            )
    return [name for name in lengths if min(lengths[name]) < length]


def without_labels(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with labels of -100, which fills a microbatch up to a shape and adds nothing to its loss.

    Raises `PlanError` for keys that a model may read beside its tokens, and for labels that cannot be -100.
    """
    tensors = {name: to_dense_tensor(name, value) for name, value in sample.items()}
    labels = {name: values for name, values in tensors.items() if name in ("labels", "shift_labels")}
    if "input_ids" not in tensors or not labels or not tensors.keys() <= FILLED:
        raise PlanError(
            f"Shapes fills microbatches up with tokens without a label, and the samples have {', '.join(tensors)}; "
            f"expected input_ids, labels or shift_labels, and at most {', '.join(OTHERS)}; leave Shapes out"
        )
    for name, values in labels.items():
        if values.is_floating_point() or not values.dtype.is_signed:
            raise PlanError(
                f"Shapes fills microbatches up with {name} of {IGNORED_LABEL}, and those of samples are "
                f"{values.dtype}; give signed whole numbers, or leave Shapes out"
            )
    return tensors | {name: torch.full_like(values, IGNORED_LABEL) for name, values in labels.items()}
