"""Build the accumulator of a recipe."""

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
from megabatch.train.parallel.wrap import accumulation_of, computing
from megabatch.train.runtime.oom_limit import load_oom_limit

KEYS = {  # the library's name of a setting → the recipe's
    "memory_bytes": "update.memory",
    "OneRow": "update.one_row",
    **{
        name: f"update.{name}"
        for name in (
            "cost", "shapes", "sync", "micro_batch_size", "max_microbatch_tokens", "accumulate_dtype", "same_bits",
        )
    },
}  # fmt: skip
NAMED = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, KEYS))})(?!\w)")


def build_accumulator(
    model: nn.Module | list[nn.Module], config: Config, limit: TunedLimit | None
) -> GradientAccumulator:
    """Build the accumulator of a wrapped model. Collective.

    Args:
        model: The wrapped model, or several.
        config: The recipe.
        limit: The measured limit of a microbatch, if the recipe leaves it open.

    Raises:
        PlanError: with the recipe's names, for settings that this model cannot have.
    """
    with use_recipe_keys(), _autocast_of(model, config):
        gradient = GradientAccumulator(
            model,
            micro_batch_size=config.update.micro_batch_size,
            max_microbatch_tokens=config.update.max_microbatch_tokens if limit is None else limit,
            memory_bytes=memory_bytes_of(config),
            cost=config.update.cost,
            sync=config.update.sync,
            accumulate_dtype=accumulation_of(config.update),
            same_bits=config.update.same_bits,
            collate=collate_of(config),
            shapes=config.update.shapes,
        )
    gradient.lower_limit(load_oom_limit(config.run))
    return gradient


def _autocast_of(model: nn.Module | list[nn.Module], config: Config) -> AbstractContextManager[object]:
    """Return the autocast for an accumulator that runs the model once when it is built, to check a row's samples."""
    if not config.update.one_row or isinstance(model, list):
        return contextlib.nullcontext()
    name = "fsdp2" if isinstance(model, FSDPModule) else "plain"
    return computing(config.model, name, next(model.parameters()).device)


def collate_of(config: Config) -> OneRow | None:
    """Return the function that collates samples; None pads them."""
    return OneRow() if config.update.one_row else None


def memory_bytes_of(config: Config) -> int | None:
    """Return the memory that a rank may use; None stands for nine tenths of what is free."""
    return None if config.update.memory is None else read_bytes("update.memory", config.update.memory)


@contextlib.contextmanager
def use_recipe_keys() -> Generator[None]:
    """Replace the library's names of settings in an error by the recipe's."""
    try:
        yield
    except PlanError as error:
        raise PlanError(NAMED.sub(lambda found: KEYS[found[1]], str(error))) from error
