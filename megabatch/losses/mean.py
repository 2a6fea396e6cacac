"""`mean`: the loss contract from a loss that returns a mean."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megabatch.core.contract import (
    PAIR_NAME,
    CoupledLoss,
    LossFunction,
    Term,
    counted_weights,
    takes_divisor,
    weigh_of,
)
from megabatch.errors import LossContractError
from megabatch.torch_private.loss_nodes import cross_entropy_weight, is_mean_cross_entropy


def mean(loss_fn: Callable[[Any, Any], Any], over: Callable[[Any], Any]) -> LossFunction:
    """Return a loss in megabatch's contract from one that returns a mean.

    The total is the mean times its count, and the weight is the count. A microbatch whose count is 0 adds a total of 0
    and a gradient of 0 if the mean is torch's cross-entropy, which is 0 / 0 there, or finite. The gradient of any other
    0 / 0 is NaN: such an update is refused on a CPU, and not finite elsewhere. The result can be pickled and copied if
    both functions can.

    If the mean is torch's cross-entropy, its own count is returned as the weight, so an update in which ``over`` counts
    otherwise is refused. `verify` finds a wrong count under any loss.

    Args:
        loss_fn: ``loss_fn(model, microbatch)`` returns the mean, a scalar tensor.
        over: ``over(microbatch)`` counts what the mean is over: targets, elements, samples, or the sum of the weights
            of a weighted mean. It returns a number or a scalar tensor. It sees the collated microbatch on the CPU
            beforehand, and the same microbatch on the device.

    Raises:
        LossContractError: ``loss_fn`` sums and counts already, or takes the divisor. In a call, it returns no scalar,
            or the mean over nothing is not finite.
    """
    if isinstance(loss_fn, CoupledLoss) or weigh_of(loss_fn) is not None or takes_divisor(loss_fn):
        raise LossContractError(
            "mean() was given a loss that sums and counts, or takes the divisor; give it to forward_backward() as it is"
        )
    return _MeanLoss(loss_fn, over)


class _MeanLoss:
    """The loss that `mean` returns. It is a class because a function inside of another cannot be pickled."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], over: Callable[[Any], Any]) -> None:
        self._loss_fn, self._over = loss_fn, over

    def weigh(self, microbatch: Any) -> float:
        """Return the count of a microbatch, before it runs."""
        return float(self._count(microbatch))

    def __call__(self, model: Any, microbatch: Any) -> Term:
        count = self._count(microbatch)  # before the loss, which may pop the labels
        mean_loss = self._loss_fn(model, microbatch)
        if not isinstance(mean_loss, Tensor) or mean_loss.numel() != 1:
            description = f"a {type(mean_loss).__name__}"
            if isinstance(mean_loss, Tensor):
                description = f"a tensor of shape {tuple(mean_loss.shape)}"
            raise LossContractError(f"the loss of mean() returns {description}; return the mean alone, as a scalar")
        mean_loss = mean_loss.reshape(())
        is_empty = not isinstance(count, Tensor) and not count
        weight = cross_entropy_weight(mean_loss)
        weight = count if weight is None else weight
        if not is_mean_cross_entropy(mean_loss):
            if is_empty and mean_loss.device.type == "cpu" and not mean_loss.isfinite():
                raise LossContractError(
                    f"the loss of mean() is {float(mean_loss.detach())} where over counts 0, and its gradient may be "
                    "NaN; divide by max(count, 1) in it"
                )
            return Term(mean_loss * weight, weight)  # a mean of 0 / 0 stays NaN on a device: update.finite is False
        has_targets = count > 0 if isinstance(count, Tensor) else mean_loss.new_full((), not is_empty, dtype=torch.bool)
        return Term(torch.where(has_targets, mean_loss * weight, 0.0), weight)

    def _count(self, microbatch: Any) -> float | Tensor:
        """Return the count: a number, or a scalar on a device, which only that device knows."""
        count = self._over(microbatch)
        if isinstance(count, Tensor) and count.device.type != "cpu" and count.numel() == 1:
            return count.detach().reshape(())
        weights = counted_weights(count)
        if weights.keys() != {PAIR_NAME}:
            raise LossContractError("over of mean() returns a mapping; return one number, what the mean is over")
        return weights[PAIR_NAME]
