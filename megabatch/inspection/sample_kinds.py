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
    if not isinstance(value, list | tuple):
        return ()
    inner_shape = shape_of(value[0]) if value else ()
    return (len(value), *inner_shape)


def kind_of(sample: Any, padded: Container[str]) -> Hashable:
    """Return the keys of a sample and the sizes that are not padded: all but the first, and all of images."""
    # A sample that is no mapping is refused when it is collated.
    if not isinstance(sample, Mapping):
        return None
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
    if isinstance(dtype, torch.dtype):
        return dtype.is_floating_point
    return dtype is float or getattr(dtype, "kind", "") == "f"


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
    microbatches: list[tuple[int, ...]] = []
    for samples in members.values():
        lengths_of_kind = [lengths[sample] for sample in samples]
        plan = plan_share(lengths_of_kind, micro_batch_size, max_microbatch_tokens, cost)
        microbatches += [tuple(map(samples.__getitem__, rows)) for rows in plan.microbatches]
    # The longest come first, as without kinds.
    microbatches.sort(key=lambda rows: max(map(lengths.__getitem__, rows)), reverse=True)
    return Plan(tuple(microbatches), tuple(lengths), tuple(range(len(lengths))))
