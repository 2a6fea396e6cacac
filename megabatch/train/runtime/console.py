"""The console of a run, and its log.

A progress bar on a terminal, plain lines elsewhere. Only the main rank speaks.
"""

import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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

SECONDS_TO_SHOW = 2.0  # what is over sooner is not worth a line
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_WRITES = 0.25  # of the log, and of the bar: lines of faster updates wait for each other


@dataclass
class Counted:
    """Something that takes a while, and how far it is."""

    what: str
    total: int | None
    unit: str
    start: float  # on time.monotonic's clock
    done: int = 0
    task: TaskID | None = None  # of the bar, once it is shown
    is_shown: bool = False

    def words(self) -> str:
        """Return how far it is, as a line."""
        of = "" if self.total is None else f" of {self.total:,}"
        counted = f"{self.done:,}{of} {self.unit}, " if self.total is not None or self.done else ""
        return f"{self.what}: {counted}{time.monotonic() - self.start:.0f} s"


class CountColumn(MofNCompleteColumn):
    """The count of the bar; empty for work that is not counted."""

    def render(self, task: Task) -> Text:
        if (counted := task.fields.get("counted")) is not None:
            return counted
        return super().render(task) if task.total is not None or task.completed else Text("")


class Console:
    """Says lines, and shows how far a run is; what was said before `log_to` is logged then."""

    def __init__(self, *, enabled: bool, loss_digits: int) -> None:
        self._enabled = enabled
        self._loss_digits = loss_digits
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._lock = threading.RLock()  # a line of progress comes from a thread of its own
        self._log: RetryingAppender | None = None
        self._unlogged, self._next_write = "", 0.0
        self._progress: Progress | None = None
        self._num_live = 0  # blocks that keep the one live display of the terminal up
        self._updates: TaskID | None = None
        self._num_updates: int | None = None
        self._work: Callable[[int], int] = int  # of a number of updates
        if enabled and sys.stdout.isatty() and not self._rich.is_dumb_terminal:
            self._progress = Progress(*columns(), console=self._rich, expand=True)

    def say(self, text: str) -> None:
        """One or several lines, above the bar if there is one, and in the log."""
        if self._enabled:
            self._log_text(text)
            self._write_log()
            self._print(text)

    def warn(self, text: str) -> None:
        """Say a line that nobody should overlook."""
        self.say(f"warning: {text}")

    def log_to(self, path: Path) -> None:
        """Append to the file all that was said, and will be."""
        self._log = RetryingAppender(path)
        self._write_log()

    @contextmanager
    def logged_failure(self) -> Generator[None, None, None]:
        """Log the error that ends the run, and pass it on."""
        try:
            yield
        except BaseException as error:
            if self._enabled:
                self._log_text(f"stopped by {type(error).__name__}: {error}".removesuffix(": "))
                self._write_log()
            raise

    @contextmanager
    def bar(self, start: int, total: int | None, work: Callable[[int], int] = int) -> Generator[None, None, None]:
        """Show the bar, at ``start`` of ``total`` updates, until the block ends.

        ``work(n)`` is the work of n updates, and the remaining time follows from it.
        """
        if self._progress is None:
            yield
            return
        self._num_updates, self._work = total, work
        self._updates = self._progress.add_task(
            "update", completed=work(start), total=None if total is None else work(total), words="",
            counted=self._counted(start),
        )  # fmt: skip
        with self._live():
            yield

    @contextmanager
    def progress(self, what: str, total: int | None, unit: str) -> Generator[Callable[[int], None], None, None]:
        """Show how far the block is, once it has lasted two seconds. Yields a function that counts ``n`` more."""
        counted = Counted(what, total, unit, time.monotonic())

        def advance(n: int) -> None:
            counted.done += n

        with self._shown(counted) if self._enabled else nullcontext():
            yield advance

    def update(self, row: Mapping[str, Any]) -> None:
        """Say an update. Updates that follow each other quickly are logged together, and the bar shows the last."""
        if not self._enabled:
            return
        words, step, is_due = self._words(row), row["step"], time.monotonic() >= self._next_write
        self._log_text(f"update {step:>4}  {words}")
        if self._progress is None or self._updates is None:
            self._print(f"update {step:>4}  {words}")
        elif is_due or step == self._num_updates:
            counted = self._counted(step)
            self._progress.update(self._updates, completed=self._work(step), words=words, counted=counted)
        if is_due:
            self._write_log()
            self._next_write = time.monotonic() + SECONDS_BETWEEN_WRITES

    def _counted(self, step: int) -> Text:
        of = "?" if self._num_updates is None else self._num_updates
        return Text(f"{step:>{len(str(of))}}/{of}", style="progress.download")

    def evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """Say the evaluation of a set."""
        self.say(f"update {step:>4}  {row['set']} {self._evaluation_words(row)}")

    @contextmanager
    def _shown(self, counted: Counted) -> Generator[None, None, None]:
        """Show it from a thread, since a block may take long without counting anything."""
        ended = threading.Event()
        thread = threading.Thread(target=self._show_until, args=(counted, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if counted.task is not None and self._progress is not None:
                self._progress.remove_task(counted.task)
                self._leave_live()
        if counted.is_shown and counted.task is None:
            self._print(counted.words())

    def _show_until(self, counted: Counted, ended: threading.Event) -> None:
        if ended.wait(SECONDS_TO_SHOW):
            return
        counted.is_shown = True
        if self._progress is None:
            self._print_until(counted, ended)
        else:
            counted.task = self._progress.add_task(
                counted.what, completed=counted.done, total=counted.total, words=counted.unit
            )
            self._enter_live()
            while not ended.wait(0.1):
                self._progress.update(counted.task, completed=counted.done)

    def _print_until(self, counted: Counted, ended: threading.Event) -> None:
        try:
            self._print(counted.words())
            while not ended.wait(SECONDS_BETWEEN_LINES):
                self._print(counted.words())
        except OSError:  # nobody reads any more; the main thread's next line finds that out too
            return

    @contextmanager
    def _live(self) -> Generator[None, None, None]:
        self._enter_live()
        try:
            yield
        finally:
            self._leave_live()

    def _enter_live(self) -> None:
        with self._lock:
            self._num_live += 1
            if self._progress is not None and self._num_live == 1:
                self._progress.start()

    def _leave_live(self) -> None:
        with self._lock:
            self._num_live -= 1
            if self._progress is not None and self._num_live == 0:
                self._progress.stop()

    def _print(self, text: str) -> None:
        with self._lock:
            if self._progress is not None:
                self._rich.print(text, markup=False)
            else:
                with unless_full():
                    print(text, flush=True)

    def _log_text(self, text: str) -> None:
        time_utc = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        self._unlogged += "".join(f"{time_utc}  {line}\n" for line in text.splitlines())

    def _write_log(self) -> None:
        if self._log is not None and self._unlogged:
            self._log.append(self._unlogged.encode())
            self._unlogged = ""

    def _words(self, row: Mapping[str, Any]) -> str:
        if row["loss"] is None:
            why = "not finite" if "skipped_samples" in row else "nothing to learn in its samples"
            return f"{why}: not stepped"
        norm = "" if row["grad_norm"] is None else f"  grad norm {row['grad_norm']:.3f}"
        return (
            f"loss {row['loss']:.{self._loss_digits}f}{norm}  lr {row['lr']:.2e}  "
            f"{row['num_samples']} samples in {row['num_microbatches']} microbatches  {speed_words(row)}"
        )

    def _evaluation_words(self, row: Mapping[str, Any]) -> str:
        """Return the loss and whatever else was measured."""
        numbers = {key.removeprefix("eval_"): row[key] for key in row if key.startswith("eval_")}
        if "loss" in numbers and numbers["loss"] is None:
            return "has nothing to predict: no loss"
        digits = {"loss": f".{self._loss_digits}f", "perplexity": ".4g", "accuracy": ".1%"}
        words = [
            f"{name} {format(number, digits.get(name, '.6g'))}"
            for name, number in numbers.items()
            if number is not None
        ]
        if "num_target_tokens" in row:
            words.append(f"over {row['num_target_tokens']:,} target tokens")
        return "  ".join(words)


def speed_words(row: Mapping[str, Any]) -> str:
    """Return the throughput of an update, in tokens or samples."""
    if "tokens_per_second" in row:
        return f"padding {row['padding']:.1%}  {row['tokens_per_second']:,.0f} real tokens/s"
    return f"{row['samples_per_second']:,.1f} samples/s"


@contextmanager
def unless_full() -> Generator[None, None, None]:
    """Drop output that a full disk does not take. The log has it once there is room."""
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise


def columns() -> list[ProgressColumn]:
    """Return the columns of the bar. The words have the room that is left, and are cut off."""
    words = TextColumn("{task.fields[words]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    name = TextColumn("{task.description}", table_column=Column(no_wrap=True))
    return [name, CountColumn(), BarColumn(bar_width=20), TimeRemainingColumn(), words]


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
