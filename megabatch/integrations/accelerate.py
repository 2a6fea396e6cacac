"""A `Learner` for objects that Hugging Face Accelerate has prepared."""

from typing import Any

from torch import nn

from megabatch.errors import MegabatchError, PlanError
from megabatch.gradient_accumulator import GradientAccumulator
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
    """Make a `Learner` from prepared objects; its updates are exact, and the schedule steps once with each.

    A prepared scheduler steps ``num_processes`` times, so the learner steps the scheduler inside it.
    ``accelerator.save_state`` and ``load_state`` hold the same objects. The learner calls neither
    ``accelerator.backward`` nor ``accumulate``, so ``gradient_accumulation_steps`` has no effect. Use `UpdateSampler`
    in a DataLoader that is not prepared: a prepared one splits the samples over ranks again, and repeats some.

    Args:
        accelerator: The Accelerator that prepared the objects.
        model: Any model, prepared or not.
        optimizer: Any torch optimizer, prepared or not.
        scheduler: Any scheduler, prepared or not, or None.
        max_norm: Clips each update's gradient to this norm.
        cut: `GradientAccumulator`'s arguments: ``max_microbatch_tokens``, ``micro_batch_size``, ``collate``, ...

    Raises:
        PlanError: For float16, and for everything that `GradientAccumulator` refuses.
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
