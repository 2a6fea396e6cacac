"""Updating: what happens from an update's samples to its row in the metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megabatch import Learner, Plan
from megabatch.contract import LossFunction
from megabatch.train import words
from megabatch.train.bound import Compared
from megabatch.train.config import Config
from megabatch.train.console import Console
from megabatch.train.data.updates import Updates
from megabatch.train.ema import Average
from megabatch.train.manifest import Manifest
from megabatch.train.metrics import MetricsFile, UpdateClock, update_row
from megabatch.train.model.build import Laid
from megabatch.train.nonfinite import Making
from megabatch.train.partial import Partial
from megabatch.train.ranks import Ranks
from megabatch.train.shortage import split_words


class Updating:
    """Makes one update after the other: the gradient, the step, the average of the weights, and what is said of it.

    Args:
        counts_tokens: Whether a sample's length is its number of tokens.
    """

    def __init__(
        self, config: Config, learner: Learner, loss_fn: LossFunction, laid: Laid, average: Average | None,
        updates: Updates, partial: Partial, ranks: Ranks, console: Console, *, counts_tokens: bool,
    ) -> None:  # fmt: skip
        self._config, self._learner, self._average, self._updates = config, learner, average, updates
        self._ranks, self._console, self._counts_tokens = ranks, console, counts_tokens
        self._making = Making(config, learner, loss_fn, laid, partial.run, ranks, console)
        self._manifest = Manifest(Path(config.run.folder), ranks, enabled=config.run.manifest)
        self._compared = Compared(ranks)
        self.clock = UpdateClock()
        self.plan: Plan | None = None  # of the last update

    def run(self, batch: Sequence[Any]) -> Mapping[str, Any]:
        """Make the next update of this rank's samples, the last that were handed out; its row. Collective."""
        lr, updates = self._learner.optimizer.param_groups[0]["lr"], self._updates
        self._compared.begin()
        made = self._making.run(batch, lambda: updates.names)
        if self._average is not None and made.update.finite:
            self._average.update()
        self.plan = made.plan
        row = update_row(
            made.update, made.plan, self._learner.step, lr, self.clock.lap(), self._ranks,
            counts_tokens=self._counts_tokens, epoch=updates.epochs,
        )  # fmt: skip
        row = made.row(row)
        self._manifest.add(row, updates)
        return row | self._compared.row(made.plan.peak_bytes, self._console)

    def say(self, row: Mapping[str, Any]) -> None:
        """Say the row, and what is remarkable about its update. Collective."""
        self._console.update(row)
        if "num_split" in row and self.plan is not None:
            self._console.say(split_words(self._config.run, self.plan, self._learner.gradient.learned, self._ranks))
        num_samples, size = row["num_samples"] + row.get("skipped_samples", 0), self._config.update.global_batch_size
        if num_samples < size:
            self._console.say(words.short_update_text(num_samples, size))

    def cut(self, step: int) -> None:
        """Drop what earlier starts of the run have written of updates after ``step``."""
        self._making.skipped.cut(step)
        self._manifest.journal.cut(step)

    def flush(self, metrics: MetricsFile) -> None:
        """Write the rows of updates that wait for room on the disk. Raises `OSError` where there is none."""
        metrics.flush()
        self._making.skipped.flush()
        self._manifest.journal.flush()

    def words(self) -> list[str]:
        """What is to be said of all updates, at the end of the run."""
        return self._making.words()
