"""Build the accumulator of a recipe."""

import contextlib
import re
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megabatch import Extension, GradientAccumulator
from megabatch.batching import InsideSamples, OneRow
from megabatch.errors import PlanError
from megabatch.planners import Auto, Rows, SameBits, Shapes, Tokens
from megabatch.planning import TunedLimit
from megabatch.train.config import Config
from megabatch.train.config.byte_sizes import read_bytes
from megabatch.train.parallel.wrap import accumulation_of, computing
from megabatch.train.runtime.oom_limit import load_oom_limit

# By setting of the library, the key of the recipe.
KEYS = {
    "memory_bytes": "update.memory",
    "Shapes": "update.shapes",
    "SameBits": "update.same_bits",
    "OneRow": "update.one_row",
    "InsideSamples": "update.long_samples",
    **{
        name: f"update.{name}"
        for name in (
            "cost", "sync", "micro_batch_size", "max_microbatch_tokens", "accumulate_dtype",
        )
    },
}  # fmt: skip
NAMED = re.compile(rf"(?<![\w.])({'|'.join(map(re.escape, KEYS))})(?!\w)")


def build_accumulator(
    model: nn.Module | list[nn.Module], config: Config, limit: TunedLimit | None, extensions: Sequence[Extension] = ()
) -> GradientAccumulator:
    """Build the accumulator of a wrapped model. Collective.

    Args:
        model: The wrapped model, or several.
        config: The recipe.
        limit: The measured limit of a microbatch, if the recipe leaves it open.
        extensions: Of the accumulator.

    Raises:
        PlanError: with the recipe's names, for settings that this model cannot have.
    """
    autocast: AbstractContextManager[object] = contextlib.nullcontext()
    if config.update.one_row and not isinstance(model, list):
        # The accumulator runs the model once when it is built, to check a row's samples.
        name = "fsdp2" if isinstance(model, FSDPModule) else "plain"
        autocast = computing(config.model, name, next(model.parameters()).device)
    batching = OneRow() if config.update.one_row else None
    if config.update.long_samples == "cut":
        batching = InsideSamples()
    with use_recipe_keys(), autocast:
        gradient = GradientAccumulator(
            model, planner=planner_of(config, limit), sync=config.update.sync,
            accumulate_dtype=accumulation_of(config.update), batching=batching, extensions=extensions,
        )  # fmt: skip
    gradient.lower_limit(load_oom_limit(config.run))
    return gradient


def planner_of(config: Config, fit: TunedLimit | None) -> Rows | Tokens | Auto | Shapes | SameBits:
    """Return the planner of a recipe. ``fit`` is the limit that was measured before, if the recipe leaves it open.

    Raises `PlanError` for a recipe with two limits.
    """
    update = config.update
    rows, tokens = update.micro_batch_size, update.max_microbatch_tokens
    if rows is not None and tokens is not None:
        raise PlanError("both of micro_batch_size and max_microbatch_tokens are given; leave one of the two out")
    if rows is not None:
        limit = Rows(rows, update.cost)
    elif isinstance(tokens, int):
        limit = Tokens(tokens, update.cost)
    else:
        limit = Auto(None if update.memory is None else read_bytes("update.memory", update.memory), fit)
    if update.same_bits:
        return SameBits(cast(Rows | Tokens, limit))
    return limit if update.shapes is None else Shapes(update.shapes, limit)


@contextlib.contextmanager
def use_recipe_keys() -> Generator[None]:
    """Replace the library's names of settings in an error by the recipe's."""
    try:
        yield
    except PlanError as error:
        message = re.sub(r"\bShapes\((\d+)\)", r"update.shapes=\1", str(error))
        raise PlanError(NAMED.sub(lambda match: KEYS[match[1]], message)) from error
