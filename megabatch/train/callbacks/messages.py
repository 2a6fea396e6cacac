"""The lines that a run prints of itself: its plan, its memory and why it ended."""

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from megabatch import Plan
from megabatch.planning import TunedLimit
from megabatch.train.checkpoints.run_folder import write_plan
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.config.byte_sizes import gib_text
from megabatch.train.context import Callback, RunContext
from megabatch.train.data.load import Data
from megabatch.train.data.updates import NumUpdates
from megabatch.train.model.optimizer import decay_steps_of
from megabatch.train.runtime.console import count, duration_text
from megabatch.train.runtime.files import PLAN
from megabatch.train.runtime.oom_limit import lowered_settings

# These compute nothing between the samples of a row.
ATTENTION_BY_ROWS = ("flash_attention_2", "flex_attention")
# Lines of a plan on the screen.
MOST_PLAN_LINES = 12
PROCESS = Path("/proc/self")
# From the second update on, optimizer states exist, so its peak is that of the run.
COMPARED = 2


class PlanMessage(Callback):
    """Print the plan of the run and write plan.txt, unless the run is at its end."""

    def start(self, context: RunContext) -> None:
        """Say the plan, and warn of what nobody should overlook."""
        if not context.is_over:
            lines = plan_lines(context)
            text = "\n".join(f"plan  {line}" for _, line in lines)
            context.console.say(text, short_plan(lines, context.folder))
            for line in context.model.warnings:
                context.console.warn(line)
            write_plan(context.folder, text, context.ranks, context.console)


def plan_lines(context: RunContext) -> list[tuple[str, str]]:
    """Return the plan of the run and of its next update, each line with its subject; "": it goes on with the last."""
    config, data, ranks, num_updates = context.config, context.data, context.ranks, context.updates.num_updates
    plan = fill_up(context.plan)
    split, *details = plan.explain().splitlines()
    updates = "updates until the stream ends," if num_updates.of_run is None else count(num_updates.of_run, "update")
    schedule, *more = notes(config, num_updates, data, ranks.dp_degree)
    if context.limit is None:
        limit_words = lowered_settings(config.update, context.learner.gradient.oom_limit)
    else:
        limit_words = context.limit.words
    size = f"{sizes_of(config.update)} (update.global_batch_size)"
    which = f"the next update{' on rank 0' if ranks.size > 1 else ''}: {split} (others may have more or fewer)"
    if config.update.shapes is not None and not plan.microbatches:
        which = f"the first update chooses {count(config.update.shapes, 'shape')} (update.shapes)"
    return [
        ("run", f"{updates} of {size} on {count(ranks.size, 'rank')}{' of each replica' if context.shared else ''}"),
        *titled("data", data.words),
        *titled("model", context.model.words),
        ("schedule", schedule),
        *(("note", line) for line in more),
        ("parallel", f"wrapper {context.model.wrapper.name}: {context.model.wrapper.reason}"),
        *titled("limit", limit_words),
        ("microbatches", which),
        *(("", line) for line in details),
        ("", f"gradient accumulation steps (derived, for this update): {plan.num_microbatches}"),
    ]


def fill_up(plan: Plan) -> Plan:
    """Return the plan with the dummy microbatches that a pipeline's schedule steps need."""
    num_dummies = max(0, sum(plan.steps) - plan.num_microbatches)
    return replace(plan, microbatches=(*plan.microbatches, *[()] * num_dummies))


def titled(subject: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if place else subject, line) for place, line in enumerate(lines)]


def short_plan(lines: Sequence[tuple[str, str]], folder: Path) -> str:
    """Return the plan in 12 aligned lines at most: those that open a subject first."""
    by_weight = sorted(range(len(lines)), key=lambda place: (not lines[place][0], place))
    chosen = [lines[place] for place in sorted(by_weight[: MOST_PLAN_LINES - 1])]
    note = f"; {PLAN} there has all {len(lines)} lines of the plan" if len(chosen) < len(lines) else ""
    return "\n".join(f"{subject:<12}  {line}" for subject, line in [*chosen, ("folder", f"{folder}{note}")])


