"""Examiner: evaluates the model as it is on every set, and follows which evaluation was the best."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from megabatch.losses import LossFunction
from megabatch.planning import TunedLimit
from megabatch.train.callbacks.completion import sample_completion
from megabatch.train.callbacks.early_stopping import Watch
from megabatch.train.callbacks.ema import Average
from megabatch.train.callbacks.evaluation import build_terms, evaluate, load_own
from megabatch.train.callbacks.metrics import MetricsFile
from megabatch.train.config import Config
from megabatch.train.model.build import ParallelModel, in_precision
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import Event, load_listener
from megabatch.train.runtime.ranks import Ranks


class Examiner:
    """The evaluations of a run; where the recipe asks for an average of the weights, of that average.

    Args:
        first: What every event has in common.
        average: Stands in for the model's weights; None: they are evaluated themselves.
    """

    def __init__(
        self,
        config: Config,
        loss_fn: LossFunction,
        first: Event,
        average: Average | None,
        laid: ParallelModel,
        ranks: Ranks,
    ) -> None:
        self._config, self._first, self._average, self._ranks = config, first, average, ranks
        self._laid = laid
        in_own_precision = partial(in_precision, config=config.model, laid=laid, device=ranks.device)
        self.terms = build_terms(config.eval, loss_fn, in_own_precision)
        self._own = load_own(config.eval)
        self._listener: Callable[[Event], object] = load_listener(config.run.after_evaluation, "run.after_evaluation")
        self.watch = Watch(config.eval, first.sets)
        self.step: int | None = None  # of the last evaluation

    def evaluate(self, step: int, metrics: MetricsFile, console: Console, fit: TunedLimit | None = None) -> None:
        """Evaluate every set, write and say what was found, and tell the user's function; collective.

        ``fit``: what a microbatch holds where the recipe leaves it open.
        """
        self.step, chosen_tokens = step, None if fit is None else fit.max_microbatch_tokens
        with self._weights(), self._laid.losses():
            event = replace(self._first, step=step)
            update = self._config.update
            rows = evaluate(event, self.terms, self._own, update, self._ranks, console, chosen_tokens=chosen_tokens)
            for row in rows:
                metrics.append(row)
                console.evaluation(step, row)
                self._listener(replace(event, row=row))
        losses = [row["eval_loss"] for row in rows if row["set"] == self.watch.name]
        if losses:
            self.watch.update(step, losses[0])

    def complete(self) -> tuple[str, str]:
        """A prompt of the watched set and what the model makes of it; both empty where there is none; collective."""
        layout = self._ranks.layout
        if layout.cp > 1 or layout.pp > 1:  # a rank's model runs stretches of sequences, or is a part of one
            return "", ""
        samples = self._first.sets.get(self.watch.name or "", [])
        with self._weights():
            tokenizer, wanted = self._first.tokenizer, self._config.eval.completion_tokens
            return sample_completion(self._first.model, samples, tokenizer, self._ranks.device, wanted)

    def _weights(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._average is None else self._average.swapped()
