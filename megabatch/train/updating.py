"""Updating: what happens from an update's samples to its row in the metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megabatch import Learner, MegabatchError, Plan, Update
from megabatch.contract import LossFunction
from megabatch.train import words
from megabatch.train.bound import Compared
from megabatch.train.config import Config
from megabatch.train.console import Console
from megabatch.train.ema import Average
from megabatch.train.metrics import UpdateClock, update_row
from megabatch.train.model.build import Laid
from megabatch.train.ranks import Ranks
from megabatch.train.shortage import split_words


class Updating:
    """Makes one update after the other: the gradient, the step, the average of the weights, and what is said of it.

    Args:
        counts_tokens: Whether a sample's length is its number of tokens.
    """

    def __init__(
        self, config: Config, learner: Learner, loss_fn: LossFunction, laid: Laid, average: Average | None,
        ranks: Ranks, console: Console, *, counts_tokens: bool,
    ) -> None:  # fmt: skip
        self._config, self._learner, self._loss_fn, self._laid = config, learner, loss_fn, laid
        self._average, self._ranks, self._console, self._counts_tokens = average, ranks, console, counts_tokens
        self._compared = Compared(ranks)
        self.clock = UpdateClock()
        self.plan: Plan | None = None  # of the last update

    def run(self, batch: Sequence[Any], epoch: float | None) -> Mapping[str, Any]:
        """Make the next update of this rank's samples; its row. Collective. ``epoch``: passes over the data by then."""
        step, lr = self._learner.step + 1, self._learner.optimizer.param_groups[0]["lr"]
        torch.manual_seed(self._ranks.seed(self._config.run.seed, step))  # the dropout of a resumed run
        self._compared.begin()
        update = self._step(batch, step)
        self.plan = plan = self._learner.gradient.last_plan
        assert plan is not None  # of the call just made
        row = update_row(
            update, plan, step, lr, self.clock.lap(), self._ranks, counts_tokens=self._counts_tokens, epoch=epoch
        )
        return row | self._compared.row(plan.peak_bytes, self._console)

    def say(self, row: Mapping[str, Any]) -> None:
        """Say the row, and what is remarkable about its update. Collective."""
        self._console.update(row)
        if "num_split" in row and self.plan is not None:
            self._console.say(split_words(self._config.run, self.plan, self._learner.gradient.learned, self._ranks))
        if row["num_samples"] < self._config.update.global_batch_size:
            self._console.say(words.short_update_text(row["num_samples"], self._config.update.global_batch_size))

    def _step(self, batch: Sequence[Any], step: int) -> Update:
        gradient = self._learner.gradient
        fit = gradient.fit
        with self._laid.losses():
            self._learner.forward_backward(batch, self._loss_fn)
        if (chosen := gradient.fit) is not None and chosen is not fit:
            self._console.say(f"update.{chosen.explain()}")
        update = self._learner.optim_step()
        stepped = bool(update.finite)
        if not stepped and (problem := update.problem()) is not None:  # problem() waits for the device
            raise MegabatchError(f"update {step} was not stepped: {problem}; lower optim.lr or look at its samples")
        if self._average is not None and stepped:
            self._average.update()
        return update
