"""Command: `megabatch plan RECIPE`, from its arguments to its table."""

import json
from collections.abc import Sequence
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.config.recipe import load_config
from megabatch.train.model.architecture import quiet
from megabatch.train.plan.asked import read_asked
from megabatch.train.plan.rows import Row
from megabatch.train.plan.search import best_of, search
from megabatch.train.plan.subject import Subject, subject_of
from megabatch.train.plan.table import named, show
from megabatch.train.runtime.console import Console


def plan_recipe(recipe: Path, arguments: Sequence[str]) -> list[Row]:
    """Print what fits and what it costs, the best first; the rows. Raises `MegabatchError`."""
    asked = read_asked(arguments)
    config = load_config(recipe, list(asked.overrides))
    console = Console(enabled=not asked.as_json, loss_digits=4)
    with quiet():
        subject = subject_of(config, asked, stated(asked.overrides), console)
        rows = searched(subject, asked.limit_bytes, console)
    if asked.as_json:
        print(json.dumps([row.as_json() for row in rows], indent=2))
    else:
        show(rows, subject, asked, recipe)
    if asked.chart is not None:
        draw(asked.chart, rows, asked.limit_bytes, recipe)
    return rows


def searched(subject: Subject, limit_bytes: int, console: Console) -> list[Row]:
    """The rows, with how far it is."""
    with console.progress("planning", len(subject.grid.choices()), "choices") as advance:
        return search(subject, limit_bytes, advance)


def draw(path: Path, rows: Sequence[Row], limit_bytes: int, recipe: Path) -> None:
    """The best row's memory; or that of the first run, where nothing fits."""
    from megabatch.train.plan.chart import draw_chart  # matplotlib

    row = best_of(rows)
    if row is None or not row.history:
        raise MegabatchError("nothing fits, so there is no memory of a best choice to draw; leave --chart out")
    try:
        draw_chart(path, row, limit_bytes, f"{recipe.stem}: {named(row)}")
    except OSError as error:
        raise MegabatchError(
            f"cannot write --chart {path} ({error.strerror}); name a file that can be written"
        ) from None


def stated(overrides: Sequence[str]) -> set[str]:
    """Keys that the command line states."""
    return {word[2:].partition("=")[0].replace("-", "_") for word in overrides if word.startswith("--")}
