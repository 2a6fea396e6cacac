"""`megabatch runs`: the runs of a folder side by side, from their recipes and metrics."""

import json
import math
import re
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, cast

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import HELD_OUT
from megabatch.train.config.secrets import mask
from megabatch.train.report.data import last_step, plan_of, planned_of, seconds_of, started_at, state_of
from megabatch.train.runtime.console import duration_text, print_line, printable
from megabatch.train.runtime.files import CONFIG, ENVIRONMENT, METRICS, Row, flat, is_evaluation, read_file, read_rows

# A folder with any of these files is a run.
RUN_FILES = (CONFIG, METRICS, ENVIRONMENT)
# Levels of folders in which runs are looked for.
MOST_LEVELS = 3
# Keys that tell runs apart and change nothing in them.
PLACES = ("run.folder", "tracking.name")
COMPARABLE = (
    "data.", "eval.num_samples", "eval.sets", "eval.watch", "loss.", "model.name", "model.tokenizer", "run.seed",
)  # fmt: skip
# The task of a run.
LOSS = "loss.function"
# Characters of a value in the table.
MOST_CHARACTERS = 24
# Keys without a column.
MOST_NAMED = 8
# Keys that have a column, however narrow the terminal is.
LEAST_KEYS = 3
# Width of a table that goes to no terminal.
WIDTH = 160
DAMAGED = "damaged"


@dataclass(frozen=True)
class RunSummary:
    """A run in one row. A number is None where the run has not measured it."""

    name: str
    state: str  # "running", "ended", "stopped at update 9", "failed at update 9" or "damaged"
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])  # values by their dotted keys
    num_updates: int = 0
    set: str | None = None  # the evaluated set whose loss is compared
    best_loss: float | None = None  # the lowest loss on it
    best_step: int | None = None  # after this update
    tokens_per_second: float | None = None  # the median of the updates
    samples_per_second: float | None = None  # the same, where samples are not counted in tokens
    seconds: float | None = None  # of training, over all starts
    started: str | None = None  # the first start, in UTC
    problem: str = ""  # the reason of "damaged"


def print_runs(folder: Path, *, as_json: bool) -> None:
    paths = find_runs(folder)
    names = ["." if path == folder else path.relative_to(folder).as_posix() for path in paths]
    summaries = [summarize(path, name) for path, name in zip(paths, names, strict=True)]
    print_line(json.dumps([asdict(summary) for summary in summaries], indent=1) if as_json else runs_text(summaries))


def find_runs(folder: Path) -> list[Path]:
    """Return the runs in a folder, or the folder itself if it is one, in the order of their names."""
    if not folder.is_dir():
        raise MegabatchError(f"{folder} is no folder; give the folder that holds runs, for example runs")
    parts = {run: re.split(r"(\d+)", str(run)) for run in _runs_below(folder, MOST_LEVELS)}
    # run-9 stands before run-10.
    runs = sorted(parts, key=lambda run: [int(part) if part.isdecimal() else part for part in parts[run]])
    if not runs:
        raise MegabatchError(f"{folder} has no run; give the folder that holds runs, for example runs")
    return runs


def _runs_below(folder: Path, levels: int) -> Iterator[Path]:
    if any((folder / name).is_file() for name in RUN_FILES):
        yield folder
    elif levels:
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                yield from _runs_below(path, levels - 1)


def summarize(folder: Path, name: str) -> RunSummary:
    """Return the summary of a run. A file that cannot be read makes it a damaged run, not an error."""
    try:
        recipe = read_recipe(folder / CONFIG)
        rows = read_rows(folder / METRICS)
        updates, step = [row for row in rows if not is_evaluation(row)], last_step(rows)
        speeds = _median(updates, "tokens_per_second"), _median(updates, "samples_per_second")
        state = state_of(folder, step, planned_of(plan_of(folder)))
        best = best_of(rows, recipe.get("eval.watch"))
        return RunSummary(name, state, recipe, step, *best, *speeds, seconds_of(rows), started_at(folder))
    except (OSError, MegabatchError, TypeError, ValueError, KeyError, AttributeError) as error:
        problem = str(error) if isinstance(error, MegabatchError) else in_one_line(error)
        return RunSummary(name, DAMAGED, problem=problem)


def read_recipe(path: Path) -> dict[str, Any]:
    """Return the values of a run's recipe by their dotted keys; none where it has not been written."""
    if not path.exists() and not path.is_symlink():
        return {}
    # An earlier version masked fewer secrets.
    values = flat(mask(tomllib.loads(read_file(path).decode())))
    return {key: value for key, value in values if value != {}}


