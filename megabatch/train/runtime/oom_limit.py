"""OOM limit: what a microbatch may hold since memory ran out, kept in the run's folder for every restart."""

import contextlib
import json
import time
from collections.abc import Generator
from pathlib import Path

from megabatch import Plan
from megabatch.errors import MegabatchError, MicrobatchLimit
from megabatch.train.config import RunConfig, UpdateConfig
from megabatch.train.runtime.console import count
from megabatch.train.runtime.files import read_file, replace_text
from megabatch.train.runtime.ranks import Ranks

OOM_LIMIT_FILE = "microbatch.json"
# Every host sees a file after so long; NFS clients look again after sixty seconds at most.
SECONDS_TO_SEE = 90


@contextlib.contextmanager
def saving_oom_limit(run: RunConfig, ranks: Ranks) -> Generator[None, None, None]:
    """Run the block; if memory runs out in it, the rank where it does so writes the limit down."""
    try:
        yield
    except MegabatchError as error:
        if error.shortage is not None and error.shortage.rank == ranks.rank:
            _save(Path(run.folder), error.shortage.bound)
        raise


def load_oom_limit(run: RunConfig) -> MicrobatchLimit | None:
    """Return the limit in the run's folder, or None if memory never ran out."""
    return _load(Path(run.folder) / OOM_LIMIT_FILE)


def wait_for_oom_limit(run: RunConfig, ranks: Ranks) -> None:
    """Wait until every rank reads the same limit; a network disk may show a file late. Collective."""
    for _ in range(SECONDS_TO_SEE):
        if len(set(ranks.gather(load_oom_limit(run)))) == 1:
            return
        time.sleep(1.0)
    file = Path(run.folder) / OOM_LIMIT_FILE
    raise MegabatchError(f"ranks read different things in {file}; name a run.folder on a disk that all hosts share")


def report_split(run: RunConfig, plan: Plan, limit: MicrobatchLimit | None, ranks: Ranks) -> str:
    """Save this rank's limit after an update whose microbatches ran in parts; return the message. Collective."""
    if plan.num_split:
        _save(Path(run.folder), limit)
    reports = ranks.gather((plan.num_split, limit))
    num_split = sum(number for number, _ in reports)
    text = f"{count(num_split, 'microbatch')} did not fit in memory and ran in parts, to the same gradient"
    # The limit of a rank that split a dummy microbatch is None.
    limits = [bound for number, bound in reports if number and bound is not None]
    if not limits:
        return text
    samples, tokens = map(min, zip(*limits, strict=True))
    return f"{text}; from here on one holds at most {tokens:,} tokens, or {samples:,} samples"


def lowered_settings(update: UpdateConfig, limit: MicrobatchLimit | None) -> list[str]:
    """Return a message for each setting of the recipe that the limit lowers."""
    if limit is None:
        return []
    settings = {"micro_batch_size": (limit.samples, "sample"), "max_microbatch_tokens": (limit.tokens, "token")}
    return [
        f"update.{key} {stated:,} is lowered: since a microbatch did not fit in memory, one holds at most "
        f"{largest:,} {noun}{'' if largest == 1 else 's'} ({OOM_LIMIT_FILE})"
        for key, (largest, noun) in settings.items()
        if isinstance(stated := getattr(update, key), int) and largest < stated
    ]


def _save(folder: Path, limit: MicrobatchLimit | None) -> None:
    if limit is None:
        return
    # The error or the run matters more.
    with contextlib.suppress(OSError):
        # Memory may run out before the run's folder is made.
        folder.mkdir(parents=True, exist_ok=True)
        lowest = MicrobatchLimit(*map(min, limit, _load(folder / OOM_LIMIT_FILE) or limit))
        replace_text(folder / OOM_LIMIT_FILE, json.dumps(lowest._asdict()) + "\n")


def _load(file: Path) -> MicrobatchLimit | None:
    # A damaged limit is learned again.
    with contextlib.suppress(OSError, ValueError, TypeError):
        limit = MicrobatchLimit(**json.loads(read_file(file)))
        if all(type(number) is int and number > 0 for number in limit):
            return limit
    return None
