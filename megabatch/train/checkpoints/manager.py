"""Keeper: what of a run is saved, when, and how a run goes on from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megabatch import Learner, MegabatchError
from megabatch.errors import MicrobatchLimit as Learned
from megabatch.pipeline import Pipeline
from megabatch.train.autotune.choices import Chosen
from megabatch.train.callbacks.early_stopping import Watch
from megabatch.train.callbacks.ema import Average, local
from megabatch.train.checkpoints.metadata import BEST_ONLY, check_same_run, describe_run, read_meta
from megabatch.train.checkpoints.retention import point_to_best
from megabatch.train.checkpoints.run_folder import recipe_text
from megabatch.train.checkpoints.tensor_files import load, states_of
from megabatch.train.checkpoints.writer import Request, Writer
from megabatch.train.config import Config
from megabatch.train.data.load import Data
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import Laid
from megabatch.train.model.frozen import TrainedOnly
from megabatch.train.model.optimizer import decay_steps_of, settings_of
from megabatch.train.runtime.ranks import Ranks

LEARNED = "learned"  # key of a checkpoint's meta: what a microbatch may hold, where memory has run out


class Keeper:
    """Saves a run between two updates and brings it back: the learner, the average, the position, the watch."""

    def __init__(
        self, config: Config, learner: Learner, laid: Laid, average: Average | None, updates: Updates, watch: Watch,
        chosen: Chosen, ranks: Ranks, writer: Writer,
    ) -> None:  # fmt: skip
        self._config, self._folder, self._ranks = config, Path(config.run.folder), ranks
        self._learner, self._updates, self._watch = learner, updates, watch
        whole = StagedLearner(learner, laid) if isinstance(laid.model, Pipeline) else learner
        whole = TrainedOnly(learner, laid.left_out) if laid.left_out else whole
        self._state: dict[str, Any] = {"learner": whole} | ({} if average is None else {"average": average})
        self._keeps_best = config.run.keep_best or (config.run.keep_best is None and config.eval.patience is not None)
        self.chosen, self._writer = chosen, writer

    def keep(self, identity: Mapping[str, Any], *, last: bool) -> None:
        """After an update: save the run if a checkpoint belongs here; collective.

        One does in its turn, at the end, where the evaluation was the best, or where one could not be written before.
        """
        self._writer.poll()
        step = self._learner.step
        in_turn = last or self._in_turn() or self._writer.is_due(step)
        is_best = self._keeps_best and self._watch.best_step == step
        if not in_turn and not is_best:
            return
        self._check_finite(step)
        request = Request(step, states_of(self._state), self._meta(identity, in_turn), is_best, in_turn)
        self._writer.write_last(request) if last else self._writer.write(request)

    def _check_finite(self, step: int) -> None:
        """Raise before weights are saved that are not finite, where nobody has looked at the gradient; collective."""
        if self._learner.max_norm is not None:
            return
        weights = [each for group in self._learner.optimizer.param_groups for each in group["params"]]
        finite = [torch.isfinite(local(each.detach())).all().to(self._ranks.device) for each in weights]
        bad = bool(finite) and not torch.stack(finite).all()  # where the device is waited for, once
        if any(self._ranks.sum([float(bad)])):
            raise MegabatchError(
                f"weights are not finite after update {step}, and are not saved: with update.max_norm = none no "
                "gradient is looked at; set it, or lower optim.lr, and go on from the last checkpoint"
            )

    def finish(self, identity: Mapping[str, Any]) -> None:
        """At the end of a run: save it unless it is saved; collective."""
        self._writer.wait()
        if self._writer.written_step != self._learner.step:
            self.keep(identity, last=True)

    def resume(self, identity: Mapping[str, Any], path: Path) -> None:
        """Bring everything to a whole checkpoint. Raises `MegabatchError` where it is of another run; collective."""
        saved = read_meta(path)
        check_same_run(path, saved, dict(identity))
        self._updates.load_state_dict(saved["updates"])
        self._watch.load_state_dict(saved["watch"])
        load(path, self._state)
        if saved.get(LEARNED) is not None:
            self._learner.gradient.lower_limit(Learned(*saved[LEARNED]))
        if self._keeps_best and self._watch.best_step is not None:  # a kill may have come before the pointer was moved
            point_to_best(self._folder, self._watch.best_step, self._ranks)
        self._writer.go_on(self._learner.step)

    def _meta(self, identity: Mapping[str, Any], in_turn: bool) -> dict[str, Any]:
        """What a checkpoint says of itself, beside its state."""
        place = {"step": self._learner.step, "updates": self._updates.state_dict(), "watch": self._watch.state_dict()}
        chosen, gradient = self.chosen.meta(self._learner.gradient.fit), self._learner.gradient
        return {**identity, **place, **chosen, LEARNED: gradient.oom_limit, BEST_ONLY: not in_turn}

    def _in_turn(self) -> bool:
        every = self._config.run.save_every
        return every is not None and self._learner.step % every == 0


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
    return describe_run(
        model=laid.identity, data=data.identity, settings=settings_of(config), derived=derived,
        recipe=recipe_text(config),
    )  # fmt: skip
