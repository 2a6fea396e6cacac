"""Runs: choices run under fake tensors; for a large model two at once, the second in a process of its own."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

from megabatch.train.model.architecture import quiet
from megabatch.train.plan.choices import Choice
from megabatch.train.plan.rows import Row, simulated_row
from megabatch.train.plan.subject import Subject

AT_ONCE = 2  # a run takes all of a core, and half a GiB
NUM_LAYERS = 24  # from which on a run takes longer than starting a process


def run(subject: Subject, limit_bytes: int, choice: Choice) -> Row:
    """The row of one choice."""
    with quiet():
        found = subject.simulated(choice)
    return simulated_row(choice, found, limit_bytes, choice.micro_batch_size * subject.sample.length_tokens)


@contextmanager
def runner(subject: Subject, limit_bytes: int) -> Generator[Callable[[Sequence[Choice]], list[Row]]]:
    """Gives the function that runs choices; the rows are the same, however it does."""
    one = partial(run, subject, limit_bytes)
    if subject.sizes.num_layers < NUM_LAYERS:
        yield lambda choices: [one(choice) for choice in choices]
        return
    with ProcessPoolExecutor(AT_ONCE - 1, mp_context=get_context("spawn")) as others:

        def run_together(choices: Sequence[Choice]) -> list[Row]:
            waiting = [others.submit(one, choice) for choice in choices[1:]]
            here = [one(choice) for choice in choices[:1]]
            return here + [each.result() for each in waiting]

        yield run_together
