"""Optim: what moves the model, how fast, and for how many updates."""

import math
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from megabatch import GradientAccumulator, Learner
from megabatch.train.config import Config, OptimConfig

FLOOR = 0.1  # share of the peak learning rate at which the cosine ends


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW over the model's parameters; only matrices decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2]},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return AdamW(groups, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)


def build_scheduler(optimizer: AdamW, config: OptimConfig, decay_steps: int) -> LambdaLR:
    """A schedule that counts updates; the cosine ends after ``decay_steps`` of them."""
    return LambdaLR(optimizer, lambda step: lr_factor(step, config, decay_steps))


def lr_factor(step: int, config: OptimConfig, decay_steps: int) -> float:
    """Share of the peak learning rate for the update after ``step`` updates."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, decay_steps - config.warmup_steps)
    return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


@dataclass(frozen=True)
class NumUpdates:
    """How many updates there are."""

    of_data: int  # that run.max_epochs passes over the data make
    of_run: int  # that this run makes: fewer with run.max_steps


def count_updates(config: Config, num_samples: int) -> NumUpdates:
    """The updates of the whole run, from its first one on."""
    size, epochs = config.update.global_batch_size, config.run.max_epochs
    match config.update.tail:
        case "step":
            of_data = epochs * -(-num_samples // size)
        case "drop":
            of_data = epochs * (num_samples // size)
        case "carry":
            of_data = epochs * num_samples // size
    return NumUpdates(of_data, min(of_data, config.run.max_steps or of_data))


def settings_of(config: Config) -> dict[str, object]:
    """Every setting but the data and the model that decides what a run learns, by its key; fixed once it has begun."""
    optim = config.optim.model_dump(exclude={"decay_steps"})  # see decay_steps_of
    return {
        "run.seed": config.run.seed,
        **{f"update.{key}": getattr(config.update, key) for key in ("global_batch_size", "tail", "max_norm")},
        **{f"optim.{key}": value for key, value in optim.items()},
    }


def decay_steps_of(config: Config, num_updates: NumUpdates) -> int | None:
    """Updates until the cosine is down; None for a schedule without one."""
    return (config.optim.decay_steps or num_updates.of_data) if config.optim.schedule == "cosine" else None


def build_learner(model: nn.Module, config: Config, num_updates: NumUpdates) -> Learner:
    """The model with all that moves it."""
    gradient = GradientAccumulator(
        model,
        micro_batch_size=config.update.micro_batch_size,
        max_microbatch_tokens=config.update.max_microbatch_tokens,
        sync=config.update.sync,
    )
    optimizer = build_optimizer(model, config.optim)
    scheduler = build_scheduler(optimizer, config.optim, decay_steps_of(config, num_updates) or 1)
    return Learner(model, optimizer, gradient, scheduler=scheduler, max_norm=config.update.max_norm)
