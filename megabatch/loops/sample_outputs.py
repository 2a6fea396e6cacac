"""Outputs of microbatches as outputs of samples, in the order of the batch."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megabatch.errors import PlanError
from megabatch.planning.plan import Plan
from megabatch.torch_private.operations import pytree


def split_outputs(outputs: Sequence[Any], plan: Plan, *, trim: bool = True) -> list[Any]:
    """Return the output of each sample, in the order of the batch.

    Args:
        outputs: One for each microbatch of the plan that is no dummy: a tensor [B, ...], or a tuple or mapping of them.
        plan: The samples of each microbatch, and their lengths.
        trim: Cut padding off, as `GradientAccumulator.forward` describes.

    Raises:
        PlanError: An output without one row per sample, or with ``trim`` without one column per token.
    """
    cut = [rows for rows in plan.microbatches if rows]
    leaves = [pytree.tree_leaves(output) for output in outputs]
    structures = [pytree.tree_structure(output) for output in outputs]
    for leaves_of_output, rows in zip(leaves, cut, strict=True):
        for leaf in leaves_of_output or [None]:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != len(rows):
                returned = f"the shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise PlanError(
                    f"the function of forward() returned {returned} for {len(rows)} samples; return a tensor, or a "
                    "tuple or mapping of tensors, with samples in dim 0"
                )
    outputs_of_samples: list[Any] = [None] * len(plan.lengths)
    for leaves_of_output, structure, rows in zip(leaves, structures, cut, strict=True):
        lengths = plan.lengths_of(rows)
        columns = [_own_columns(leaf, lengths) if trim else leaf for leaf in leaves_of_output]
        for place, row in enumerate(rows):
            outputs_of_samples[row] = pytree.tree_unflatten([column[place] for column in columns], structure)
    return outputs_of_samples


def _own_columns(leaf: Tensor, lengths: Sequence[int]) -> Tensor | list[Tensor]:
    """Return the columns of each sample in a tensor [B, T, ...] or [B, T - 1, ...]. A tensor [B] has none."""
    if leaf.ndim == 1:
        return leaf
    shorter = max(lengths) - leaf.shape[1]
    if shorter not in (0, 1):
        raise PlanError(
            f"the function of forward() returned the shape {tuple(leaf.shape)} for samples padded to {max(lengths)} "
            "tokens; return one column for each token, or for each next token, or give trim=False if dim 1 is another"
        )
    return [row[: length - shorter] for row, length in zip(leaf, lengths, strict=True)]
