"""Manifest: what every update was made of and came to, so that two runs can be held against each other."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megabatch.train.callbacks.jsonl_log import Journal
from megabatch.train.data.updates import Updates
from megabatch.train.runtime.ranks import Ranks

FILE_NAME = "manifest.jsonl"
BYTES = 16  # of a hash
SAME, CLOSE = ("samples", "weight", "lr"), ("loss", "grad_norm")  # equal in the same run; equal up to rounding
KEYS = (*SAME, "num_samples", *CLOSE)


class Manifest:
    """A line for every update. Collective."""

    def __init__(self, folder: Path, ranks: Ranks, *, enabled: bool) -> None:
        self._ranks, self._enabled = ranks, enabled
        self.journal = Journal(folder / FILE_NAME, enabled=enabled and ranks.is_main)

    def add(self, row: Mapping[str, Any], updates: Updates) -> None:
        """Add the line of the update that was handed out last, with its row; samples that were left out count too."""
        if not self._enabled:
            return
        samples = hash_of_all(updates.names, self._ranks)
        numbers = {key: row[key] for key in ("num_samples", "weight", "lr", *CLOSE)}
        self.journal.append({"step": row["step"], "samples": samples, **numbers})


def hash_of_all(names: Sequence[str], ranks: Ranks) -> str:
    """One hash of the update's samples; the same on any number of ranks, in whatever order they lie."""
    told = (json.loads(text) for text in ranks.gather(json.dumps([ranks.dp_rank, sum_of_hashes(names)])))
    total = sum(dict(told).values()) % 2 ** (8 * BYTES)  # ranks along cp, tp and pp have the same samples
    return f"{total:0{2 * BYTES}x}"


def sum_of_hashes(names: Sequence[str]) -> int:
    """The sum of the hashes of the names: of no order."""
    hashes = (hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:BYTES] for name in names)
    return sum(int.from_bytes(each, "big") for each in hashes)
