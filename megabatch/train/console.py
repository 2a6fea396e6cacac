"""Console: what a person sees. A progress bar on a terminal, a line an update elsewhere; only the main rank speaks."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Says lines, and shows how far a run is."""

    def __init__(self, *, enabled: bool, loss_digits: int) -> None:
        self._enabled = enabled
        self._loss_digits = loss_digits
        self._rich = RichConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        if enabled and sys.stdout.isatty():
            columns = [TextColumn("update"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn()]
            self._progress = Progress(*columns, TextColumn("{task.description}"), console=self._rich)

    def say(self, text: str) -> None:
        """One or several lines, above the bar if there is one."""
        if self._enabled and self._progress is not None:
            self._rich.print(text, markup=False)
        elif self._enabled:
            print(text, flush=True)

    @contextmanager
    def bar(self, start: int, total: int) -> Generator[None, None, None]:
        """Shows the bar, at ``start`` of ``total`` updates, until the block ends."""
        if self._progress is None:
            yield
            return
        self._progress.add_task("", completed=start, total=total)
        with self._progress:
            yield

    def update(self, row: Mapping[str, Any]) -> None:
        """What an update was."""
        if self._progress is None:
            self.say(f"update {row['step']:>4}  {self._words(row)}")
        else:
            self._progress.update(self._progress.task_ids[0], completed=row["step"], description=self._words(row))

    def evaluation(self, step: int, row: Mapping[str, Any]) -> None:
        """What the held-out loss was."""
        loss = f"{row['eval_loss']:.{self._loss_digits}f}"
        self.say(f"update {step:>4}  held-out loss {loss} over {row['num_target_tokens']:,} target tokens")

    def _words(self, row: Mapping[str, Any]) -> str:
        if row["loss"] is None:
            return "no token to learn in its samples: not stepped"
        norm = "" if row["grad_norm"] is None else f"  grad norm {row['grad_norm']:.3f}"
        return (
            f"loss {row['loss']:.{self._loss_digits}f}{norm}  lr {row['lr']:.2e}  "
            f"{row['num_samples']} samples in {row['num_microbatches']} microbatches  padding {row['padding']:.1%}  "
            f"{row['tokens_per_second']:,.0f} real tokens/s"
        )
