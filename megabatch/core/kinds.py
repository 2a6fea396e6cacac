"""Kinds of samples: those of two kinds are never padded together."""

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any, cast

import torch

from megabatch.planning.partition import plan_share
from megabatch.planning.plan import CostModel, Plan


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


def plan_kinds(
    kinds: Sequence[Hashable],
    lengths: Sequence[int],
    micro_batch_size: int | None,
    max_microbatch_tokens: int | None,
    cost: CostModel | None,
) -> Plan:
    """Split one rank's samples as `plan_share`, each kind by itself: no microbatch has samples of two kinds."""
    members: dict[Hashable, list[int]] = {}
    for sample, kind in enumerate(kinds):
        members.setdefault(kind, []).append(sample)
    cut: list[tuple[int, ...]] = []
    for samples in members.values():
        part = plan_share([lengths[sample] for sample in samples], micro_batch_size, max_microbatch_tokens, cost)
        cut += [tuple(samples[row] for row in rows) for rows in part.microbatches]
    cut.sort(key=lambda rows: max(lengths[sample] for sample in rows), reverse=True)  # as without kinds
    return Plan(tuple(cut), tuple(lengths), tuple(range(len(lengths))))
