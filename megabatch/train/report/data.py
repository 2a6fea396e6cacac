"""Data of a run's page, read from its folder while it runs or later."""

import errno
import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.report import encode as columns
from megabatch.train.runtime.files import (
    CONFIG,
    CUTS,
    LOCK,
    LOG,
    METRICS,
    PLAN,
    SKIPPED,
    TIMELINE,
    Row,
    is_evaluation,
    is_file,
    open_file,
    read_file,
    read_rows,
    read_starts,
)

FIRST_KEYS = (
    "step", "loss", "grad_norm", "lr", "tokens_per_second", "tokens_per_second_per_device", "mfu", "samples_per_second",
    "memory_gib",
)  # fmt: skip
# Facts of a start, without paths of the machine.
FACTS = ("num_ranks", "devices", "megabatch", "torch", "python")
# Updates from which the time left is estimated.
RECENT = 100
# Bytes of log.txt in which its end is looked for.
TAIL_BYTES = 16_384
# Beginnings of lines of the log.
GOES_ON = ("update ", "resumed from ", "nothing was saved yet")
ENDED = ("stopped ", "finished ", "the data ran out")
FAILED = re.compile(r"stopped by \w+Error\b")
PLANNED = re.compile(r"(\d+) updates? of ")
PARAMETERS = re.compile(r"([\d,]+) parameters: (\w+)")
UTILIZATION = re.compile(r"MFU: (.*)")
# Settings of the recipe on the page.
SETTINGS = (("update", "global_batch_size"), ("optim", "lr"), ("optim", "name"))
Story = dict[str, Any]


def read_run(folder: Path, *, state: str | None = None, most_updates: int = columns.MOST_UPDATES) -> Story:
    """Return the data of a run's page.

    Args:
        folder: The run's folder.
        state: "running", "ended" or "stopped at update N", of the process that trains. None asks for the run's lock,
            which that process must not do: see `is_running`.
        most_updates: Updates that are drawn; of more, every second, third, ...

    Raises:
        MegabatchError: There is no run, it has no metrics, or a file is damaged.
    """
    check_run(folder)
    with one_line_for_damage(folder):
        # The lock comes first: what is read of a run without a process is final.
        if state is None and is_running(folder):
            state = "running"
        plan, rows, log = plan_of(folder), read_rows(folder / METRICS), end_of_log(folder)
        ended = ended_of(log)
        planned, step = planned_of(plan), last_step(rows)
        return {
            **curves_of(folder, rows, most_updates),
            "cuts": columns.cuts_of(read_rows(folder / CUTS), folder / CUTS),
            "timelines": columns.timelines_of(read_rows(folder / TIMELINE), folder / TIMELINE),
            "skipped": columns.skipped_of(read_rows(folder / SKIPPED)),
            "name": name_of(folder),
            "plan": plan,
            "model": model_of(plan),
            "settings": settings_of(folder),
            "planned": planned,
            "state": final_state(ended, step, planned) if state is None else state,
            "ended": ended,
            "start": start_of(folder),
        }


def read_curves(folder: Path, name: str, most_updates: int) -> Story:
    """Return the part of a run's data that is drawn beside other runs. Raises as `read_run` does."""
    check_run(folder)
    with one_line_for_damage(folder):
        return {**curves_of(folder, read_rows(folder / METRICS), most_updates), "name": name}


@contextmanager
def one_line_for_damage(folder: Path) -> Generator[None]:
    """Raise `MegabatchError` for a file that cannot be read, or that somebody has changed."""
    try:
        yield
    except OSError as error:
        raise MegabatchError(f"cannot read {folder} ({in_one_line(error)}); allow it, or give a run's folder") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise MegabatchError(
            f"a file of {folder} is damaged ({in_one_line(error)}); delete environment.json, or the line that is no row"
        ) from None


def check_run(folder: Path) -> None:
    if not folder.is_dir():
        raise MegabatchError(f"{folder} is no folder; give the folder of a run, for example runs/stdlib")
    if not (folder / METRICS).is_file():
        if any(folder.glob(f"*/{METRICS}")):
            raise MegabatchError(
                f"{folder} holds runs and is none; give one of them, or print a table of all by megabatch runs {folder}"
            )
        raise MegabatchError(f"{folder} has no {METRICS}; give the folder of a run that has begun")


def curves_of(folder: Path, rows: list[Row], most_updates: int) -> Story:
    """Return the updates, evaluated sets, memory and times of a run."""
    updates = [row for row in rows if not is_evaluation(row)]
    shown, every = columns.thinned(updates, most_updates)
    sets = columns.evaluations_of([row for row in rows if is_evaluation(row)])
    predicted = next((row for row in updates if "predicted_peak_gib" in row), {})
    keys = dict.fromkeys([*FIRST_KEYS, *columns.keys_of(shown)])
    return {
        "num_updates": len(updates),
        "every": every,
        "updates": columns.columns_of(shown, (key for key in keys if key not in ("peak_gib", "predicted_peak_gib"))),
        "sets": sets,
        "memory": {key: columns.short(predicted.get(key)) for key in ("step", "peak_gib", "predicted_peak_gib")},
        "is_in_nats": any("perplexity" in curves for curves in sets.values()),
        "counts_tokens": not any("samples_per_second" in row for row in updates),
        "started": started_at(folder),
        "seconds": seconds_of(rows),
        "seconds_per_update": seconds_per_update(updates[-RECENT:]),
        "resumes": resumes_of(updates, read_starts(folder)),
    }


