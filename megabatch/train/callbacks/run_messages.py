"""The lines that a run prints of itself: its plan before the first update, and why it ended."""

from megabatch.train.checkpoints.run_folder import write_plan
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.context import Callback, RunContext
from megabatch.train.data.load import Data
from megabatch.train.data.updates import NumUpdates
from megabatch.train.model.optimizer import decay_steps_of
from megabatch.train.runtime.console import count

ATTENTION_BY_ROWS = ("flash_attention_2", "flex_attention")  # which compute nothing between the samples of a row


class PlanMessage(Callback):
    """Print the plan of the run and write plan.txt, unless the run is at its end."""

    def start(self, context: RunContext) -> None:
        """Say the plan, and warn of what nobody should overlook."""
        if not context.is_over:
            text = plan_text(context)
            context.console.say(text)
            for line in context.model.warnings:
                context.console.warn(line)
            write_plan(context.folder, text, context.ranks, context.console)


class EndMessage(Callback):
    """Print why the run ended, and the summary lines of the other callbacks."""

    def end(self, context: RunContext) -> None:
        """Say it."""
        context.console.say(stop_text(context) if context.is_stopped else end_text(context))
        for line in context.summary:
            context.console.say(line)


def plan_text(context: RunContext) -> str:
    """Return the plan of the run and of its next update."""
    config, data, ranks, num_updates = context.config, context.data, context.ranks, context.updates.num_updates
    split, *others = context.choices.shown(context.plan).explain().splitlines()
    updates = "updates until the stream ends," if num_updates.of_run is None else count(num_updates.of_run, "update")
    lines = [
        f"{updates} of {sizes_of(config.update)} (update.global_batch_size) on {count(ranks.size, 'rank')}",
        *data.words,
        *context.model.words,
        *notes(config, num_updates, data),
        *few_samples(config, ranks.dp_degree),
        f"wrapper {context.model.wrapper.name}: {context.model.wrapper.reason}",
        *context.choices.text(config.update, context.learner.gradient.oom_limit),
        f"the next update{' on rank 0' if ranks.size > 1 else ''}: {split}",
        *others,
        f"gradient accumulation steps (derived): {context.plan.num_microbatches}",
    ]
    return "\n".join(f"plan  {line}" for line in lines)


def notes(config: Config, num_updates: NumUpdates, data: Data) -> list[str]:
    """Return what follows from settings together and is easily overlooked."""
    optim, size = config.optim, sizes_of(config.update).largest
    lines = [schedule_text(config, num_updates)]
    if optim.lr_follows_batch is not None:
        first = sizes_of(config.update).sizes[0]
        lines.append(f"times the square root of an update's samples over {first} (optim.lr_follows_batch)")
    if config.run.save_every is None:
        lines.append("one checkpoint, at the end (run.save_every): a run that is ended before begins anew")
    if config.advice.every is not None:
        lines.append(f"the gradient's noise is measured every {config.advice.every} updates (advice.every)")
    if optim.warmup_steps and num_updates.of_run is not None and optim.warmup_steps >= num_updates.of_run:
        lines.append(f"the warmup of {optim.warmup_steps} updates is longer than the run (optim.warmup_steps)")
    if data.epoch_size is not None and size > data.epoch_size:
        lines.append(f"an epoch has {count(data.epoch_size, 'sample')}, fewer than an update should have")
    if not data.sets:
        lines.append("no sample is held out, and nothing is evaluated (eval.num_samples: at most a tenth of the data)")
    if config.update.one_row and config.model.attention not in ATTENTION_BY_ROWS:
        lines.append(
            "update.one_row takes longer than padding does, unless model.attention is " + " or ".join(ATTENTION_BY_ROWS)
        )
    return lines


def few_samples(config: Config, dp_degree: int) -> list[str]:
    """Return a line about ranks for which an update has no sample."""
    least = min(sizes_of(config.update).sizes)
    if least >= dp_degree:
        return []
    return [
        f"an update of {count(least, 'sample')} has none for some of the {dp_degree} data ranks, which only wait "
        "(update.global_batch_size)"
    ]


def schedule_text(config: Config, num_updates: NumUpdates) -> str:
    """Return the course of the learning rate."""
    optim, decay_steps = config.optim, decay_steps_of(config, num_updates)
    warmup = f"{optim.warmup_steps} updates of warmup, then " if optim.warmup_steps else ""
    if decay_steps is None:
        return f"learning rate {optim.lr:g}: {warmup}constant"
    end = f"{optim.lr * optim.final_lr_share:g} after update {decay_steps} (optim.decay_steps)"
    stops = "" if num_updates.of_run == decay_steps else f"; this run ends after {num_updates.of_run}"
    return f"learning rate {optim.lr:g}: {warmup}{optim.schedule} to {end}{stops if num_updates.of_run else ''}"


def stop_text(context: RunContext) -> str:
    """Return the signal that stopped the run, and how to resume it."""
    signal = context.stop.agreed
    name = "" if signal is None else signal.name
    return f"stopped by {name} after update {context.step}; `megabatch train {context.folder}` goes on"


def end_text(context: RunContext) -> str:
    """Return why the run ended, and which evaluation was the best."""
    step, best, run = context.step, context.best, context.config.run
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
    given, epochs = config.update.global_batch_size, config.run.max_epochs
    if not isinstance(given, int) and config.update.tail != "step":
        return f"the data ran out after {count(epochs, 'epoch')}; no whole update is left"
    size = sizes_of(config.update).largest
    if num_samples is not None and config.update.tail == "drop" and num_samples % size:
        return f"the data ran out: dropped {num_samples % size} samples of each epoch, too few for an update of {size}"
    if num_samples is not None and config.update.tail == "carry" and epochs * num_samples % size:
        return f"the data ran out: {epochs * num_samples % size} samples were left, too few for an update of {size}"
    used = "every sample that was kept was used" if config.update.tail == "step" else "no whole update is left"
    return f"the data ran out after {count(epochs, 'epoch')}; {used}"
