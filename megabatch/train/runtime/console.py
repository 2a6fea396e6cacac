"""Console: a run's lines and its log. A terminal has a progress bar; only the main rank speaks.

It imports no torch: commands that need none use its exit statuses.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from megabatch.train.runtime.files import DISK_FULL, RetryingAppender

# Exit statuses. The last two are those of a shell for SIGINT and SIGPIPE.
CRASHED, FAILED, INTERRUPTED, UNREAD = 1, 2, 130, 141
# Shorter work is not worth a line.
SECONDS_TO_SHOW = 2.0
SECONDS_BETWEEN_LINES = 5.0
# Characters of a failure's line.
MOST_CHARACTERS = 1200
# Lines of updates in a run, in the log and where there is no terminal.
MOST_LINES = 100
# Seconds between writes of the log and of the bar. Lines of faster updates wait for each other.
SECONDS_BETWEEN_WRITES = 0.25


def printable(text: str) -> str:
    """Return text without what a terminal obeys: names of files and values of recipes may hold escape sequences."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def print_line(text: str, file: TextIO | None = None) -> None:
    """Print lines at once, without what a terminal obeys."""
    print(printable(text), file=file, flush=True)


def failure_text(error: BaseException) -> str:
    """Return the line of a failure. A value of thousands of characters in it loses those in the middle."""
    text, gap = printable(f"megabatch: {error}"), " ... "
    half = (MOST_CHARACTERS - len(gap)) // 2
    return text if len(text) <= MOST_CHARACTERS else f"{text[:half]}{gap}{text[-half:]}"


