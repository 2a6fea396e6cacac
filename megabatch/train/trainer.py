"""Trainer: the order of events. How any of them works is in the modules it imports."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megabatch.train import words
from megabatch.train.bound import choose, saved_bound
from megabatch.train.config import Config
from megabatch.train.console import Console
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.ema import Average
from megabatch.train.examiner import Examiner
from megabatch.train.folder import begin, begins_again, check_folder, write_plan
from megabatch.train.keeper import Keeper, identity_of
from megabatch.train.metrics import MetricsFile
from megabatch.train.model.build import build, in_precision
from megabatch.train.model.tokenizer import load_tokenizer
from megabatch.train.optim import build_learner
from megabatch.train.own import Event, load_function, load_listener
from megabatch.train.profile import Profiler
from megabatch.train.ranks import Ranks
from megabatch.train.report import write_report
from megabatch.train.shelf import resumed_from
from megabatch.train.updating import Updating
from megabatch.train.writing import Writer


class Trainer:
    """One run of a recipe, on this rank. Making one writes nothing, and finds what is wrong with the recipe."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.folder = config, ranks, Path(config.run.folder)
        self.console = Console(enabled=ranks.is_main, loss_digits=10 if config.model.dtype == "float64" else 4)
        check_folder(self.folder, resume=config.run.resume, ranks=ranks)
        self.begins_again = begins_again(self.folder)
        self.checkpoint = resumed_from(config.run, ranks, self.console)
        bound = saved_bound(config, ranks, self.checkpoint)
        loss_fn = load_function(config.loss.function, "loss.function")
        self.listener = load_listener(config.run.after_update, "run.after_update")
        tokenizer = load_tokenizer(config.model)
        self.data = load_data(config, tokenizer, ranks, self.console)
        self.updates = Updates(self.data, config, ranks)
        self.laid = build(config, ranks, self.console, self.data.longest_tokens, tokenizer)
        self.loss_fn = in_precision(loss_fn, config.model, self.laid, ranks.device)
        fit = None if bound is None else bound.fit
        self.learner = build_learner(self.laid.model, self.laid.base, config, self.updates.num_updates, fit)
        self.average = None if config.optim.ema_decay is None else Average(self.laid.base, config.optim.ema_decay)
        self.bound = choose(bound, self.learner.gradient, self.loss_fn, self.data, self.updates, self.laid)
        self.event = Event(0, self.laid.run, ranks.device, self.folder, ranks.is_main, {}, self.data.sets, tokenizer)
        self.examiner = Examiner(config, loss_fn, self.event, self.average, self.laid, ranks)
        self.identity = identity_of(config, self.data, self.laid, self.updates)
        watch = self.examiner.watch
        self.metrics = MetricsFile(self.folder, enabled=ranks.is_main, tensorboard=config.run.tensorboard)
        self.writer = Writer(config, ranks, self.console, self.metrics.flush)
        self.keeper = Keeper(
            config, self.learner, self.laid, self.average, self.updates, watch, self.bound, ranks, self.writer
        )
        self.profiler = Profiler(config.run.profile_steps, self.folder, enabled=ranks.is_main)
        self.updating = Updating(
            config, self.learner, self.loss_fn, self.laid, self.average, ranks, self.console,
            counts_tokens=self.data.counts_tokens,
        )  # fmt: skip
        self.plan = self.learner.gradient.plan(self.updates.peek())

    def fit(self) -> None:
        """Run to the end: start or resume, update after update, then a last checkpoint, the report and a sample."""
        with self.console.logged_failure(), self.writer.closing():
            self._start()
            self._run()
            self._finish()

    def _run(self) -> None:
        with self.console.bar(self.learner.step, self.updates.num_updates.of_run):
            for batch in () if self._is_over() else self.updates:
                with self.profiler.update(self.learner.step + 1):
                    row = self._update(batch)
                with self.updating.clock.paused():
                    self.listener(replace(self.event, step=self.learner.step, row=row))
                    self._evaluate_and_save()
                if self._is_over():
                    break

    def _start(self) -> None:
        if self.checkpoint is not None:
            self.keeper.resume(self.identity, self.checkpoint)
            self.console.say(f"resumed from {self.checkpoint}")
        begin(self.folder, self.config, self.ranks, self.console)
        if self.begins_again:
            self.metrics.cut(-1, None)
        if self.checkpoint is not None:
            self.metrics.cut(self.learner.step, self.config.eval.every)
            self.plan = self.learner.gradient.plan(self.updates.peek())
        if not self._is_over():
            self._say_plan()
        if self.learner.step == 0:
            self._evaluate()
        self.updating.clock.lap()

    def _is_over(self) -> bool:
        return self.learner.step == self.updates.num_updates.of_run or self.examiner.watch.should_stop

    def _say_plan(self) -> None:
        num_updates, chosen = self.updates.num_updates, [] if self.bound is None else self.bound.words
        text = words.plan_text(self.config, self.laid, self.data, self.ranks.size, self.plan, num_updates, chosen)
        self.console.say(text)
        for line in self.laid.warnings:
            self.console.warn(line)
        write_plan(self.folder, text, self.ranks, self.console)

    def _update(self, batch: Sequence[Any]) -> Mapping[str, Any]:
        row = self.updating.run(batch, self.updates.epochs)
        self.metrics.append(row)
        self.updating.say(row)
        return row

    def _evaluate_and_save(self) -> None:
        if self._is_over() or self._is_evaluated_in_turn():
            self._evaluate()
        self.keeper.keep(self.identity, last=self._is_over())

    def _is_evaluated_in_turn(self) -> bool:
        return self.config.eval.every is not None and self.learner.step % self.config.eval.every == 0

    def _evaluate(self) -> None:
        fit = self.learner.gradient.fit
        tokens = None if fit is None else fit.max_microbatch_tokens
        self.examiner.evaluate(self.learner.step, self.metrics, self.console, tokens)

    def _finish(self) -> None:
        if self.examiner.step != self.learner.step and not self._is_evaluated_in_turn():
            self._evaluate()
        self.keeper.finish(self.identity)
        num_updates, watch = self.updates.num_updates, self.examiner.watch
        self.console.say(words.end_text(self.config, num_updates, self.learner.step, self.data.epoch_size, watch))
        for line in self.updates.skipped.words("the stream's last pass"):
            self.console.say(line)
        self.metrics.close()
        plan = self.updating.plan or self.plan
        if self.ranks.is_main and plan.lengths:
            title = words.title(self.config, self.laid.wrapper, self.ranks.size)
            write_report(self.folder, plan, title, self.console, of_tokens=self.examiner.terms.of_tokens)
        prompt, completion = self.examiner.complete()
        if prompt:
            self.console.say(words.completion_text(prompt, completion))
