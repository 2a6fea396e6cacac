"""Trainer: the order of events. How any of them works is in the modules it imports."""

from dataclasses import replace
from pathlib import Path

from megabatch.train import messages as words
from megabatch.train.autotune.choices import choose_rest, saved_choices
from megabatch.train.callbacks.ema import Average
from megabatch.train.callbacks.evaluator import Examiner
from megabatch.train.callbacks.metrics import metrics_of
from megabatch.train.callbacks.profiler import Profiler
from megabatch.train.checkpoints.manager import Keeper, identity_of
from megabatch.train.checkpoints.mid_update import Partial
from megabatch.train.checkpoints.retention import resumed_from
from megabatch.train.checkpoints.run_folder import write_plan
from megabatch.train.checkpoints.run_lock import check_run_folder, open_run_folder
from megabatch.train.checkpoints.writer import Writer
from megabatch.train.config import Config
from megabatch.train.data.load import load_data
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import build, in_precision
from megabatch.train.model.optimizer import build_learner
from megabatch.train.model.router_loss import train_with_router
from megabatch.train.model.tokenizer import load_tokenizer
from megabatch.train.report.command import write_page
from megabatch.train.report.picture import write_report
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import Event, load_function, load_listener
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.train_step import Updating
from megabatch.train.training_course import Course


class Trainer:
    """One run of a recipe, on this rank. Making one writes nothing, and finds what is wrong with the recipe."""

    def __init__(self, config: Config, ranks: Ranks, course: Course) -> None:
        self.config, self.ranks, self.course, self.folder = config, ranks, course, Path(config.run.folder)
        self.console = Console(enabled=ranks.is_main, loss_digits=10 if config.model.dtype == "float64" else 4)
        check_run_folder(self.folder, config, ranks)
        self.checkpoint = resumed_from(config.run, ranks, self.console)
        self.chosen = saved_choices(config, ranks, self.checkpoint)
        loss_fn = load_function(config.loss.function, "loss.function")
        self.listener = load_listener(config.run.after_update, "run.after_update")
        tokenizer = load_tokenizer(config.model)
        self.data = load_data(config, tokenizer, ranks, self.console)
        self.updates = Updates(self.data, config, ranks)
        self.laid = build(config, ranks, self.console, self.data.longest_tokens, tokenizer)
        with_router = train_with_router(loss_fn, config, self.laid, self.updates)
        self.loss_fn = in_precision(with_router, config.model, self.laid, ranks.device)
        given = self.chosen.given
        self.learner = build_learner(self.laid.model, self.laid.base, config, self.updates.num_updates, *given)
        self.average = None if config.optim.ema_decay is None else Average(self.laid.base, config.optim.ema_decay)
        self.event = Event(0, self.laid.run, ranks.device, self.folder, ranks.is_main, {}, self.data.sets, tokenizer)
        self.examiner = Examiner(config, loss_fn, self.event, self.average, self.laid, ranks)
        self.identity = identity_of(config, self.data, self.laid, self.updates)
        self.metrics = metrics_of(config, ranks, self.console)
        self.writer = Writer(config, ranks, self.console, lambda: self.updating.flush(self.metrics))
        saved = (self.learner, self.laid, self.average, self.updates, self.examiner.watch, self.chosen)
        self.keeper = Keeper(config, *saved, ranks, self.writer)
        self.profiler = Profiler(config.run.profile_steps, self.folder, enabled=ranks.is_main)
        parts = (self.identity, self.learner, self.loss_fn, self.updates, ranks, self.console)
        self.partial = Partial(config, *parts, course.is_asked)
        parts = (self.learner, self.loss_fn, self.laid, self.average, self.updates, self.partial)
        self.updating = Updating(config, *parts, ranks, self.console, counts_tokens=self.data.counts_tokens)
        first = self.updates.peek()
        self.plan = self.learner.gradient.plan(first if self.chosen.bound is None else [])

    def fit(self) -> None:
        """Start or resume, make update after update to the end or a signal, save; at the end report, write a sample."""
        with self.console.logged_failure(), self.writer.closing():
            self._start()
            self._run()
            self._close()
            if not self.course.is_stopped:
                self._report()

    def _run(self) -> None:
        counted = self.updates.num_updates
        with self.console.bar(self.learner.step, counted.of_run, counted.work), self.partial.saving():
            for batch in self.course.updates(self.updates, self.learner, self._is_over):
                with self.profiler.update(self.learner.step + 1):
                    row = self.updating.run(batch)
                    self.metrics.append(row)
                    self.updating.say(row)
                with self.updating.clock.paused():
                    self.listener(replace(self.event, step=self.learner.step, row=row))
                    self._evaluate_and_save()

    def _start(self) -> None:
        if self.checkpoint is not None:
            self.keeper.resume(self.identity, self.checkpoint)
            self.console.say(f"resumed from {self.checkpoint}")
        is_new = self.checkpoint is None
        open_run_folder(self.folder, self.config, self.ranks, self.console, is_new=is_new)
        self.metrics.cut(-1 if is_new else self.learner.step, self.config.eval.every)
        parts = (self.learner, self.loss_fn, self.data, self.updates, self.laid, self.ranks)
        self.chosen = self.keeper.chosen = choose_rest(self.chosen, self.config, *parts)
        self.partial.resume()
        self.plan = self.learner.gradient.plan(self.updates.peek())
        self.updating.cut(self.learner.step)
        if not self._is_over():
            self._say_plan()
        if is_new:
            self._evaluate()
        self.updating.clock.lap()

    def _is_over(self) -> bool:
        return self.learner.step == self.updates.num_updates.of_run or self.examiner.watch.should_stop

    def _say_plan(self) -> None:
        said = self.chosen.said(self.config.update, self.learner.gradient.oom_limit)
        plan, num_updates = self.chosen.policy.shown(self.plan), self.updates.num_updates
        text = words.plan_text(self.config, self.laid, self.data, self.ranks, plan, num_updates, said)
        self.console.say(text)
        for line in self.laid.warnings:
            self.console.warn(line)
        write_plan(self.folder, text, self.ranks, self.console)

    def _evaluate_and_save(self) -> None:
        if self._is_over() or self._is_evaluated_in_turn():
            self._evaluate()
        self.keeper.keep(self.identity, last=self._is_over())

    def _is_evaluated_in_turn(self) -> bool:
        return self.config.eval.every is not None and self.learner.step % self.config.eval.every == 0

    def _evaluate(self) -> None:
        self.examiner.evaluate(self.learner.step, self.metrics, self.console, self.learner.gradient.fit)

    def _close(self) -> None:
        if self.examiner.step != self.learner.step and not (self._is_evaluated_in_turn() or self.course.is_stopped):
            self._evaluate()
        self.keeper.finish(self.identity)
        self.metrics.close()
        num_updates, watch = self.updates.num_updates, self.examiner.watch
        end = words.end_text(self.config, num_updates, self.learner.step, self.data.epoch_size, watch)
        self.console.say(self.course.words(self.learner.step, self.folder) if self.course.is_stopped else end)
        for line in self.updating.words():
            self.console.say(line)

    def _report(self) -> None:
        for line in self.updates.skipped.words("the stream's last pass"):
            self.console.say(line)
        plan = self.updating.plan or self.plan
        if self.ranks.is_main and plan.lengths:
            title = words.title(self.config, self.laid.wrapper, self.ranks.size)
            write_report(self.folder, plan, title, self.console, of_tokens=self.examiner.terms.of_tokens)
            write_page(self.folder, self.console)
        prompt, completion = self.examiner.complete()
        if prompt:
            self.console.say(words.completion_text(prompt, completion))
