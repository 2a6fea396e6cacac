"""Words: what a run says about itself, as text. Pure."""

from collections.abc import Sequence

from megabatch import Plan
from megabatch.train.config import Config
from megabatch.train.data.loader import NumUpdates
from megabatch.train.model.wrap import Wrapper


def plan_text(
    config: Config, wrapper: Wrapper, num_ranks: int, plan: Plan, num_updates: NumUpdates, notes: Sequence[str]
) -> str:
    """The plan of the run and of its next update, before it starts; ``notes`` are what data and model say."""
    cut, *others = plan.explain().splitlines()
    updates = "updates until the stream ends," if num_updates.of_run is None else f"{num_updates.of_run} updates"
    lines = [
        f"{updates} of {config.update.global_batch_size} samples (update.global_batch_size) "
        f"on {count(num_ranks, 'rank')}",
        *notes,
        f"wrapper {wrapper.name}: {wrapper.reason}",
        f"the next update{' on rank 0' if num_ranks > 1 else ''}: {cut}",
        *others,
        f"gradient accumulation steps (derived): {plan.num_microbatches}",
    ]
    return "\n".join(f"plan  {line}" for line in lines)


def short_update_text(num_samples: int, global_batch_size: int) -> str:
    """What became of an update for which an epoch's data did not suffice."""
    return (
        f"the epoch's data ran out: its last update was stepped exactly: {num_samples} of {global_batch_size} samples"
    )


def end_text(config: Config, num_updates: NumUpdates, step: int, num_samples: int | None) -> str:
    """Why the run ended after ``step`` updates, and what became of samples that made no whole update."""
    if config.eval.patience is not None and step != num_updates.of_run:
        return f"stopped after update {step}: the watched loss has not fallen for {config.eval.patience} evaluations"
    if num_updates.of_data is None and config.run.max_steps is not None and step == config.run.max_steps:
        return f"stopped at run.max_steps = {step}"
    if num_updates.of_data is not None and step < num_updates.of_data:
        return f"stopped at run.max_steps = {step}; the data is enough for {num_updates.of_data} updates"
    size, epochs = config.update.global_batch_size, config.run.max_epochs
    if num_samples is not None and config.update.tail == "drop" and num_samples % size:
        return f"the data ran out: dropped {num_samples % size} samples of each epoch, too few for an update of {size}"
    if num_samples is not None and config.update.tail == "carry" and epochs * num_samples % size:
        return f"the data ran out: {epochs * num_samples % size} samples were left, too few for an update of {size}"
    used = "every sample was used" if config.update.tail == "step" else "no whole update is left"
    return f"the data ran out after {count(epochs, 'epoch')}; {used}"


def completion_text(prompt: str, completion: str) -> str:
    """A prompt of the held-out set and what the model makes of it."""
    return "\n".join(
        [rule("a held-out prompt"), prompt.rstrip(), rule("its completion"), completion.rstrip(), rule("")]
    )


def title(config: Config, wrapper: Wrapper, num_ranks: int) -> str:
    """The title of a report."""
    size, ranks = config.update.global_batch_size, count(num_ranks, "rank")
    return f"{config.run.folder}: updates of {size} samples on {ranks} ({wrapper.name})"


def rule(text: str) -> str:
    """A line across, with a heading in it."""
    return f"── {text} ".ljust(80, "─") if text else "─" * 80


def count(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