class FailedError(Exception):
    """The command has failed and has said why; only the exit status is left."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Console:
    """Says lines, and shows how far a run is; what was said before `log_to` is logged then."""

    def __init__(self, *, enabled: bool, loss_digits: int, is_verbose: bool = False) -> None:
        self._enabled, self._loss_digits, self._is_verbose = enabled, loss_digits, is_verbose
        # False if another replica logs for all.
        self.is_logged = True
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._is_live = enabled and sys.stdout.isatty() and not self._rich.is_dumb_terminal
        self._progress = Progress(*columns(), console=self._rich, expand=True, disable=not self._is_live)
        self._lock = threading.RLock()
        # Blocks that keep the one live display of the terminal up.
        self._num_live = 0
        self._log, self._next_write = RetryingAppender(None), 0.0
        # The bar of updates.
        self._updates: TaskID | None = None
        self._num_updates: int | None = None
        # Updates of which one has a line. None: fewer and fewer have.
        self._every: int | None = None
        self._work: Callable[[int], int] = int

    def say(self, text: str, shown: str | None = None) -> None:
        """Print lines, above the bar if there is one, and log them. ``shown`` is printed in place of the text."""
        if self._enabled:
            if self.is_logged:
                self._log_text(text)
                self._log.write()
            self._print(text if shown is None or self._is_verbose else shown, is_cut=shown is not None)

    def warn(self, text: str) -> None:
        """Say a line that nobody should overlook."""
        self.say(f"warning: {text}")

    def log_to(self, path: Path) -> None:
        """Append to the file all that was said, and will be."""
        self._log.path = path
        self._log.write()

    @contextmanager
    def logged_failure(self) -> Generator[None, None, None]:
        """Log the error that ends the run, and pass it on."""
        try:
            yield
        except BaseException as error:
            if self._enabled:
                self._log_text(f"stopped by {type(error).__name__}: {error}".removesuffix(": "))
                self._log.write()
            raise

    @contextmanager
    def bar(self, start: int, total: int | None, work: Callable[[int], int] = int) -> Generator[None, None, None]:
        """Show the bar until the block ends.

        Args:
            start: Updates that are made.
            total: Updates of the run; None: not known.
            work: Returns the work of a number of updates, by which the time left is estimated.
        """
        self._num_updates, self._every = total, None if total is None else -(-total // MOST_LINES)
        if self._is_live:
            self._work = work
            self._updates = self._progress.add_task(
                "update", completed=work(start), total=None if total is None else work(total), words="",
                counted=self._counted(start),
            )  # fmt: skip
        with self._live():
            yield

    @contextmanager
    def progress(self, title: str, total: int | None, unit: str) -> Generator[Callable[[int], None], None, None]:
        """Show how far the block is, once it has lasted two seconds. Yields a function that counts ``n`` more.

        A thread shows it: a block may take long without counting anything.
        """
        task, ended = self._progress.add_task(title, total=total, words=unit, visible=False), threading.Event()
        thread = threading.Thread(target=self._show, args=(task, unit, ended), daemon=True)
        if self._enabled:
            thread.start()
        try:
            yield partial(self._progress.advance, task)
        finally:
            ended.set()
            if self._enabled:
                thread.join()
            self._progress.remove_task(task)

    def update(self, row: Mapping[str, Any]) -> None:
        """Say one in some updates, and show the last on the bar. Lines of fast updates wait, to be logged together."""
        if not self._enabled:
            return
        step, is_due = int(row["step"]), time.monotonic() >= self._next_write
        every = self._every or 10 ** max(0, len(str(step)) - 2)
        if step % every == 0 or step in (1, self._num_updates) or self._is_verbose or row["loss"] is None:
            line = f"update {step:>4}  {update_words(row, self._loss_digits)}"
            if self.is_logged:
                self._log_text(line)
            if self._updates is None or self._is_verbose:
                self._print(line)
        if self._updates is not None and (is_due or step == self._num_updates):
            loss = "not stepped" if row["loss"] is None else f"loss {row['loss']:.{self._loss_digits}f}"
            unit, digits = ("tokens", 0) if "tokens_per_second" in row else ("samples", 1)
            words = f"{loss}  {row[f'{unit}_per_second']:,.{digits}f} {unit}/s"
            counted = self._counted(step)
            self._progress.update(self._updates, completed=self._work(step), words=words, counted=counted)
        if is_due:
            self._log.write()
            self._next_write = time.monotonic() + SECONDS_BETWEEN_WRITES

    def evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        self.say(f"update {step:>4}  {row['set']} {evaluation_words(row, self._loss_digits)}")

    def _counted(self, step: int) -> Text:
        of = "?" if self._num_updates is None else self._num_updates
        return Text(f"{step:>{len(str(of))}}/{of}", style="progress.download")

    def _show(self, task_id: TaskID, unit: str, ended: threading.Event) -> None:
        """In a thread: show a task in the display of a terminal, elsewhere as a line every few seconds."""
        if ended.wait(SECONDS_TO_SHOW):
            return
        task = next(task for task in self._progress.tasks if task.id == task_id)
        # Nobody reads any more; the main thread's next line finds that out too.
        with self._live(), suppress(OSError):
            self._progress.update(task_id, visible=True)
            has_ended = False
            while not has_ended:
                if not self._is_live:
                    self._print(progress_words(task, unit))
                has_ended = ended.wait(SECONDS_BETWEEN_LINES)
            if not self._is_live:
                self._print(progress_words(task, unit))

    @contextmanager
    def _live(self) -> Generator[None, None, None]:
        """Keep the display of a terminal up; blocks may overlap."""
        if not self._is_live:
            yield
            return
        with self._lock:
            self._num_live += 1
            self._progress.start()
        try:
            yield
        finally:
            with self._lock:
                self._num_live -= 1
                if not self._num_live:
                    self._progress.stop()

    def _print(self, text: str, *, is_cut: bool = False) -> None:
        """Print lines; on a terminal one that is too long goes on in the next, unless it ``is_cut``."""
        text = printable(text)
        with self._lock:
            if self._is_live:
                self._rich.print(text, markup=False, no_wrap=is_cut, overflow="ellipsis", soft_wrap=not is_cut)
                return
            try:
                print(text, flush=True)
            except OSError as error:
                # The log gets the line once there is room.
                if error.errno not in DISK_FULL:
                    raise

    def _log_text(self, text: str) -> None:
        date = utc_now()
        self._log.pending += [f"{date}  {line}\n" for line in printable(text).splitlines()]


class CountColumn(MofNCompleteColumn):
    """The count of the bar; empty for work that is not counted."""

    def render(self, task: Task) -> Text:
        if (counted := task.fields.get("counted")) is not None:
            return counted
        return super().render(task) if task.total is not None or task.completed else Text("")


class RemainingColumn(TimeRemainingColumn):
    """The time that is left, with its name; empty where nobody knows it."""

    def render(self, task: Task) -> Text:
        return Text("") if task.time_remaining is None else super().render(task) + " left"


def columns() -> list[ProgressColumn]:
    """Return the columns of the bar. The words have the room that is left, and are cut off."""
    words = TextColumn("{task.fields[words]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    name = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    return [name, CountColumn(), BarColumn(bar_width=20), RemainingColumn(), words]


def progress_words(task: Task, unit: str) -> str:
    of = "" if task.total is None else f" of {task.total:,}"
    counted = f"{task.completed:,.0f}{of} {unit}, " if task.total is not None or task.completed else ""
    return f"{task.description}: {counted}{task.elapsed or 0.0:.0f} s"


def update_words(row: Mapping[str, Any], loss_digits: int) -> str:
    if row["loss"] is None:
        return f"{'not finite' if 'skipped_samples' in row else 'nothing to learn in its samples'}: not stepped"
    norm = "" if row["grad_norm"] is None else f"  grad norm {row['grad_norm']:.3f}"
    speed = (
        f"padding {row['padding']:.1%}  {row['tokens_per_second']:,.0f} real tokens/s"
        if "tokens_per_second" in row
        else f"{row['samples_per_second']:,.1f} samples/s"
    )
    return (
        f"loss {row['loss']:.{loss_digits}f}{norm}  lr {row['lr']:.2e}  "
        f"{count(row['num_samples'], 'sample')} in {count(row['num_microbatches'], 'microbatch')}  {speed}"
    )


def evaluation_words(row: Mapping[str, Any], loss_digits: int) -> str:
    """Return the loss of a set and whatever else was measured."""
    numbers = {key.removeprefix("eval_"): row[key] for key in row if key.startswith("eval_")}
    if numbers.get("loss", 0.0) is None:
        return "has nothing to predict: no loss"
    digits = {"loss": f".{loss_digits}f", "perplexity": ".4g", "accuracy": ".1%"}
    words = [
        f"{name} {format(number, digits.get(name, '.6g'))}" for name, number in numbers.items() if number is not None
    ]
    if "num_target_tokens" in row:
        words.append(f"over {row['num_target_tokens']:,} target tokens")
    return "  ".join(words)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("batch") else "s")


def utc_now() -> str:
    """Return the date and time of now, in UTC, as ISO 8601 writes it."""
    return f"{datetime.now(UTC).replace(tzinfo=None).isoformat(timespec='seconds')}Z"


def duration_text(seconds: float) -> str:
    """Return a time in its two largest units."""
    minutes, hours = divmod(round(seconds), 60), divmod(round(seconds / 60), 60)
    if minutes[0] < 1:
        return f"{seconds:.0f} s"
    if hours[0] < 1:
        return f"{minutes[0]} min {minutes[1]:02} s"
    return f"{hours[0]} h {hours[1]:02} min" if hours[0] < 48 else f"{hours[0] // 24} d {hours[0] % 24:02} h"


def drop_output() -> None:
    """Send stdout nowhere, so that its buffer breaks nothing when the interpreter closes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
