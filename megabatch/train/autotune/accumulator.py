"""Gradient: the accumulator that computes an update's gradient, as the recipe says."""

import contextlib
import re
from collections.abc import Generator
from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megabatch import GradientAccumulator
from megabatch.batching import OneRow
from megabatch.errors import PlanError
from megabatch.planning import TunedLimit
from megabatch.train.config import Config
from megabatch.train.config.byte_sizes import read_bytes
from megabatch.train.model.wrap import accumulation_of, computing
from megabatch.train.runtime.oom_limit import load_oom_limit

KEYS = {  # what the library calls a setting → what a recipe does
    "memory_bytes": "update.memory",
    "OneRow": "update.one_row",
    "step_in_backward()": "optim.in_backward",
    **{name: f"update.{name}" for name in ("sync", "micro_batch_size", "max_microbatch_tokens", "accumulate_dtype")},
}
NAMED = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, KEYS))})(?!\w)")


def accumulator_of(
    model: nn.Module | list[nn.Module], config: Config, fit: TunedLimit | None, sync: str | None = None
) -> GradientAccumulator:
    """Of a wrapped model; ``fit`` and ``sync`` are what was chosen where the recipe leaves it open. Collective.

    Raises `PlanError`, in the recipe's words, for settings that this model cannot have.
    """
    with in_words_of_recipe(), trying(model, config):
        gradient = GradientAccumulator(
            model,
            micro_batch_size=config.update.micro_batch_size,
            max_microbatch_tokens=config.update.max_microbatch_tokens if fit is None else fit,
            memory_bytes=cap_of(config),
            sync=sync or config.update.sync,
            accumulate_dtype=accumulation_of(config.update),
            collate=collate_of(config),
        )
    gradient.lower_limit(load_oom_limit(config.run))
    return gradient


def collate_of(config: Config) -> OneRow | None:
    """What makes microbatches of samples; None: they are padded."""
    return OneRow() if config.update.one_row else None


def trying(model: nn.Module | list[nn.Module], config: Config) -> AbstractContextManager[object]:
    """Surrounds the making of an accumulator that tries the model, which may compute under autocast alone."""
    if not config.update.one_row or isinstance(model, list):
        return contextlib.nullcontext()
    name = "fsdp2" if isinstance(model, FSDPModule) else "plain"
    return computing(config.model, name, next(model.parameters()).device)


def cap_of(config: Config) -> int | None:
    """What a rank may use of its device; None: nine tenths of what is free."""
    return None if config.update.memory is None else read_bytes("update.memory", config.update.memory)


@contextlib.contextmanager
def in_words_of_recipe() -> Generator[None]:
    """Give an error of the library the names that settings have in a recipe."""
    try:
        yield
    except PlanError as error:
        raise PlanError(in_keys(str(error))) from error


def in_keys(text: str) -> str:
    """An error of the library, its settings named as a recipe names them."""
    return NAMED.sub(lambda found: KEYS[found[1]], text)