def notes(config: Config, num_updates: NumUpdates, data: Data, dp_degree: int) -> list[str]:
    """Return what follows from settings together and is easily overlooked."""
    optim, sizes = config.optim, sizes_of(config.update)
    lines = [schedule_text(config, num_updates)]
    if optim.lr_follows_batch is not None:
        lines.append(f"times the square root of an update's samples over {sizes.sizes[0]} (optim.lr_follows_batch)")
    if config.run.save_every is None and config.run.save_every_minutes is None:
        lines.append("one checkpoint, at the end (run.save_every): a run that is ended before begins anew")
    if config.advice.every is not None:
        lines.append(f"the gradient's noise is measured every {config.advice.every} updates (advice.every)")
    if data.epoch_size is not None and sizes.largest > data.epoch_size:
        lines.append(
            f"an epoch has {count(data.epoch_size, 'sample')}, fewer than the {sizes.largest} of an update: lower "
            "update.global_batch_size to make more than one update of an epoch"
        )
    if not data.sets:
        lines.append("no sample is held out, and nothing is evaluated (eval.num_samples: at most a tenth of the data)")
    if config.update.one_row and config.model.attention not in ATTENTION_BY_ROWS:
        lines.append(
            "update.one_row takes longer than padding does, unless model.attention is " + " or ".join(ATTENTION_BY_ROWS)
        )
    if (smallest := min(sizes.sizes)) < dp_degree:
        lines.append(
            f"an update of {count(smallest, 'sample')} has none for some of the {dp_degree} data ranks, which only "
            "wait (update.global_batch_size)"
        )
    return lines


def schedule_text(config: Config, num_updates: NumUpdates) -> str:
    """Return the course of the learning rate."""
    optim, decay_steps = config.optim, decay_steps_of(config, num_updates)
    warmup = f"{optim.warmup_steps} updates of warmup, then " if optim.warmup_steps else ""
    if decay_steps is None:
        return f"learning rate {optim.lr:g}: {warmup}constant"
    end = f"{optim.lr * optim.final_lr_share:g} after update {decay_steps} (optim.decay_steps)"
    stops = "" if num_updates.of_run == decay_steps else f"; this run ends after {num_updates.of_run}"
    return f"learning rate {optim.lr:g}: {warmup}{optim.schedule} to {end}{stops if num_updates.of_run else ''}"


def end_text(context: RunContext) -> str:
    """Return why the run ended, and which evaluation was the best; or the signal that stopped it."""
    step, best, run = context.step, context.best, context.config.run
    if (signal := context.stop.agreed) is not None:
        return f"stopped by {signal.name} after update {step}; `megabatch train {context.folder}` resumes it"
    if context.update is None and context.checkpoint is not None and not context.should_stop:
        key = "max_steps" if run.max_steps is not None and step >= run.max_steps else "max_epochs"
        return f"finished at update {step}: raise run.{key}, which is {getattr(run, key)}, to train on"
    why = why_ended(context)
    if run.max_steps is not None and step < run.max_steps and not context.should_stop:
        why = f"{why}\nrun.max_steps = {run.max_steps} is not reached: raise run.max_epochs, which is {run.max_epochs}"
    if best.loss is None:
        return why
    return f"{why}\nlowest loss on {best.set}: {best.loss:.4f}, after update {best.step}"


def why_ended(context: RunContext) -> str:
    """Return why the run ended, and what became of samples that made no whole update."""
    config, step, num_updates = context.config, context.step, context.updates.num_updates
    num_samples = context.data.epoch_size
    if context.should_stop:
        return f"stopped after update {step}: {context.stop_reason}"
    if num_updates.of_data is not None and step < num_updates.of_data:
        return f"stopped at run.max_steps = {step}; the data is enough for {num_updates.of_data} updates"
    if num_updates.of_data is None and step == num_updates.of_run:
        return f"stopped at run.max_steps = {step}"
    batch_size, epochs = config.update.global_batch_size, config.run.max_epochs
    if not isinstance(batch_size, int) and config.update.tail != "step":
        return f"the data ran out after {count(epochs, 'epoch')}; no whole update is left"
    size = sizes_of(config.update).largest
    if num_samples is not None and config.update.tail == "drop" and num_samples % size:
        return f"the data ran out: dropped {num_samples % size} samples of each epoch, too few for an update of {size}"
    if num_samples is not None and config.update.tail == "carry" and epochs * num_samples % size:
        return f"the data ran out: {epochs * num_samples % size} samples were left, too few for an update of {size}"
    used = "every sample that was kept was used" if config.update.tail == "step" else "no whole update is left"
    return f"the data ran out after {count(epochs, 'epoch')}; {used}"


