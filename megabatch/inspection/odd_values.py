"""Values of samples that are no dense tensors: numbers, arrays and lists become tensors, and others are refused."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.errors import PlanError


def as_dict(sample: Any) -> dict[str, Any]:
    """Return a mapping as a dict. Raises `PlanError` for another sample, and for one that is empty."""
    # An exact dict is the usual sample.
    if type(sample) is dict and sample:
        return sample
    mapping = dict(cast(Mapping[str, Any], sample).items()) if isinstance(sample, Mapping) else {}
    if not mapping:
        raise no_mapping_error(sample)
    return mapping


def to_dense_tensor(name: str, value: Any) -> Tensor:
    """Return a value of a sample as a dense tensor."""
    try:
        if hasattr(value, "keys"):
            raise TypeError("torch would make an empty tensor of a TensorDict of one sample")
        dense = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(
            f"{name!r} of a sample is a {type(value).__name__}; expected a tensor, or numbers. For other samples say "
            "collate= and length= of your own (length=lambda sample: 1 where none has a length)"
        ) from None
    if dense.layout != torch.strided or dense.is_nested:
        raise not_dense_error(f"{name!r} of a sample", dense)
    return dense


def no_mapping_error(sample: Any) -> PlanError:
    """Return the error for a sample that is no mapping of tensors."""
    return PlanError(
        f"a sample is {'empty' if isinstance(sample, Mapping) else f'a {type(sample).__name__}'}; expected a mapping "
        "of tensors. Give such mappings, or say collate= and length= of your own"
    )


def not_dense_error(name: str, tensor: Tensor) -> PlanError:
    """Return the error for a nested or sparse tensor."""
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return PlanError(
        f"{name} is a {kind} tensor; give dense ones, as a list of samples where lengths differ, or collate= and "
        "length= of your own"
    )
