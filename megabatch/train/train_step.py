"""Updating: what happens from an update's samples to its row in the metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megabatch import Learner, Plan
from megabatch.losses import LossFunction
from megabatch.train import messages as words
from megabatch.train.autotune.microbatch_limit import MemoryCheck
from megabatch.train.callbacks.ema import Average
from megabatch.train.callbacks.jsonl_log import Journal
from megabatch.train.callbacks.manifest import Manifest
from megabatch.train.callbacks.metrics import FILE_NAME as METRICS
from megabatch.train.callbacks.metrics import MetricsFile, UpdateClock, sums_of, update_row
from megabatch.train.callbacks.microbatch_log import Cuts
from megabatch.train.callbacks.noise_scale import Advice
from megabatch.train.callbacks.nonfinite import Making
from megabatch.train.callbacks.rank_timing import Stragglers, Work
from megabatch.train.callbacks.timeline import Timeline
from megabatch.train.checkpoints.mid_update import Partial
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.updates import Updates
from megabatch.train.model.batch_learning_rate import follow, rate_factor
from megabatch.train.model.build import Laid
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.oom_limit import report_split
from megabatch.train.runtime.ranks import Ranks


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
        self._folder = Path(config.run.folder)
        self._cuts, self._timeline = Cuts(self._folder, ranks), Timeline(self._folder, learner, ranks)
        self._advice = Advice(config, learner, loss_fn, updates, ranks, partial.run)
        self._work, self._stragglers = Work(learner, ranks, laid.wrapper), Stragglers(ranks)
        watched = self._timeline.watching(self._work.watching(loss_fn))
        in_calls = self._timeline.watching_calls(self._advice.run)
        self._making = Making(config, learner, watched, laid, in_calls, ranks, console)
        self._manifest = Manifest(self._folder, ranks, enabled=config.run.manifest)
        self._compared = MemoryCheck(ranks)
        self.clock = UpdateClock()
        self.plan: Plan | None = None  # of the last update

    def run(self, batch: Sequence[Any]) -> Mapping[str, Any]:
        """Make the next update of this rank's samples, the last that were handed out; its row. Collective."""
        updates = self._updates
        lr = self._rate()
        self._compared.begin()
        with self._timeline.update():
            made = self._making.run(batch, lambda: updates.names)
        if self._average is not None and made.update.finite:
            self._average.update()
        self.plan = made.plan
        sums = sums_of(made.plan, self._ranks, self._work.take())
        row = update_row(
            made.update, sums, self._learner.step, lr, self.clock.lap(), self._ranks.device,
            counts_tokens=self._counts_tokens, epoch=updates.epochs,
        )  # fmt: skip
        row = made.row(row) | self._advice.row(made)
        self._stragglers.add(sums)
        self._manifest.add(row, updates)
        self._cuts.add(row["step"], made.plan)
        self._timeline.add(row["step"], made.plan, is_whole=not made.num_skipped)
        return row | self._compared.row(made.plan.peak_bytes, self._console)

    def _rate(self) -> float:
        """The learning rate of the update."""
        learner, optim = self._learner, self._config.optim
        if optim.lr_follows_batch is not None and learner.scheduler is not None:
            factor = rate_factor(optim, sizes_of(self._config.update), self._updates.size)
            follow(learner.optimizer, learner.scheduler, factor)
        return float(learner.optimizer.param_groups[0]["lr"])  # torch takes a tensor, too

    def say(self, row: Mapping[str, Any]) -> None:
        """Say the row, and what is remarkable about its update. Collective."""
        self._console.update(row)
        if "num_split" in row and self.plan is not None:
            self._console.say(report_split(self._config.run, self.plan, self._learner.gradient.oom_limit, self._ranks))
        for line in self._stragglers.words():
            self._console.warn(line)
        num_samples, size = row["num_samples"] + row.get("skipped_samples", 0), self._updates.size
        if num_samples < size:
            self._console.say(words.short_update_text(num_samples, size))

    def cut(self, step: int) -> None:
        """Drop what earlier starts of the run have written of updates after ``step``."""
        for journal in self._journals:
            journal.cut(step)
        self._advice.resume(self._folder / METRICS)

    def flush(self, metrics: MetricsFile) -> None:
        """Write the rows of updates that wait for room on the disk. Raises `OSError` where there is none."""
        metrics.flush()
        for journal in self._journals:
            journal.flush()

    @property
    def _journals(self) -> list[Journal]:
        return [self._making.skipped, *(each.journal for each in (self._manifest, self._cuts, self._timeline))]

    def words(self) -> list[str]:
        """What is to be said of all updates, at the end of the run."""
        return [*self._making.words(), *self._advice.words()]
