"""Kinds of samples: those of two kinds are never padded together."""

from collections.abc import Container, Hashable, Mapping
from typing import Any, cast

import torch


def shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a value of a sample: a tensor, an array, or nested lists of numbers."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    is_nested = isinstance(value, list | tuple)
    return (len(value), *(shape_of(value[0]) if value else ())) if is_nested else ()


def kind_of(sample: Any, padded: Container[str]) -> Hashable:
    """Return the keys of a sample and the sizes that are not padded: all but the first, and all of images."""
    if not isinstance(sample, Mapping):
        return None  # which is refused when it is collated
    kind: list[tuple[str, int, tuple[int, ...]]] = []
    for name, value in cast(Mapping[str, Any], sample).items():
        shape = shape_of(value)
        is_image = len(shape) > 2 and name not in padded and _is_floating(value)
        kind.append((str(name), len(shape), shape if is_image else shape[1:]))
    return tuple(sorted(kind))


def _is_floating(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    dtype = getattr(value, "dtype", type(value))
    return (
        dtype.is_floating_point
        if isinstance(dtype, torch.dtype)
        else getattr(dtype, "kind", "") == "f" or dtype is float
    )
