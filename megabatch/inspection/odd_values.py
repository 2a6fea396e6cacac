"""Values of samples that are no dense tensors: numbers, arrays and lists become tensors, and others are refused.

Values that are to fill padding are checked as well.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.errors import PlanError


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


def check_fills(fills: object) -> dict[str, float]:
    """Return padding values by key, none for None. Raises `PlanError` for a value that is no number."""
    if fills is None:
        return {}
    if not isinstance(fills, Mapping):
        raise PlanError(f"Padded got {fills!r:.60}; give {{key: value}}")
    for name, fill in cast(Mapping[Any, Any], fills).items():
        if type(fill) is bool or not isinstance(fill, int | float):
            raise PlanError(f"Padded says {fill!r} for {name!r}; expected a number")
    return dict(cast(Mapping[str, float], fills))


@functools.lru_cache
def can_hold(dtype: torch.dtype, number: float) -> bool:
    """Return True if a dtype holds a number, to its own rounding."""
    if dtype == torch.bool:
        return number in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return abs(number) <= torch.finfo(dtype).max or not math.isfinite(number)
    info = torch.iinfo(dtype)
    return info.min <= number <= info.max and number == int(number) == float(number)
