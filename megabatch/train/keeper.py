"""Keeper: what of a run is saved, when it is the best, what is kept, and how a run goes on from it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megabatch import Learner, MegabatchError
from megabatch.pipeline import Pipeline
from megabatch.train import checkpoint
from megabatch.train.bound import Bound
from megabatch.train.config import Config
from megabatch.train.data.load import Data
from megabatch.train.data.updates import Updates
from megabatch.train.ema import Average
from megabatch.train.model.build import Laid
from megabatch.train.optim import decay_steps_of, settings_of
from megabatch.train.ranks import Ranks
from megabatch.train.watch import Watch


class Keeper:
    """Saves a run between two updates and brings it back: the learner, the average, the position, the watch."""

    def __init__(
        self, config: Config, learner: Learner, laid: Laid, average: Average | None, updates: Updates, watch: Watch,
        bound: Bound | None, ranks: Ranks,
    ) -> None:  # fmt: skip
        self._config, self._folder, self._ranks = config, Path(config.run.folder), ranks
        self._learner, self._updates, self._watch = learner, updates, watch
        whole = StagedLearner(learner, laid) if isinstance(laid.model, Pipeline) else learner
        self._state: dict[str, Any] = {"learner": whole} | ({} if average is None else {"average": average})
        self._keeps_best = config.run.keep_best or (config.run.keep_best is None and config.eval.patience is not None)
        self._bound = bound
        self.saved_step: int | None = None

    def is_wanted(self, *, last: bool) -> bool:
        """Whether a checkpoint belongs here: in its turn, at the end, or because the evaluation was the best."""
        return self._in_turn(last) or (self._keeps_best and self._watch.best_step == self._learner.step)

    def save(self, identity: Mapping[str, Any], *, last: bool) -> Path:
        """Write a checkpoint, and delete those that it makes superfluous; collective."""
        self.saved_step = step = self._learner.step
        place = {"step": step, "updates": self._updates.state_dict(), "watch": self._watch.state_dict()}
        bound = {} if self._bound is None else replace(self._bound, fit=self._learner.gradient.fit).meta
        meta = {**identity, **place, **bound, checkpoint.BEST_ONLY: not self._in_turn(last)}
        path = checkpoint.save(self._folder, self._state, meta, self._ranks)
        if self._keeps_best and self._watch.best_step == step:
            checkpoint.point_to_best(self._folder, step, self._ranks)
        checkpoint.prune(self._folder, self._config.run.keep_last, self._ranks)
        return path

    def resume(self, identity: Mapping[str, Any]) -> Path:
        """Bring everything to the latest checkpoint. Raises `MegabatchError` where it is of another run; collective."""
        path = checkpoint.latest(self._folder)
        saved = checkpoint.read_meta(path)
        checkpoint.check_same(path, saved, dict(identity))
        self._updates.load_state_dict(saved["updates"])
        self._watch.load_state_dict(saved["watch"])
        checkpoint.load(path, self._state)
        if self._keeps_best and self._watch.best_step is not None:  # a kill may have come before the pointer was moved
            checkpoint.point_to_best(self._folder, self._watch.best_step, self._ranks)
        self.saved_step = self._learner.step
        return path

    def _in_turn(self, last: bool) -> bool:
        every = self._config.run.save_every
        return last or (every is not None and self._learner.step % every == 0)


class StagedLearner:
    """A learner whose model lies in stages, saved as that of the whole model is: with every stage's parameters.

    Tensors are written by the ranks that have them; the optimizer's groups are one list, which all ranks have.
    """

    def __init__(self, learner: Learner, laid: Laid) -> None:
        assert isinstance(laid.model, Pipeline)
        self._learner, self._ranks = learner, laid.model.stage_ranks
        groups = learner.optimizer.param_groups
        seen = self._ranks.exchange_objects([{key: group[key] for key in group if key != "params"} for group in groups])
        if any(each != seen[0] for each in seen):
            raise MegabatchError(
                f"the stages of the pipeline have {' and '.join(str(len(each)) for each in seen)} groups of parameters "
                "in their optimizers, or groups of other settings, which a checkpoint cannot hold; leave every stage "
                "matrices and vectors to train (model.freeze), or set parallel.pp to 1"
            )

    def state_dict(self) -> dict[str, Any]:
        """The learner's state; collective."""
        state = self._learner.state_dict()
        groups = state["optimizer"]["param_groups"]
        names = self._ranks.exchange_objects([group["params"] for group in groups])
        for group, *parts in zip(groups, *names, strict=True):
            group["params"] = [name for part in parts for name in part]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken, in stages or not."""
        self._learner.load_state_dict(state)


def identity_of(config: Config, data: Data, laid: Laid, updates: Updates) -> dict[str, Any]:
    """What makes a run this one, for a resumed one to compare."""
    derived = {"optim.decay_steps": decay_steps_of(config, updates.num_updates)}
    return checkpoint.describe(model=laid.identity, data=data.identity, settings=settings_of(config), derived=derived)
