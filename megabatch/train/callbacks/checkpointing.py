"""Save a run between two updates and bring it back: the learner, the average of the weights, the position in the data.

`checkpoints/` knows the files. This module knows when a checkpoint belongs there, and what of the run goes into it.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megabatch import Learner, MegabatchError
from megabatch.errors import MicrobatchLimit, in_one_line
from megabatch.train.callbacks.ema import local
from megabatch.train.checkpoints.metadata import BEST_ONLY, DamagedError, check_same_run, describe_run, read_meta
from megabatch.train.checkpoints.paths import META
from megabatch.train.checkpoints.retention import point_to_best
from megabatch.train.checkpoints.run_folder import recipe_text
from megabatch.train.checkpoints.tensor_files import load, states_of
from megabatch.train.checkpoints.writer import CheckpointRequest, Writer
from megabatch.train.config import Config
from megabatch.train.context import Callback, RunContext
from megabatch.train.data.load import Data
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import ParallelModel
from megabatch.train.model.frozen import TrainedOnly
from megabatch.train.model.optimizer import decay_steps_of, settings_of
from megabatch.train.parallel.wrap import is_pipeline

# Key of a checkpoint's metadata: the microbatch limit after memory has run out.
LEARNED = "learned"


class Checkpointing(Callback):
    """Save every so many updates or minutes, at the end, and where the evaluation was the best. Collective."""

    def __init__(self, context: RunContext) -> None:
        config, learner, model = context.config, context.learner, context.model
        state = StagedLearner(learner, model) if is_pipeline(model.model) else learner
        context.saved["learner"] = TrainedOnly(learner, model.left_out) if model.left_out else state
        context.positions["updates"] = context.updates
        update = config.update
        if update.cost is not None or update.shapes is not None:
            context.positions["gradient"] = GradientState(learner)
        self._save_every, keep_best = config.run.save_every, config.run.keep_best
        self._minutes = config.run.save_every_minutes if self._save_every is None else None
        self._stop = context.stop
        self._keeps_best = config.eval.patience is not None if keep_best is None else keep_best
        self._writer = Writer(config, context.ranks, context.console, context.flush_logs, context.shared)
        context.exits.enter_context(self._writer.closing())
        self._look_at_next()

    def start(self, context: RunContext) -> None:
        """Take note of the checkpoint that the run resumes from."""
        self._wait_for_next()
        if context.checkpoint is not None:
            # A kill may have come before the pointer was moved.
            if self._keeps_best and context.best.step is not None:
                point_to_best(context.folder, context.best.step, context.ranks)
            self._writer.go_on(context.step)

    def after_update(self, context: RunContext) -> None:
        """Save the run if a checkpoint belongs here.

        One does in its turn, after the last update, where the evaluation was the best, or where an earlier one could
        not be written.
        """
        self._writer.poll()
        step, is_last = context.step, context.is_over
        is_turn = self._stop.is_save_due or (self._save_every is not None and step % self._save_every == 0)
        if is_last:
            self._writer.write_last(self._request(context), self._stop)
        elif is_turn or self._writer.is_due(step):
            if context.is_writer:
                self._writer.write(self._request(context))
            self._wait_for_next()
        elif context.is_writer and self._keeps_best and context.best.step == step:
            self._writer.write(self._request(context, in_turn=False))
        self._look_at_next()

    def end(self, context: RunContext) -> None:
        """Save the run unless it is saved."""
        self._writer.wait()
        if self._writer.written_step != context.step:
            self._writer.write_last(self._request(context), self._stop)
        elif self._keeps_best and context.best.step == context.step:
            point_to_best(context.folder, context.step, context.ranks)

    def _wait_for_next(self) -> None:
        """Set the time of the next checkpoint, where minutes decide."""
        self._stop.is_save_due = False
        self._stop.save_at = None if self._minutes is None else time.monotonic() + 60 * self._minutes

    def _look_at_next(self) -> None:
        """Ask to be called after each update while something is to be looked at, else in turn."""
        looks = self._keeps_best or self._writer.is_busy or self._minutes is not None
        self.every = 1 if looks else self._save_every

    def _request(self, context: RunContext, *, in_turn: bool = True) -> CheckpointRequest:
        """Return the checkpoint to write: its state, and what it says of itself. Collective."""
        check_weights(context)
        gradient, states = context.learner.gradient, states_of(context.saved)
        meta = {
            **context.identity,
            "step": context.step,
            **{name: part.state_dict() for name, part in context.positions.items()},
            **({} if context.limit is None else replace(context.limit, fit=gradient.fit).meta),
            LEARNED: gradient.oom_limit,
            BEST_ONLY: not in_turn,
        }
        is_best = self._keeps_best and context.best.step == context.step
        return CheckpointRequest(context.step, states, meta, is_best, in_turn)


def restore(context: RunContext, checkpoint: Path) -> None:
    """Bring the run to a whole checkpoint. Raises `MegabatchError` for another run's. Collective."""
    meta = read_meta(checkpoint)
    check_same_run(checkpoint, meta, dict(context.identity))
    try:
        learned = None if meta.get(LEARNED) is None else MicrobatchLimit(*meta[LEARNED])
        for name, part in context.positions.items():
            if name in meta:
                part.load_state_dict(meta[name])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedError(checkpoint / META, in_one_line(error)) from None
    load(checkpoint, context.saved)
    if learned is not None:
        context.learner.gradient.lower_limit(learned)


