"""Outputs of microbatches as outputs of samples, in the order of the batch."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megabatch.errors import PlanError
from megabatch.planning.plan import Plan
from megabatch.torch_private import pytree


def split_outputs(outputs: Sequence[Any], plan: Plan, *, trim: bool = True) -> list[Any]:
    """Return the output of each sample, in the order of the batch.

    Args:
        outputs: One for each microbatch of the plan that is no dummy: a tensor [B, ...], or a tuple or mapping of them.
        plan: The samples of each microbatch, and their lengths.
        trim: Cut padding off, as `GradientAccumulator.forward` describes.

    Raises:
        PlanError: An output without one row per sample.
    """
    cut = [rows for rows in plan.microbatches if rows]
    leaves = [pytree.tree_leaves(each) for each in outputs]
    structures = [pytree.tree_structure(each) for each in outputs]
    for each, rows in zip(leaves, cut, strict=True):
        for leaf in each or [None]:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != len(rows):
                seen = f"the shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise PlanError(
                    f"the function of forward() returned {seen} for {len(rows)} samples; return a tensor, or a tuple "
                    "or mapping of tensors, with samples in dim 0"
                )
    longest = [max(plan.lengths_of(rows)) for rows in cut]
    shorter = [_shorter(column, longest) if trim else None for column in zip(*leaves, strict=True)]
    found: list[Any] = [None] * len(plan.lengths)
    for each, structure, rows in zip(leaves, structures, cut, strict=True):
        for place, row in enumerate(rows):
            ends = [None if by is None else plan.lengths[row] - by for by in shorter]
            own = [leaf[place] if end is None else leaf[place, :end] for leaf, end in zip(each, ends, strict=True)]
            found[row] = pytree.tree_unflatten(own, structure)
    return found


def _shorter(column: Sequence[Tensor], longest: Sequence[int]) -> int | None:
    """Return how much shorter dim 1 is than the padded length, 0 or 1. None unless it is so in every microbatch."""
    found = {most - each.shape[1] if each.ndim > 1 else None for each, most in zip(column, longest, strict=True)}
    return found.pop() if found in ({0}, {1}) else None
