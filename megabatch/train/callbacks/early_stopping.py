"""Follow the loss on one set: which evaluation is the best, and when to stop early."""

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.config import HELD_OUT, EvalConfig
from megabatch.train.context import BestEvaluation, Callback, RunContext


class EarlyStopping(Callback):
    """Tell the run its best evaluation, and stop it after ``eval.patience`` evaluations without a better one."""

    def __init__(self, context: RunContext) -> None:
        self._watch = context.positions["watch"] = Watch(context.config.eval, context.data.sets)
        context.best = BestEvaluation(self._watch.name)

    def start(self, context: RunContext) -> None:
        """Go on with what the checkpoint has."""
        self._tell(context)

    def after_evaluation(self, context: RunContext) -> None:
        """Take in the evaluation of the watched set."""
        if context.row["set"] == self._watch.name:
            self._watch.update(context.step, context.row["eval_loss"])
            self._tell(context)

    def _tell(self, context: RunContext) -> None:
        context.best = BestEvaluation(self._watch.name, self._watch.best, self._watch.best_step)
        if self._watch.should_stop:
            context.should_stop = True
            context.stop_reason = f"the watched loss has not fallen for {context.config.eval.patience} evaluations"


class Watch:
    """The loss on one set. `update` takes in each evaluation of it.

    An evaluation out of turn, at the end of a run, can be the best. A resumed run does not know it, as a run that was
    never stopped would not.

    Args:
        config: Says which set, and how patient to be.
        names: The sets that there are.
    """

    def __init__(self, config: EvalConfig, names: Collection[str]) -> None:
        self.name = choose_set(config, names)  # of the set; None where there is none
        self._every, self._patience = config.every, config.patience
        self.best: float | None = None  # its lowest loss so far
        self.best_step: int | None = None
        self._num_worse = 0  # evaluations since then
        self._state = self._now()

    def update(self, step: int, loss: float | None) -> None:
        """Take in the loss after ``step`` updates. A loss that is no finite number is never the best."""
        is_best = loss is not None and math.isfinite(loss) and (self.best is None or loss < self.best)
        if is_best:
            self.best, self.best_step = loss, step
        self._num_worse = 0 if is_best else self._num_worse + 1
        if step == 0 or (self._every is not None and step % self._every == 0):
            self._state = self._now()

    @property
    def should_stop(self) -> bool:
        """True after as many evaluations without a better one as ``eval.patience`` says."""
        return self._patience is not None and self._num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, for JSON."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken, or start again if that followed another set."""
        if state["set"] == self.name:
            self.best, self.best_step, self._num_worse = state["best"], state["best_step"], state["num_worse"]
            self._state = self._now()

    def _now(self) -> dict[str, Any]:
        return {"set": self.name, "best": self.best, "best_step": self.best_step, "num_worse": self._num_worse}


def choose_set(config: EvalConfig, names: Collection[str]) -> str | None:
    """Return the set to watch. Raises `MegabatchError` if it does not exist."""
    if config.watch is not None and config.watch not in names:
        near = difflib.get_close_matches(config.watch, names, n=1, cutoff=0.0)
        there = f"the nearest of the sets is {near[0]}" if near else "there is no set: see eval.num_samples, eval.sets"
        raise MegabatchError(f"eval.watch is {config.watch!r}, which is no evaluation set; {there}")
    if config.patience is not None and not names:
        raise MegabatchError("eval.patience is set and there is no evaluation set; set eval.num_samples or eval.sets")
    if config.patience is not None and config.every is None:
        raise MegabatchError("eval.patience is set and eval.every is not, so no evaluation comes in between; set both")
    return config.watch or (HELD_OUT if HELD_OUT in names else next(iter(names), None))
