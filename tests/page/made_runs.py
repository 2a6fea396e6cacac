"""Runs' folders as the trainer writes them, without a training: as many updates and ranks as a test wants."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PLAN = [
    "plan  {updates} updates of 64 samples (update.global_batch_size) on {ranks} ranks",
    "plan  update.max_microbatch_tokens 8,192: the largest that fits",
    "plan  sync last: one all-reduce",
    "plan  1,234,567 parameters: LlamaForCausalLM, fresh weights of run.seed = 0",
    "plan  MFU: of h100-80g's 989 TFLOP/s in bfloat16",
]
RECIPE = 'optim = {name = "AdamW", lr = 0.002}\nupdate = {global_batch_size = 64}\n'
ENDED = "2000-01-01T00:00:00Z  stopped by SIGTERM after update 9; `megabatch train run` resumes it"
KINDS = ["idle", "forward", "backward", "idle", "forward", "backward", "reduce", "reduce", "step"]


def update(step: int, **more: Any) -> dict[str, Any]:
    """The row of an update whose loss falls."""
    row = {"step": step, "loss": 2 + 4 * math.exp(-step / 40) + 0.1 * math.sin(step), "grad_norm": 1 + 1 / step,
           "lr": 1e-3, "weight": 100.0, "num_samples": 64, "num_microbatches": 3, "num_tokens": 900 + step % 7,
           "padding": 0.05, "tokens_per_second": 12345.678 + step % 13,
           "tokens_per_second_per_device": 6000.0, "mfu": 0.4, "memory_gib": 1.5}  # fmt: skip
    return row | more


def evaluations(step: int, *names: str) -> list[dict[str, Any]]:
    """The rows of the sets, after an update."""
    return [
        {"step": step, "set": name, "eval_loss": 3.0 - step / 1e5 + number, "eval_perplexity": 20.0}
        for number, name in enumerate(names)
    ]


def cut(step: int, ranks: int = 2, microbatches: int = 3) -> dict[str, Any]:
    """The line of an update's cut; its first bar tells the step."""
    rank = [[4] * microbatches, [300 + step % 100, *[200] * microbatches][:microbatches], [10] * microbatches]
    return {"step": step, "cut": [rank] * ranks}


def timeline(step: int, ranks: int = 2) -> dict[str, Any]:
    """The line of a recorded update."""
    spans = {"kinds": KINDS, "ms": [float(place) for place in range(len(KINDS) + 1)]}
    return {"step": step, "device": "cpu", "num_ranks": ranks, "sync": "last", "ranks": [spans] * ranks}


def lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def whole_run(folder: Path, updates: int, *, ranks: int = 2, microbatches: int = 3) -> Path:
    """A run that has everything a page shows."""
    folder.mkdir(parents=True)
    rows = evaluations(0, "held-out", "code")
    for step in range(1, updates + 1):
        more = {"peak_gib": 1.2, "predicted_peak_gib": 1.25} if step == 2 else {}
        rows += [update(step, **more), *(evaluations(step, "held-out", "code") if step % 10 == 0 else [])]
    (folder / "metrics.jsonl").write_text(lines(rows))
    (folder / "cuts.jsonl").write_text(lines([cut(step, ranks, microbatches) for step in range(1, updates + 1)]))
    (folder / "timeline.jsonl").write_text(lines([timeline(3, ranks), timeline(9, ranks)]))
    (folder / "plan.txt").write_text("\n".join(PLAN).format(updates=updates + 5, ranks=ranks) + "\n")
    skipped = {"step": 4, "reason": "the loss is not finite", "samples": ["a:1"]}
    (folder / "skipped.jsonl").write_text(lines([skipped]))
    (folder / "log.txt").write_text(f"{ENDED}\n")
    (folder / "config.toml").write_text(RECIPE)
    start = {
        "time_utc": "2000-01-01T00:00:00Z",
        "num_ranks": ranks,
        "devices": {"a device": ranks},
        "torch": "2",
        "command": ["/a/path"],
    }
    (folder / "environment.json").write_text(json.dumps({"starts": [start]}))
    return folder


def recipe(folder: Path, text: str) -> Path:
    """A run that has its recipe, too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(text)
    return folder
