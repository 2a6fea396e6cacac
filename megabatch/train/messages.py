"""Words: what a run says about itself, as text. Pure."""

from collections.abc import Sequence

from megabatch import Plan
from megabatch.train.callbacks.early_stopping import Watch
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.load import Data
from megabatch.train.data.num_updates import NumUpdates
from megabatch.train.model.build import ParallelModel
from megabatch.train.model.optimizer import decay_steps_of
from megabatch.train.model.wrap import Wrapper
from megabatch.train.runtime.ranks import Ranks

ATTENTION_BY_ROWS = ("flash_attention_2", "flex_attention")  # which compute nothing between the samples of a row


def plan_text(
    config: Config,
    laid: ParallelModel,
    data: Data,
    ranks: Ranks,
    plan: Plan,
    num_updates: NumUpdates,
    chosen: Sequence[str],
) -> str:
    """The plan of the run and of its next update, before it starts; ``chosen``: what is to be said of its bound."""
    cut, *others = plan.explain().splitlines()
    updates = "updates until the stream ends," if num_updates.of_run is None else count(num_updates.of_run, "update")
    lines = [
        f"{updates} of {sizes_of(config.update)} (update.global_batch_size) on {count(ranks.size, 'rank')}",
        *data.words,
        *laid.words,
        *notes(config, num_updates, data),
        *few_samples(config, ranks.dp_degree),
        f"wrapper {laid.wrapper.name}: {laid.wrapper.reason}",
        *chosen,
        f"the next update{' on rank 0' if ranks.size > 1 else ''}: {cut}",
        *others,
        f"gradient accumulation steps (derived): {plan.num_microbatches}",
    ]
    return "\n".join(f"plan  {line}" for line in lines)


def short_update_text(num_samples: int, global_batch_size: int) -> str:
    """What became of an update for which an epoch's data did not suffice."""
    return (
        f"the epoch's data ran out: its last update was stepped exactly: {num_samples} of {global_batch_size} samples"
    )


def notes(config: Config, num_updates: NumUpdates, data: Data) -> list[str]:
    """What follows from settings together, and is easily overlooked."""
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
    """What becomes of ranks for which an update has no sample."""
    least = min(sizes_of(config.update).sizes)
    if least >= dp_degree:
        return []
    return [
        f"an update of {count(least, 'sample')} has none for some of the {dp_degree} data ranks, which only wait "
        "(update.global_batch_size)"
    ]


def schedule_text(config: Config, num_updates: NumUpdates) -> str:
    """How the learning rate goes."""
    optim, decay_steps = config.optim, decay_steps_of(config, num_updates)
    warmup = f"{optim.warmup_steps} updates of warmup, then " if optim.warmup_steps else ""
    if decay_steps is None:
        return f"learning rate {optim.lr:g}: {warmup}constant"
    end = f"{optim.lr * optim.final_lr_share:g} after update {decay_steps} (optim.decay_steps)"
    stops = "" if num_updates.of_run == decay_steps else f"; this run ends after {num_updates.of_run}"
    return f"learning rate {optim.lr:g}: {warmup}{optim.schedule} to {end}{stops if num_updates.of_run else ''}"


def end_text(config: Config, num_updates: NumUpdates, step: int, num_samples: int | None, watch: Watch) -> str:
    """Why the run ended after ``step`` updates, and which evaluation was the best."""
    why = why_ended(config, num_updates, step, num_samples, stopped_early=watch.should_stop)
    asked = config.run.max_steps
    if asked is not None and step < asked and not watch.should_stop:
        why = f"{why}\nrun.max_steps = {asked} is not reached: raise run.max_epochs, which is {config.run.max_epochs}"
    if watch.best is None:
        return why
    return f"{why}\nlowest loss on {watch.name}: {watch.best:.4f}, after update {watch.best_step}"


def why_ended(
    config: Config, num_updates: NumUpdates, step: int, num_samples: int | None, *, stopped_early: bool
) -> str:
    """Why the run ended, and what became of samples that made no whole update."""
    if stopped_early:
        return f"stopped after update {step}: the watched loss has not fallen for {config.eval.patience} evaluations"
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


def completion_text(prompt: str, completion: str) -> str:
    """A prompt of the held-out set and what the model makes of it."""
    return "\n".join([rule("a held-out prompt"), shown(prompt), rule("its completion"), shown(completion), rule("")])


def shown(text: str) -> str:
    """The text, without what would steer a terminal."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else "\N{REPLACEMENT CHARACTER}" for each in text.rstrip()
    )


def title(config: Config, wrapper: Wrapper, num_ranks: int) -> str:
    """The title of a report."""
    sizes, ranks = sizes_of(config.update), count(num_ranks, "rank")
    return f"{config.run.folder}: updates of {sizes} on {ranks} ({wrapper.name})"


def rule(text: str) -> str:
    """A line across, with a heading in it."""
    return f"── {text} ".ljust(80, "─") if text else "─" * 80


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
