"""Exact updates in a loop of Accelerate's: what it has prepared is taken as it is, but stepped once per update."""

from typing import Any

from torch import nn

from megabatch.accumulator import GradientAccumulator
from megabatch.errors import MegabatchError, PlanError
from megabatch.learner import Learner

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
except ModuleNotFoundError:
    raise MegabatchError(
        "megabatch.integrations.accelerate needs accelerate, which is not installed: pip install accelerate"
    ) from None


def learner(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    *,
    scheduler: Any = None,
    max_norm: float | None = None,
    **cut: Any,
) -> Learner:
    """A `Learner` for what ``accelerator.prepare`` gave: its updates are exact, and the schedule moves once with each.

    A prepared scheduler would move ``num_processes`` times, so what it wraps is stepped; ``accelerator.save_state`` and
    ``load_state`` hold the same objects. Neither ``accelerator.backward`` nor ``accumulate`` is called, so
    ``gradient_accumulation_steps`` says nothing. Give samples to the ranks by `UpdateSampler`, in a DataLoader that is
    not prepared: a prepared one deals them once more, and repeats some.

    Args:
        model: Prepared, or not.
        optimizer: Any torch optimizer, prepared or not.
        scheduler: Prepared or not; None where there is none.
        max_norm: Clips each update's gradient to this norm.
        cut: `GradientAccumulator`'s arguments: ``max_microbatch_tokens``, ``micro_batch_size``, ``collate``, ...

    Raises `PlanError` for float16 and for what `GradientAccumulator` refuses.
    """
    if accelerator.mixed_precision in ("fp16", "fp8"):
        raise PlanError(
            f"the Accelerator has mixed_precision={accelerator.mixed_precision!r}, which loses small gradients; "
            'give mixed_precision="bf16"'
        )
    inner_optimizer = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
    inner_scheduler = scheduler.scheduler if isinstance(scheduler, AcceleratedScheduler) else scheduler
    gradient = GradientAccumulator(model, **cut)
    return Learner(model, inner_optimizer, gradient, scheduler=inner_scheduler, max_norm=max_norm)
