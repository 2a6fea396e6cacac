"""Trainer: the order of events. How any of them works is in the modules it imports."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer

from megabatch import MegabatchError, UpdateSampler, losses
from megabatch.train import checkpoint, words
from megabatch.train.config import Config
from megabatch.train.console import Console
from megabatch.train.data import Sample, lengths_of, load_data
from megabatch.train.evaluation import held_out_loss, sample_completion
from megabatch.train.metrics import MetricsFile, update_row
from megabatch.train.model import build_model, check_fit, choose_wrapper, unwrap, wrap
from megabatch.train.optim import build_learner, count_updates, decay_steps_of, settings_of
from megabatch.train.ranks import Ranks
from megabatch.train.report import draw_report

Batch = list[Sample]


class Trainer:
    """One run of a recipe, on this rank. Making one writes nothing, and finds what is wrong with the recipe."""

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.config, self.ranks, self.folder = config, ranks, Path(config.run.folder)
        checkpoint.check_folder(self.folder, resume=config.run.resume, ranks=ranks)
        self.tokenizer = ByT5Tokenizer()
        self.data = load_data(config, self.tokenizer)
        model = build_model(config.model, config.run.seed)
        check_fit(model, [*self.data.train, *self.data.held_out], self.tokenizer)
        self.num_updates = count_updates(config, len(self.data.train))
        derived = {"optim.decay_steps": decay_steps_of(config, self.num_updates)}
        self.meta = checkpoint.describe(model, self.data, settings_of(config), derived)
        self.wrapper = choose_wrapper(config.parallel.wrapper, ranks.size, model)
        self.model = wrap(model.to(ranks.device), self.wrapper)
        self.sampler = self._build_sampler()
        self.learner = build_learner(self.model, config, self.num_updates)
        self.plan = self.learner.gradient.plan(self._peek())
        self.metrics = MetricsFile(self.folder, enabled=ranks.is_main)
        self.console = Console(enabled=ranks.is_main, loss_digits=10 if config.model.dtype == "float64" else 4)
        self.saved_step: int | None = None

    def fit(self) -> None:
        """Run to the end: start or resume, update after update, then a last checkpoint, the report and a sample."""
        self._start()
        with self.console.bar(self.learner.step, self.num_updates.of_run):
            for batch in self._batches():
                self._update(batch)
                self._after_update()
        self._finish()

    def _build_sampler(self) -> UpdateSampler:
        return UpdateSampler(
            lengths_of(self.data.train),
            global_batch_size=self.config.update.global_batch_size,
            seed=self.config.run.seed,
            dp_rank=self.ranks.rank,
            dp_degree=self.ranks.size,
            tail=self.config.update.tail,
        )

    def _peek(self) -> Batch:
        """This rank's samples of the next update, which is still to come."""
        state = self.sampler.state_dict()
        indices = next(iter(self.sampler))
        self.sampler.load_state_dict(state)
        return [self.data.train[index] for index in indices]

    def _start(self) -> None:
        if self.config.run.resume:
            self._resume()
        elif self.ranks.is_main:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.console.say(
            words.plan_text(self.config, self.wrapper, self.ranks.size, self.plan, self.num_updates.of_run)
        )
        if self.learner.step == 0:
            self._evaluate()

    def _resume(self) -> None:
        path = checkpoint.latest(self.folder)
        saved = checkpoint.read_meta(path)
        checkpoint.check_same(path, saved, self.meta)
        self.sampler.load_state_dict(saved["sampler"])
        checkpoint.load(path, self.learner)
        self.plan = self.learner.gradient.plan(self._peek())
        self.metrics.cut(self.learner.step, self.config.eval.every)
        self.saved_step = self.learner.step
        self.console.say(f"resumed from {path}")

    def _batches(self) -> Iterator[Batch]:
        """This rank's samples of every update that is left."""
        loader = DataLoader(self.data.train, batch_sampler=self.sampler, collate_fn=list)  # pyright: ignore
        while self.learner.step < self.num_updates.of_run:
            for batch in loader:
                yield batch
                if self.learner.step == self.num_updates.of_run:
                    return

    def _update(self, batch: Batch) -> None:
        start, step = time.perf_counter(), self.learner.step + 1
        lr = self.learner.optimizer.param_groups[0]["lr"]
        torch.manual_seed(hash((self.config.run.seed, step, self.ranks.rank)))  # the dropout of a resumed run
        self.learner.forward_backward(batch, losses.next_token)
        update = self.learner.optim_step()
        if not bool(update.finite) and (problem := update.problem()) is not None:  # problem() waits for the device
            raise MegabatchError(f"update {step} was not stepped: {problem}; lower optim.lr or look at its samples")
        self.plan = self.learner.gradient.last_plan or self.plan
        row = update_row(update, self.plan, step, lr, time.perf_counter() - start, self.ranks)
        self.metrics.append(row)
        self.console.update(row)
        if update.num_samples < self.config.update.global_batch_size:
            self.console.say(words.short_update_text(update.num_samples, self.config.update.global_batch_size))

    def _after_update(self) -> None:
        every, save_every = self.config.eval.every, self.config.run.save_every
        if every is not None and self.learner.step % every == 0:
            self._evaluate()
        if save_every is not None and self.learner.step % save_every == 0:
            self._save()

    def _evaluate(self) -> None:
        if self.data.held_out:
            row = held_out_loss(unwrap(self.model), self.data.held_out, self.config.update, self.ranks)
            self.metrics.append({"step": self.learner.step, **row})
            self.console.evaluation(self.learner.step, row)

    def _save(self) -> None:
        self.saved_step = self.learner.step
        meta = {**self.meta, "step": self.saved_step, "sampler": self.sampler.state_dict()}
        self.console.say(f"saved {checkpoint.save(self.folder, self.learner, meta, self.ranks)}")

    def _finish(self) -> None:
        every = self.config.eval.every
        if every is None or self.learner.step % every != 0:
            self._evaluate()
        if self.saved_step != self.learner.step:
            self._save()
        self.console.say(words.end_text(self.config, self.num_updates, len(self.data.train)))
        if self.ranks.is_main:
            draw_report(self.folder, self.plan, words.title(self.config, self.wrapper, self.ranks.size))
        text = sample_completion(unwrap(self.model), self.data.held_out, self.tokenizer, self.ranks.device)
        self.console.say(words.completion_text(*text))