def last_step(rows: Sequence[Row]) -> int:
    return next((row["step"] for row in reversed(rows) if not is_evaluation(row)), 0)


def seconds_of(rows: Sequence[Row]) -> float | None:
    """Return the seconds of training; None for a run of a version that did not write them."""
    return next((row["seconds"] for row in reversed(rows) if "seconds" in row), None)


def seconds_per_update(updates: Sequence[Row]) -> float | None:
    """Return the mean time from one update to the next, evaluations and checkpoints included."""
    timed = [row["seconds"] for row in updates if "seconds" in row]
    return columns.short((timed[-1] - timed[0]) / (len(timed) - 1)) if len(timed) > 1 else None


def started_at(folder: Path) -> str | None:
    """Return the date of the run's first start. Raises `ValueError` for one that is none."""
    date = next(iter(read_starts(folder)), {}).get("time_utc")
    return None if date is None else datetime.fromisoformat(date).isoformat()


def resumes_of(updates: Sequence[Row], starts: Sequence[Row]) -> list[int]:
    """Return the updates after which the run was resumed: those whose next row is the first one of a later start."""
    # ISO 8601 dates in UTC sort as text.
    dates = [str(row.get("time", "")) for row in updates]
    firsts = [bisect_left(dates, start["time_utc"]) for start in starts[1:] if "time_utc" in start]
    return sorted({updates[first]["step"] - 1 for first in firsts if 0 < first < len(dates) and dates[first - 1]})


def plan_of(folder: Path) -> list[str]:
    """Return the lines of plan.txt without their first word; none where a full disk did not take the file."""
    path = folder / PLAN
    text = read_file(path).decode("utf-8", "replace") if is_file(path) else ""
    return [line.removeprefix("plan  ") for line in text.splitlines()]


def model_of(plan: list[str]) -> dict[str, str]:
    """Return the model's class and number of parameters, and the peak of its MFU; "" where there is none."""
    sizes = next((match for line in plan if (match := PARAMETERS.match(line))), None)
    peak = next((match[1] for line in plan if (match := UTILIZATION.match(line))), "")
    return {"peak": peak} | ({} if sizes is None else {"parameters": sizes[1], "name": sizes[2]})


def settings_of(folder: Path) -> dict[str, str]:
    """Return the settings of the recipe that a reader asks for first; none where it cannot be read."""
    try:
        recipe = tomllib.loads(read_file(folder / CONFIG).decode())
    except (OSError, ValueError):
        return {}
    settings = {key: recipe.get(section, {}).get(key) for section, key in SETTINGS}
    return {key: str(value) for key, value in settings.items() if isinstance(value, int | float | str)}


def planned_of(plan: list[str]) -> int | None:
    """Return the planned number of updates; None where it depends on the data."""
    match = PLANNED.match("".join(plan[:1]))
    return None if match is None else int(match[1])


def ended_of(log: Sequence[str]) -> str:
    """Return the log's line about the end of the run; "" while it runs, and after a kill."""
    last = next((line for line in reversed(log) if line.startswith((*GOES_ON, *ENDED))), "")
    return "" if last.startswith(GOES_ON) else last


def end_of_log(folder: Path) -> list[str]:
    """Return the last lines of log.txt, without their dates."""
    path = folder / LOG
    if not is_file(path):
        return []
    with os.fdopen(open_file(path), "rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        return [line.partition("  ")[2] for line in file.read().decode("utf-8", "replace").splitlines()]


def state_of(folder: Path, step: int, planned: int | None) -> str:
    """Return the state of a run that has made ``step`` updates: running, ended, or stopped or failed at an update."""
    if is_running(folder):
        return "running"
    return final_state(ended_of(end_of_log(folder)), step, planned)


def final_state(ended: str, step: int, planned: int | None) -> str:
    """Return the state of a run without a process, by the log's line about its end."""
    if (planned is not None and step >= planned) or (ended and not ended.startswith("stopped by ")):
        return "ended"
    return f"{'failed' if FAILED.match(ended) else 'stopped'} at update {step}"


def is_running(folder: Path) -> bool:
    """Return True if another process holds the run's lock.

    It takes no lock. The process that trains must not call it: closing the file would release that process's lock.
    """
    try:
        with os.fdopen(open_file(folder / LOCK), "rb") as file:
            os.lockf(file.fileno(), os.F_TEST, 0)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def start_of(folder: Path) -> dict[str, str]:
    """Return the devices and versions of the last start."""
    start = next(reversed(read_starts(folder)), {})
    return {key: text_of(start[key]) for key in FACTS if key in start}


def text_of(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{number} x {name}" for name, number in fact.items())
    return str(fact)


def name_of(folder: Path) -> str:
    return as_text(folder.resolve().name)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the names of several runs' folders, with as much of their paths as tells them apart."""
    names = [name_of(folder) for folder in folders]
    if len(set(names)) == len(names):
        return names
    above = os.path.commonpath([folder.resolve() for folder in folders])
    return [as_text(os.path.relpath(folder.resolve(), above)) for folder in folders]


def as_text(name: str) -> str:
    """Return a file's name as text that every page can hold."""
    return name.encode("utf-8", "replace").decode()