class RandomCheck(Callback):
    """Say after the first update of a resumed run that the model draws random numbers by rank. Collective."""

    def __init__(self) -> None:
        self._is_first = True

    def after_update(self, context: RunContext) -> None:
        """Compare the generator with a new one of the update's seed."""
        if not self._is_first or context.num_calls > 1:
            return
        self._is_first, device = False, context.ranks.device
        fresh = torch.Generator(device).manual_seed(context.seed).get_state()
        now = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
        if any(context.ranks.gather(not torch.equal(now, fresh))):
            context.console.warn(
                "the model draws random numbers by rank (dropout of attention, say): the run resumes bit for bit on as "
                "many ranks and in the same cut, and with other dropout elsewhere"
            )


class MemoryCheck(Callback):
    """Measure the second update of a start, and say where a longer sample has changed the limit. Collective."""

    def __init__(self) -> None:
        self._num_updates = 0
        self._high_water: HighWater | None = None
        # The limit before the update.
        self._fit: TunedLimit | None = None

    def before_update(self, context: RunContext) -> None:
        """Count updates, and begin to measure."""
        self._num_updates += 1
        self._fit = context.learner.gradient.fit
        if self._num_updates == COMPARED:
            self._high_water = HighWater(context.ranks.device)

    def after_update(self, context: RunContext) -> None:
        """Say both peaks, each of the rank that came highest, and add them to the row."""
        fit, high_water = context.learner.gradient.fit, self._high_water
        if fit is not None and fit is not self._fit:
            context.console.say(f"update.{fit.explain()}")
        if high_water is None:
            return
        self._high_water = None
        if context.plan.peak_bytes is None:
            return
        peaks = context.ranks.gather(high_water.bytes())
        predicted = context.ranks.gather(context.plan.peak_bytes)
        if not all(peaks):
            return
        peak, expected = max(peaks), max(predicted)
        share = f"{peak / expected:.2f} of the {gib_text(expected)} predicted"
        context.console.say(f"memory came to {gib_text(peak)}, {share}")
        context.row |= {"peak_gib": peak / 2**30, "predicted_peak_gib": expected / 2**30}


class HighWater:
    """Measures the most memory that this process has had on its device since this was made, as the system counts it."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu, self._device = device.type == "cuda", device
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):
            (PROCESS / "clear_refs").write_text("5")

    def bytes(self) -> float:
        """Return the memory that was reserved on a GPU, or resident on the CPU without files. 0: nobody can tell."""
        if self._is_gpu:
            return float(torch.cuda.max_memory_reserved(self._device))
        try:
            kib = dict(line.split(":", 1) for line in (PROCESS / "status").read_text().splitlines())
            return 1024.0 * (int(kib["VmHWM"].split()[0]) - int(kib["RssFile"].split()[0]))
        except (OSError, ValueError, KeyError):
            return 0.0


class FinalMessages(Callback):
    """Print why the run ended, and draw its report. Collective."""

    def end(self, context: RunContext) -> None:
        """Say the end and the summaries of other callbacks, write report.html, and say what is next."""
        for line in (end_text(context), *context.summary):
            context.console.say(line)
        if context.is_stopped:
            if context.ranks.is_main and context.plan.lengths:
                from megabatch.train.report.page import write_page

                context.flush_logs()
                write_page(context.folder, context.console, f"stopped at update {context.step}")
            return
        for line in context.updates.skipped.words("the stream's last pass"):
            context.console.say(line)
        if context.ranks.is_main and context.plan.lengths:
            from megabatch.train.report.html import FILE_NAME
            from megabatch.train.report.page import write_page

            context.flush_logs()
            if "seconds" in context.row:
                context.console.say(f"{count(context.step, 'update')} in {duration_text(context.row['seconds'])}")
            if write_page(context.folder, context.console, "ended"):
                context.console.say(f"a page to look at: {context.folder / FILE_NAME}")
            folder, model = (shlex.quote(str(path)) for path in (context.folder, f"{context.folder}-model"))
            parent = shlex.quote(str(context.folder.parent))
            context.console.say(
                f"next: megabatch export {folder} --to {model}, or megabatch runs {parent} to compare runs"
            )
