"""Metrics: one JSON object per update and per evaluation, in a file that a resumed run goes on with."""

import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megabatch import Plan, Update
from megabatch.train.ranks import Ranks

Row = dict[str, Any]

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """Rows appended as they come, each a line and written at once. Only the main rank writes."""

    def __init__(self, folder: Path, *, enabled: bool) -> None:
        self._path = folder / FILE_NAME
        self._enabled = enabled

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; floats keep every digit."""
        if self._enabled:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def cut(self, step: int, eval_every: int | None) -> None:
        """Drop what a run never stopped would not have at ``step``: later rows, and an evaluation out of turn."""
        if not self._enabled:
            return

        def keep(row: Row) -> bool:
            due = row["step"] == 0 or (eval_every is not None and row["step"] % eval_every == 0)
            return row["step"] <= step and ("eval_loss" not in row or due)

        beside = self._path.with_suffix(".tmp")
        beside.write_text(
            "".join(json.dumps(row) + "\n" for row in read_rows(self._path) if keep(row)), encoding="utf-8"
        )
        os.replace(beside, self._path)


def read_rows(path: Path) -> list[Row]:
    """The file's rows; a last line that was cut off by a kill is no row."""
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def update_row(update: Update, plan: Plan, step: int, lr: float, seconds: float, ranks: Ranks) -> Row:
    """What is logged of an update; collective. Sums are over all ranks, the throughput counts real input tokens."""
    (padded_tokens,) = ranks.sum([plan.padded_tokens])
    return {
        "step": step,
        "loss": float(update.loss) if update.weight else None,
        "grad_norm": None if update.grad_norm is None else float(update.grad_norm),
        "lr": lr,
        "num_tokens": update.num_tokens,
        "num_target_tokens": int(update.weight),
        "num_samples": update.num_samples,
        "num_microbatches": update.num_microbatches,
        "padding": 1 - update.num_tokens / padded_tokens if padded_tokens else 0.0,
        "tokens_per_second": update.num_tokens / seconds,
        "memory_gib": memory_gib(ranks.device),
    }


def memory_gib(device: torch.device) -> float:
    """Most memory that the main rank has used: allocated on its GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
