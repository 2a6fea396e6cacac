"""`mean`: the loss contract from a loss that returns a mean."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megabatch.errors import LossContractError
from megabatch.losses.contract import PAIR_NAME, JointLoss, LossFunction, Term, counted_weights, takes_divisor, weigh_of
from megabatch.torch_private import cross_entropy_weight


def mean(loss_fn: Callable[[Any, Any], Any], over: Callable[[Any], Any]) -> LossFunction:
    """Return a loss in megabatch's contract from one that returns a mean.

    The total is the mean times its count, and the weight is the count. A microbatch whose count is 0 adds a total of 0
    and a gradient of 0, even if its mean is 0 / 0. The result can be pickled and copied if both functions can.

    Args:
        loss_fn: ``loss_fn(model, microbatch)`` returns the mean, a scalar tensor.
        over: ``over(microbatch)`` counts what the mean is over: targets, elements, samples, or the sum of the weights
            of a weighted mean. It returns a number or a scalar tensor. It sees the collated microbatch on the CPU
            beforehand, and the same microbatch on the device.

    Raises:
        LossContractError: ``loss_fn`` sums and counts already, or takes the divisor. In a call, it returns no scalar.
            If the mean is torch's cross-entropy, its own count is returned as the weight, so an update in which
            ``over`` counts otherwise is refused. `verify` finds a wrong count under any loss.
    """
    if isinstance(loss_fn, JointLoss) or weigh_of(loss_fn) is not None or takes_divisor(loss_fn):
        raise LossContractError(
            "mean() was given a loss that sums and counts, or takes the divisor; give it to forward_backward() as it is"
        )
    return _MeanLoss(loss_fn, over)


class _MeanLoss:
    """A class, since a function that is made inside of another cannot be pickled."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], over: Callable[[Any], Any]) -> None:
        self._loss_fn, self._over = loss_fn, over
        self._has_met_zero = False  # `weigh` has counted 0; on a device, only it can say so without waiting

    def weigh(self, microbatch: Any) -> float:
        """Return the count of a microbatch, before it runs."""
        count = self._count(microbatch)
        self._has_met_zero |= not count
        return float(count)

    def __call__(self, model: Any, microbatch: Any) -> Term:
        count = self._count(microbatch)  # before the loss, which may pop the labels
        found = self._loss_fn(model, microbatch)
        if not isinstance(found, Tensor) or found.numel() != 1:
            seen = (
                f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            )
            raise LossContractError(f"the loss of mean() returns {seen}; return the mean alone, as a scalar")
        found = found.reshape(())
        if not isinstance(count, Tensor):
            if not count:
                _zero_gradients(found, None)
                return Term(found.nan_to_num(0.0, 0.0, 0.0) * 0.0, 0.0)
        elif self._has_met_zero:
            _zero_gradients(found, count)
        weight = cross_entropy_weight(found)
        weight = count if weight is None else weight
        total = found * weight
        return Term(total if not isinstance(count, Tensor) else torch.where(count > 0, total, 0.0), weight)

    def _count(self, microbatch: Any) -> float | Tensor:
        """Return the count: a number, or a scalar on a device, which only that device knows."""
        count = self._over(microbatch)
        if isinstance(count, Tensor) and count.device.type != "cpu" and count.numel() == 1:
            return count.detach().reshape(())
        weights = counted_weights(count)
        if weights.keys() != {PAIR_NAME}:
            raise LossContractError("over of mean() returns a mapping; return one number, what the mean is over")
        return weights[PAIR_NAME]


def _zero_gradients(mean: Tensor, count: Tensor | None) -> None:
    """Replace the gradients of a mean over nothing by zeros: its backward may divide 0 by 0.

    Args:
        mean: The mean, with its graph.
        count: The count on a device, if the host does not know it.
    """
    pending: list[Any] = [mean.grad_fn]
    seen: set[Any] = {None}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            pending.extend(before for before, _ in node.next_functions)
            if (leaf := getattr(node, "variable", None)) is not None:
                handles: list[Any] = []  # a hook removes itself, so that parameters keep none
                handles.append(leaf.register_hook(partial(_zero_if_empty, count, handles)))


def _zero_if_empty(count: Tensor | None, handles: list[Any], gradient: Tensor) -> Tensor:
    handles.pop().remove()
    return torch.zeros_like(gradient) if count is None else torch.where(count > 0, gradient, 0.0)