def _median(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return median(values) if values else None


def best_of(rows: Sequence[Row], watch: str | None) -> tuple[str | None, float | None, int | None]:
    """Return the set that is compared, its lowest loss, and the update after which it came."""
    losses: dict[str, list[tuple[float, int]]] = {}
    for row in rows:
        if is_evaluation(row) and isinstance(row.get("eval_loss"), float) and math.isfinite(row["eval_loss"]):
            losses.setdefault(str(row["set"]), []).append((row["eval_loss"], row["step"]))
    name = next((set_name for set_name in (watch, HELD_OUT, *losses) if set_name in losses), None)
    return (None, None, None) if name is None else (name, *min(losses[name]))


def differing_keys(summaries: Sequence[RunSummary]) -> list[str]:
    """Return the keys whose values differ between the recipes: of optim and update first, options of functions last."""
    recipes = [summary.recipe for summary in summaries if summary.recipe]
    keys = dict.fromkeys(key for recipe in recipes for key in recipe if key not in PLACES)
    differing = [key for key in keys if len({json.dumps(recipe.get(key)) for recipe in recipes}) > 1]
    return sorted(differing, key=lambda key: (".options." in key, not key.startswith(("optim.", "update."))))


def best_run(summaries: Sequence[RunSummary]) -> RunSummary | None:
    """Return the run with the lowest held-out loss, the first by name of equal ones.

    None if fewer than two have one, or if they are of two losses.
    """
    evaluated = [summary for summary in summaries if summary.best_loss is not None]
    is_one_task = len({run.recipe.get(LOSS) for run in evaluated}) == 1
    if len(evaluated) < 2 or not is_one_task:
        return None
    return min(evaluated, key=lambda run: (cast(float, run.best_loss), run.name))


def runs_text(summaries: Sequence[RunSummary]) -> str:
    """Return a table of the runs, which of them is best, and the reasons of damaged ones."""
    keys, width = differing_keys(summaries), shutil.get_terminal_size((WIDTH, 0)).columns
    num_shown = len(keys)
    while num_shown > LEAST_KEYS and len(table_text(summaries, keys[:num_shown]).partition("\n")[0]) > width:
        num_shown -= 1
    lines = [table_text(summaries, keys[:num_shown]), *notes(summaries, keys, num_shown)]
    return "\n".join([*lines, *(f"{summary.name}: {summary.problem}" for summary in summaries if summary.problem)])


def notes(summaries: Sequence[RunSummary], keys: Sequence[str], num_shown: int) -> list[str]:
    """Return the lines below a table: keys without a column, and the best run with what makes it doubtful."""
    hidden = [*keys[num_shown : num_shown + MOST_NAMED]]
    if len(keys) > num_shown + MOST_NAMED:
        hidden.append(f"and {len(keys) - num_shown - MOST_NAMED} more")
    lines = [f"also different (--json has the values): {', '.join(hidden)}"] if hidden else []
    tasks = dict.fromkeys(summary.recipe.get(LOSS) for summary in summaries if summary.best_loss is not None)
    if len(tasks) > 1:
        lines.append(f"{LOSS} differs, so the losses are of different tasks: {', '.join(map(str, tasks))}")
    for task in tasks:
        best = best_run([summary for summary in summaries if summary.recipe.get(LOSS) == task])
        if best is not None:
            lines.append(f"best: {best.name}, loss {best.best_loss:.4f} on {best.set} after update {best.best_step}")
    reasons = [key for key in keys if key.startswith(COMPARABLE)]
    num_sets = len({summary.set for summary in summaries if summary.set})
    if len(tasks) == 1 and best_run(summaries) and (reasons or num_sets > 1):
        verb = "differ" if len(reasons) > 1 else "differs"
        said = ", ".join(reasons) or "eval.watch"
        lines.append(f"the losses may be of different samples or tokens: {said} {verb}")
    return lines


def comparison_of(summaries: Sequence[RunSummary]) -> dict[str, Any]:
    keys, best = differing_keys(summaries), best_run(summaries)
    head, rows = table_of(summaries, keys)
    lines = notes(summaries, keys, len(keys))
    return {"head": head, "rows": rows, "best": None if best is None else summaries.index(best), "notes": lines}


def table_of(summaries: Sequence[RunSummary], keys: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table; a heading with ">" stands over numbers."""
    head = ["run", "state", *(f">{key}" for key in keys), ">best loss", ">at update", ">tokens/s", ">time", "started"]
    if any(summary.samples_per_second is not None for summary in summaries):
        head[-3] = ">samples/s"
    # A folder's name may hold a line break.
    return head, [[printable(" ".join(cell.split())) for cell in _cells(summary, keys)] for summary in summaries]


def table_text(summaries: Sequence[RunSummary], keys: Sequence[str]) -> str:
    """Return the aligned rows below their headings."""
    head, cells = table_of(summaries, keys)
    rows = [[name.removeprefix(">") for name in head], *cells]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.rjust if name.startswith(">") else str.ljust for name in head]
    return "\n".join(
        "  ".join(pad(cell, width) for pad, cell, width in zip(pads, row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(summary: RunSummary, keys: Sequence[str]) -> list[str]:
    speed = summary.tokens_per_second or summary.samples_per_second
    values = [_value_text(summary.recipe.get(key)) if summary.recipe else "" for key in keys]
    return [
        summary.name,
        summary.state,
        *values,
        _number_text(summary.best_loss, ".4f"),
        _number_text(summary.best_step, "d"),
        "" if speed is None else f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}",
        "" if summary.seconds is None else duration_text(summary.seconds),
        "" if summary.started is None else f"{datetime.fromisoformat(summary.started).astimezone():%Y-%m-%d %H:%M}",
    ]


def _number_text(number: float | None, digits: str) -> str:
    return "" if number is None else format(number, digits)


def _value_text(value: Any) -> str:
    """Return a value of a recipe as its overrides write it, cut off where it is long."""
    text = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
