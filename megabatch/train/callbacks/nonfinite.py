"""Nonfinite: an update whose loss or gradient is not finite is an error, or is skipped, or is made again without the
samples at fault, as update.on_nonfinite says."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megabatch import Learner, MegabatchError, Plan, Term, Update
from megabatch.autotune import ModuleSnapshot
from megabatch.losses import LossFunction
from megabatch.train.callbacks.jsonl_log import Journal
from megabatch.train.callbacks.metrics import Row
from megabatch.train.callbacks.nonfinite_search import Asked, Item, problem_of, rest_of
from megabatch.train.checkpoints.mid_update import InCalls
from megabatch.train.config import Config
from megabatch.train.messages import count
from megabatch.train.model.build import ParallelModel
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

FILE_NAME = "skipped.jsonl"
MAX_IN_A_ROW = 10  # skipped updates


@dataclass(frozen=True)
class Made:
    """What became of an update."""

    update: Update
    plan: Plan  # of this rank
    num_skipped: int = 0  # samples that were left out, over all ranks
    is_skipped: bool = False  # all of them

    def row(self, row: Row) -> Row:
        """The update's row, with the number of samples left out where there are any, and None for what is no number."""
        if not self.num_skipped:
            return row
        finite = {
            key: None if isinstance(each, float) and not math.isfinite(each) else each for key, each in row.items()
        }
        stepped = 0 if self.is_skipped else row["num_samples"]
        return finite | {"num_samples": stepped, "skipped_samples": self.num_skipped}


class Making:
    """Makes one update after the other; each method but `words` is collective."""

    def __init__(
        self, config: Config, learner: Learner, loss_fn: LossFunction, laid: ParallelModel, in_calls: InCalls,
        ranks: Ranks, console: Console,
    ) -> None:  # fmt: skip
        self._config, self._learner, self._loss_fn, self._laid = config, learner, loss_fn, laid
        self._in_calls, self._ranks, self._console = in_calls, ranks, console
        self._plan = Plan((), ())  # of the update that was made last
        self._num_in_a_row = 0
        self.skipped = Journal(Path(config.run.folder) / FILE_NAME, enabled=ranks.is_main)

    def run(self, batch: Sequence[Any], names: Callable[[], list[str]]) -> Made:
        """Make the next update of this rank's samples, which ``names`` names, and step it where it is finite."""
        how = self._config.update.on_nonfinite
        kept = [] if how == "raise" else [ModuleSnapshot(module) for module in self._laid.base.modules()]
        update = self._step(batch)
        step, plan, reason = self._learner.step, self._plan, problem_of(update)
        if reason is None:
            self._num_in_a_row = 0
            return Made(update, plan)
        if how == "raise":
            raise MegabatchError(f"update {step} was not stepped: {reason}; lower optim.lr or look at its samples")
        asked = Asked(batch, self._ranks)
        mended = self._without_culprits(update, asked, kept) if how == "skip_microbatch" else None
        if mended is None:
            self._begin_again(kept)
            self._learner.step = step
            self._tell(step, reason, asked.names(names(), asked.items), is_whole=True)
            return Made(update, plan, len(asked.items), is_skipped=True)
        made, left_out = mended
        self._tell(step, reason, asked.names(names(), left_out), is_whole=False)
        return Made(made, self._plan, len(left_out))

    def words(self) -> list[str]:
        """What the whole run has left out, to be said at its end."""
        rows = self.skipped.rows()
        samples, num_whole = sum(len(row["samples"]) for row in rows), sum(row["is_whole"] for row in rows)
        text = (
            f"{count(len(rows), 'update')} not finite, {num_whole} skipped whole: {count(samples, 'sample')} left out"
        )
        return [f"{text} ({FILE_NAME})"] if rows else []

    def _without_culprits(
        self, update: Update, asked: Asked, kept: Sequence[ModuleSnapshot]
    ) -> tuple[Update, list[Item]] | None:
        """The update of the other samples, and those left out; None where that is none either."""
        before = self._learner.step - 1

        def is_bad(items: Sequence[Item]) -> bool:
            self._begin_again(kept)
            self._accumulate(asked.part(items), before + 1)
            return problem_of(self._learner.gradient.finalize(max_norm=self._learner.max_norm)) is not None

        def again(items: Sequence[Item]) -> Update:
            self._begin_again(kept)
            self._learner.step = before
            return self._step(asked.part(items))

        rest = rest_of(update, asked, is_bad, again)
        return None if rest is None else (rest.update, rest.left_out)

    def _begin_again(self, kept: Sequence[ModuleSnapshot]) -> None:
        """As it was before the update."""
        for each in kept:
            each.put_back()

    def _step(self, batch: Sequence[Any]) -> Update:
        gradient = self._learner.gradient
        fit = gradient.fit
        self._accumulate(batch, self._learner.step + 1)
        if (chosen := gradient.fit) is not None and chosen is not fit:
            self._console.say(f"update.{chosen.explain()}")
        return self._learner.optim_step()

    def _accumulate(self, batch: Sequence[Any], step: int) -> None:
        def call(samples: Sequence[Any], number: int) -> Mapping[str, Term]:
            later = [number] if number else []
            torch.manual_seed(self._ranks.seed(self._config.run.seed, step, *later))  # the dropout of a resumed run
            return self._learner.forward_backward(samples, self._loss_fn)

        with self._laid.losses():
            self._plan = self._in_calls(batch, call)

    def _tell(self, step: int, reason: str, names: list[str], *, is_whole: bool) -> None:
        """Write down what was left out, and say it. Raises where too many updates were skipped in a row."""
        self.skipped.append({"step": step, "reason": reason, "is_whole": is_whole, "samples": names})
        first = f"{names[0]}{', ...' if len(names) > 1 else ''}"
        what = "skipped" if is_whole else f"made without {len(names)} of its samples ({first})"
        self._console.warn(f"update {step} was {what}: {reason}")
        self._num_in_a_row = self._num_in_a_row + 1 if is_whole else 0
        if self._num_in_a_row == MAX_IN_A_ROW:
            raise MegabatchError(
                f"{MAX_IN_A_ROW} updates in a row were skipped, the last of them {step} ({reason}): it is not "
                "the samples but the weights; go on from an earlier checkpoint with a lower optim.lr"
            )