def check_weights(context: RunContext) -> None:
    """Raise before weights are saved that are not finite, where nobody has looked at the gradient. Collective."""
    if context.learner.max_norm is not None:
        return
    weights = [weight for group in context.learner.optimizer.param_groups for weight in group["params"]]
    finite = [torch.isfinite(local(weight.detach())).all().to(context.ranks.device) for weight in weights]
    # This waits for the device, once.
    bad = bool(finite) and not torch.stack(finite).all()
    if any(context.ranks.sum([float(bad)])):
        raise MegabatchError(
            f"weights are not finite after update {context.step}, and are not saved: with update.max_norm = none no "
            "gradient is checked; set it, or lower optim.lr, and resume from the last checkpoint"
        )


class GradientState:
    """The state that an accumulator has between two updates. A learner may get another accumulator."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON, for any rank: shapes are the same on all, and a cost is as good."""
        return self._learner.gradient.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learner.gradient.load_state_dict(state)


class StagedLearner:
    """A learner whose model lies in pipeline stages, saved as that of the whole model: with every stage's parameters.

    The ranks that have a tensor write it. The optimizer's groups are one list, which all ranks have.
    """

    def __init__(self, learner: Learner, parallel_model: ParallelModel) -> None:
        assert is_pipeline(parallel_model.model)
        self._learner, self._ranks = learner, parallel_model.model.stage_ranks
        groups = learner.optimizer.param_groups
        settings = [{key: group[key] for key in group if key != "params"} for group in groups]
        stages = self._ranks.exchange_objects(settings)
        if any(stage != stages[0] for stage in stages):
            raise MegabatchError(
                f"the stages of the pipeline have {' and '.join(str(len(stage)) for stage in stages)} groups of "
                "parameters in their optimizers, or groups of other settings, which a checkpoint cannot hold; leave "
                "every stage matrices and vectors to train (model.freeze), or set parallel.pp to 1"
            )

    def state_dict(self) -> dict[str, Any]:
        state = self._learner.state_dict()
        groups = state["optimizer"]["param_groups"]
        names = self._ranks.exchange_objects([group["params"] for group in groups])
        for group, *parts in zip(groups, *names, strict=True):
            group["params"] = list(dict.fromkeys(name for part in parts for name in part))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learner.load_state_dict(state)


def identity_of(config: Config, data: Data, parallel_model: ParallelModel, updates: Updates) -> dict[str, Any]:
    """Return what makes a run this one, as JSON, for a resumed run to compare."""
    derived = {"optim.decay_steps": decay_steps_of(config, updates.num_updates)}
    return describe_run(
        model=parallel_model.identity, data=data.identity, settings=settings_of(config), derived=derived,
        recipe=recipe_text(config),
    )  # fmt: skip
