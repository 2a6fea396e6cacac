"""Shortage: what a run has learned of its memory, kept in its folder, so that it goes on with smaller microbatches."""

import contextlib
import json
import time
from collections.abc import Generator
from pathlib import Path

from megabatch import Plan
from megabatch.errors import MegabatchError, MicrobatchLimit
from megabatch.train.checkpoints.paths import replace_text
from megabatch.train.config import RunConfig, UpdateConfig
from megabatch.train.runtime.ranks import Ranks

LEARNED = "microbatch.json"
SECONDS_TO_SEE = 90  # in which every host sees a file; clients of NFS look again after sixty at most


@contextlib.contextmanager
def noting(run: RunConfig, ranks: Ranks) -> Generator[None, None, None]:
    """Surrounds a run: where memory runs out, that rank writes down what a microbatch may hold."""
    try:
        yield
    except MegabatchError as error:
        shortage = error.shortage
        if shortage is not None and shortage.rank == ranks.rank:
            _note(Path(run.folder), shortage.bound)
        raise


def split_words(run: RunConfig, plan: Plan, learned: MicrobatchLimit | None, ranks: Ranks) -> str:
    """What is to be said of an update of which microbatches ran in parts, on some rank. Collective.

    What this rank has learned is written down.
    """
    if plan.num_split:
        _note(Path(run.folder), learned)
    told = [json.loads(text) for text in ranks.gather(json.dumps([plan.num_split, learned]))]
    num_split = sum(number for number, _ in told)
    number = f"{num_split} microbatch{'' if num_split == 1 else 'es'}"
    text = f"{number} did not fit in memory and ran in parts, to the same gradient"
    bounds = [
        bound for number, bound in told if number and bound is not None
    ]  # of dummy microbatches alone nothing is learned
    if not bounds:
        return text
    samples, tokens = map(min, zip(*bounds, strict=True))
    return f"{text}; from here on one holds at most {tokens:,} tokens, or {samples:,} samples"


def stated_words(update: UpdateConfig, learned: MicrobatchLimit | None) -> list[str]:
    """What is to be said where a microbatch holds less than the recipe states."""
    if learned is None:
        return []
    pairs = {"micro_batch_size": (learned.samples, "sample"), "max_microbatch_tokens": (learned.tokens, "token")}
    return [
        f"update.{key} {stated:,} is lowered: since a microbatch did not fit in memory, one holds at most "
        f"{most:,} {noun}{'' if most == 1 else 's'} ({LEARNED})"
        for key, (most, noun) in pairs.items()
        if isinstance(stated := getattr(update, key), int) and most < stated
    ]


def noted(run: RunConfig) -> MicrobatchLimit | None:
    """What a microbatch may hold in a run that goes on or begins again; None where its memory has sufficed."""
    return _read(Path(run.folder))


def wait_for_learned(run: RunConfig, ranks: Ranks) -> None:
    """Wait until all ranks read the same: a network's disk may show one host later than another what was written
    there. Raises `MegabatchError` on every rank where it does not; collective."""
    for _ in range(SECONDS_TO_SEE):
        if len(set(ranks.gather(str(noted(run))))) == 1:
            return
        time.sleep(1.0)
    raise MegabatchError(
        f"ranks read different things in {Path(run.folder) / LEARNED}; name a run.folder on a disk that all hosts share"
    )


def has_learned(folder: Path) -> bool:
    """Whether a run there has ended for want of memory, and said with what to begin again."""
    return (folder / LEARNED).exists()


def _note(folder: Path, bound: MicrobatchLimit | None) -> None:
    if bound is None:
        return
    with contextlib.suppress(OSError):  # what goes on, an error or the run, is worth more than what is learned
        folder.mkdir(parents=True, exist_ok=True)  # it may have come before the run's folder was made
        least = MicrobatchLimit(*map(min, bound, _read(folder) or bound))
        replace_text(folder / LEARNED, json.dumps(least._asdict()) + "\n")


def _read(folder: Path) -> MicrobatchLimit | None:
    file = folder / LEARNED
    if not file.exists():
        return None
    try:
        bound = MicrobatchLimit(**json.loads(file.read_text()))
        if not all(type(number) is int and number > 0 for number in bound):
            raise ValueError
    except (ValueError, TypeError):
        raise MegabatchError(
            f"{file} does not say what a microbatch may hold; delete it, and the run learns it again"
        ) from None
    return bound
