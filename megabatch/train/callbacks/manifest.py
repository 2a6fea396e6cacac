"""manifest.jsonl: the samples of every update and what came of it, to compare two runs."""

import hashlib
import json
from collections.abc import Sequence

from megabatch.train.context import Callback, RunContext
from megabatch.train.runtime.ranks import Ranks

FILE_NAME = "manifest.jsonl"
BYTES = 16  # of a hash
SAME, CLOSE = ("samples", "weight", "lr"), ("loss", "grad_norm")  # equal in the same run; equal up to rounding
KEYS = (*SAME, "num_samples", *CLOSE)


class Manifest(Callback):
    """Write a line for every update. Samples that were left out of it count too. Collective."""

    def __init__(self, context: RunContext) -> None:
        self._file = context.open_log(FILE_NAME)

    def after_update(self, context: RunContext) -> None:
        """Add the line of the update."""
        samples = hash_of_all(context.updates.names, context.ranks)
        numbers = {key: context.row[key] for key in ("num_samples", "weight", "lr", *CLOSE)}
        self._file.append({"step": context.step, "samples": samples, **numbers})


def hash_of_all(names: Sequence[str], ranks: Ranks) -> str:
    """Return one hash of the update's samples: the same on any number of ranks, in any order."""
    told = (json.loads(text) for text in ranks.gather(json.dumps([ranks.dp_rank, sum_of_hashes(names)])))
    total = sum(dict(told).values()) % 2 ** (8 * BYTES)  # ranks along cp, tp and pp have the same samples
    return f"{total:0{2 * BYTES}x}"


def sum_of_hashes(names: Sequence[str]) -> int:
    """Return the sum of the hashes of the names, which has no order."""
    hashes = (hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:BYTES] for name in names)
    return sum(int.from_bytes(each, "big") for each in hashes)
