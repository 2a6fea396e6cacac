"""Mappings of tensors: a sample, and a batch with samples in dim 0."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.errors import PlanError
from megabatch.inspection.odd_values import no_mapping_error, not_dense_error


def as_dict(sample: Any) -> dict[str, Any]:
    """Return a mapping as a dict. Raises `PlanError` for another sample, and for one that is empty."""
    # An exact dict is the usual sample.
    if type(sample) is dict and sample:
        return sample
    mapping = dict(cast(Mapping[str, Any], sample).items()) if isinstance(sample, Mapping) else {}
    if not mapping:
        raise no_mapping_error(sample)
    return mapping


def checked_rows(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a batch of tensors as a dict. Raises `PlanError` unless all are dense and have samples in dim 0."""
    batch = dict(batch.items())
    if not batch:
        raise PlanError(
            "the batch is a mapping without tensors; expected samples in dim 0 of each. For no samples give []"
        )
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            kind = "a scalar" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise PlanError(f"{name!r} of the batch is {kind}; expected a tensor with samples in dim 0")
        if value.layout != torch.strided or value.is_nested:
            raise not_dense_error(f"{name!r} of the batch", value)
    sizes = {name: len(value) for name, value in batch.items()}
    if len(set(sizes.values())) > 1:
        raise PlanError(f"the tensors of the batch differ in dim 0: {sizes}; expected one row per sample in each")
    return batch


def is_dense(value: Any) -> bool:
    """Return True for a plain tensor that is not sparse and not nested."""
    return type(value) is Tensor and value.layout == torch.strided and not value.is_nested
