"""Rate: the learning rate, where it follows how many samples an update has."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megabatch.train.config import OptimConfig
from megabatch.train.config.batch_size import Sizes


def rate_factor(optim: OptimConfig, sizes: Sizes, size: int) -> float:
    """What the learning rate is multiplied by in an update of ``size`` samples; optim.lr is of the first size."""
    return 1.0 if optim.lr_follows_batch is None else math.sqrt(size / sizes.sizes[0])


def follow(optimizer: Optimizer, scheduler: LRScheduler, factor: float) -> None:
    """Set the rates for the next update: the scheduler's times ``factor``. The scheduler counts from its own."""
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor
