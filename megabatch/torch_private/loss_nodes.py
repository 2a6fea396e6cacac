"""The nodes of autograd of torch's losses: what they reduce to and divide by."""

import operator
from typing import Any

import torch
from torch import Tensor

IGNORED_LABEL = -100
"""The label of a position without a target: the default ``ignore_index`` of torch's cross-entropy."""


def cross_entropy_weight(loss: Tensor) -> Tensor | None:
    """``NllLossBackward._saved_total_weight``: what torch's cross-entropy divided by, if ``loss`` is its mean.

    None for every other loss, and in a half type, which cannot hold a count.
    """
    node = _mean_cross_entropy(loss)
    weight = None if node is None else node._saved_total_weight
    return weight if weight is not None and weight.dtype in (torch.float32, torch.float64) else None


def is_mean_cross_entropy(loss: Tensor) -> bool:
    """Return True for the mean of torch's cross-entropy without class weights.

    Its backward writes the gradient of targets that count and no other, so without targets the gradient is 0.
    """
    node = _mean_cross_entropy(loss)
    return node is not None and node._saved_weight is None


def _mean_cross_entropy(loss: Tensor) -> Any:
    node = _before_views(loss)
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0") or node._saved_reduction != 1:
        return None
    return node


MEANS = ("MeanBackward0", "MeanBackward1")  # names of the nodes of Tensor.mean
TORCH_LOSSES = (  # names of the nodes of torch's losses that say what they reduce to
    "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0", "HuberLossBackward0", "MseLossBackward0",
    "NllLossBackward0", "NllLoss2DBackward0", "SmoothL1LossBackward0", "SoftMarginLossBackward0",
)  # fmt: skip
reduction_of = operator.attrgetter("_saved_reduction")  # of such a node: 0 for none, 1 for the mean, 2 for the sum
CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
DIFFERENCES = ("HuberLossBackward0", "MseLossBackward0", "SmoothL1LossBackward0")  # losses of predictions and numbers


def targets_of(node: Any) -> tuple[Tensor, Tensor, int | None]:
    """``_saved_target``, ``_saved_self`` and ``_saved_ignore_index`` of the node of a loss of torch.

    Returns:
        The targets, which of them count, and the value that the loss leaves out. A loss of differences leaves none out
        (None). Where its prediction is its target, it counts nothing.
    """
    targets: Tensor = node._saved_target
    if node.name() not in CROSS_ENTROPIES:
        return targets, node._saved_self.detach() != targets, None
    ignored = node._saved_ignore_index
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored  # saved without a sign
    return targets, targets != ignored, ignored


def is_mean_reduction(loss: Tensor) -> bool:
    """Return True if the last operation of ``loss``, before views and casts, is a mean."""
    node = _before_views(loss)
    return node is not None and (node.name() in MEANS or (node.name() in TORCH_LOSSES and reduction_of(node) == 1))


def last_divisor(loss: Tensor) -> float | None:
    """``DivBackward0._saved_other``: the number by which the last operation divides. None for other operations."""
    node = _before_views(loss)
    divisor = getattr(node, "_saved_other", None) if node is not None and node.name() == "DivBackward0" else None
    if not isinstance(divisor, Tensor) or divisor.numel() > 1 or divisor.device.type != "cpu":
        return None
    return float(divisor.detach())


def _before_views(loss: Tensor) -> Any:
    node: Any = loss.grad_fn
    while node is not None and node.name() in ("ToCopyBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    return node
