"""`megabatch plan` in this process."""

from collections.abc import Sequence
from pathlib import Path

from megabatch.train.cli.arguments import Plan, options_of
from megabatch.train.config.recipe import split_options
from megabatch.train.plan.request import PlanRequest, read_request
from megabatch.train.plan.search import PlanRow
from megabatch.train.plan.table import plan_recipe


def request_of(words: Sequence[str]) -> PlanRequest:
    """Return what the words after a recipe ask for."""
    return read_request(*split_options(words, *options_of(Plan)))


def plan(recipe: Path, words: Sequence[str]) -> list[PlanRow]:
    """Return the rows that the command prints, the best first."""
    return plan_recipe(recipe, request_of(words))
