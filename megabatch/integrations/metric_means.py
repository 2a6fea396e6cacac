"""A loss that another library knows as a mean, as a sum and its count."""

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megabatch.batching.samples import IGNORED_LABEL, Microbatch
from megabatch.errors import LossContractError
from megabatch.losses import contract
from megabatch.losses.contract import LossFunction, Term

Mean = Callable[[Any, Any], Any]  # a scalar tensor, of a model and a microbatch
Count = Callable[[Any], Any]  # what a microbatch's mean is over
GIVE = "give loss_fn=, which returns (total, weight)"


def times_count(mean: Mean, count: Count) -> LossFunction:
    """The loss whose total is ``mean * count`` and whose weight is ``count``.

    The mean may be 0 / 0 where there is nothing to count, if its gradient is not, as with torch's cross-entropy.
    """

    @contract.loss(weigh=count)
    def total_and_count(model: nn.Module, microbatch: Microbatch) -> Term:
        weight = count(microbatch)
        found = mean(model, own_entries(microbatch))
        return Term(torch.where(torch.as_tensor(weight > 0, device=found.device), found, 0.0) * weight, weight)

    return total_and_count


def own_entries(microbatch: Microbatch) -> Microbatch:
    """The same mapping with entries of its own, since a loss may take the labels out."""
    return copy.copy(cast(Any, microbatch)) if isinstance(microbatch, Mapping) else microbatch


def count_labels(microbatch: Microbatch, *, shifted: bool) -> Tensor:
    """Labels that are not -100, or rows where there are no labels or each row has one number.

    Args:
        shifted: The model is causal and never uses the label at position 0.
    """
    named: Mapping[str, Any] = cast(Any, microbatch) if isinstance(microbatch, Mapping) else {}
    labels: Any = named.get("shift_labels")
    if labels is None and (labels := named.get("labels")) is not None and shifted and labels.ndim > 1:
        labels = labels[..., 1:]
    if labels is None:
        return count_rows(microbatch)
    if labels.is_floating_point() and labels.numel() == len(labels):
        return torch.tensor(len(labels))  # numbers to be met, of which -100 is one
    return (labels != IGNORED_LABEL).sum()


def count_rows(microbatch: Microbatch) -> Tensor:
    """Size of dim 0 of the first tensor."""
    leaves = microbatch.values() if isinstance(microbatch, Mapping) else pytree.tree_leaves(microbatch)
    for leaf in cast(Any, leaves):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return torch.tensor(len(leaf))
    raise LossContractError(
        f"a microbatch is a {type(microbatch).__name__} without tensors, so what a mean is over cannot be counted; "
        f"override count_targets(), or {GIVE}"
    )
