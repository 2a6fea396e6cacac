"""Shortage: what a run has learned of its memory, kept in its folder, so that it goes on with smaller microbatches."""

import contextlib
import json
from collections.abc import Generator
from pathlib import Path

from megabatch.errors import Bound, MegabatchError
from megabatch.train.checkpoint import replace_text
from megabatch.train.config import RunConfig
from megabatch.train.ranks import Ranks

LEARNED = "microbatch.json"


@contextlib.contextmanager
def noting(run: RunConfig, ranks: Ranks) -> Generator[None, None, None]:
    """Surrounds a run: where memory runs out, that rank writes down what a microbatch may hold."""
    try:
        yield
    except MegabatchError as error:
        shortage, folder = error.shortage, Path(run.folder)
        if shortage is not None and shortage.rank == ranks.rank and shortage.bound is not None and folder.is_dir():
            with contextlib.suppress(OSError):  # the error is worth more than what is learned from it
                bound = Bound(*map(min, shortage.bound, noted(run) or shortage.bound))
                replace_text(folder / LEARNED, json.dumps(bound._asdict()) + "\n")
        raise


def noted(run: RunConfig) -> Bound | None:
    """What a microbatch may hold in a run that goes on; None where its memory has sufficed."""
    file = Path(run.folder) / LEARNED
    return Bound(**json.loads(file.read_text())) if run.resume and file.exists() else None
