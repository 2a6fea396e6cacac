"""Words: what a run says about itself, as text. Pure."""

from megabatch import Plan
from megabatch.train.config import Config
from megabatch.train.model import Wrapper
from megabatch.train.optim import NumUpdates


def plan_text(config: Config, wrapper: Wrapper, num_ranks: int, plan: Plan, num_updates: int) -> str:
    """The plan of the run and of its next update, before it starts."""
    cut, *others = plan.explain().splitlines()
    lines = [
        f"{num_updates} updates of {config.update.global_batch_size} samples (update.global_batch_size) "
        f"on {count(num_ranks, 'rank')}",
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


def end_text(config: Config, num_updates: NumUpdates, num_samples: int) -> str:
    """Why the run ended, and what became of samples that made no whole update."""
    if num_updates.of_run < num_updates.of_data:
        return f"stopped at run.max_steps = {num_updates.of_run}; the data is enough for {num_updates.of_data} updates"
    size, epochs = config.update.global_batch_size, config.run.max_epochs
    if config.update.tail == "drop" and num_samples % size:
        return f"the data ran out: dropped {num_samples % size} samples of each epoch, too few for an update of {size}"
    if config.update.tail == "carry" and epochs * num_samples % size:
        return f"the data ran out: {epochs * num_samples % size} samples were left, too few for an update of {size}"
    return f"the data ran out after {count(epochs, 'epoch')}; every sample was used"


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
