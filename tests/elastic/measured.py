"""A long run of small updates, and what it keeps: memory, open files, threads and tensors after each lot of them."""

import gc
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megabatch.train import Event
from megabatch.train.cli import commands as cli

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RECIPE = """
[model.config]
model_type = "gpt2"
vocab_size = 384
n_embd = 16
n_layer = 1
n_head = 2
n_positions = 64
bos_token_id = 0
eos_token_id = 1

[data]
path = "{folder}/data.jsonl"
cache = "{folder}/cache"

[update]
global_batch_size = 4
micro_batch_size = 2
on_nonfinite = "skip_update"

[eval]
every = {every}
num_samples = 5

[run]
folder = "{folder}/run"
max_steps = {num_updates}
max_epochs = {num_updates}
save_every = {every}
keep_last = 2
after_update = "tests.elastic.measured:watch"
"""


class Watch:
    """Note what the process holds, every ``every`` updates."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.rows: list[dict[str, float]] = []
        self._last = time.perf_counter()

    def __call__(self, event: Event) -> None:
        if event.step % self.every:
            return
        now, threads = time.perf_counter(), threading.active_count()
        gc.collect()
        row = {
            "step": event.step,
            "resident_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES,
            "open_files": len(os.listdir("/proc/self/fd")) - 1,  # that of the listing
            "threads": threads,
            "tensors": sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),
            "seconds_per_update": (now - self._last) / self.every,
        }
        self.rows.append(row)
        self._last = time.perf_counter()


WATCHES: list[Watch] = []  # of the run that is on; the recipe can only name a function


def watch(event: Event) -> None:
    """The functions that the recipe names."""
    WATCHES[-1](event)


def run(folder: Path, num_updates: int, every: int) -> list[dict[str, float]]:
    """Train for so many updates, evaluating and saving now and then; what was held every ``every`` updates."""
    texts = [{"text": f"{number} " + "ab" * (number % 12)} for number in range(60)]
    (folder / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    recipe = RECIPE.format(folder=folder, num_updates=num_updates, every=max(1, num_updates // 10))
    (folder / "recipe.toml").write_text(recipe)
    WATCHES.append(Watch(every))
    try:
        assert cli.run(["train", str(folder / "recipe.toml")]) == 0
    finally:
        found = WATCHES.pop().rows
    return found


def slope(steps: list[float], values: list[float]) -> tuple[float, float]:
    """The growth of a value with each update and its standard error, by least squares."""
    x, y = np.array(steps) - np.mean(steps), np.array(values) - np.mean(values)  # [N], [N]
    found = float(x @ y / (x @ x))
    rest = y - found * x
    return found, float(np.sqrt(rest @ rest / (len(x) - 2) / (x @ x)))


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """The values that grow: memory over the second half of the run, the others from the first row to the last."""
    half, tenth = rows[len(rows) // 2 :], max(1, len(rows) // 10)
    steps, resident = [row["step"] for row in half], [row["resident_bytes"] for row in half]
    grown, error = slope(steps, resident)
    seconds = [row["seconds_per_update"] for row in rows]
    return {
        "num_updates": rows[-1]["step"],
        "resident_mib": [rows[0]["resident_bytes"] / 2**20, rows[-1]["resident_bytes"] / 2**20],
        "resident_bytes_per_update": {"slope": grown, "standard_error": error, "over": "the second half"},
        **{key: [rows[0][key], rows[-1][key]] for key in ("open_files", "threads", "tensors")},
        "seconds_per_update": {
            "first_tenth": float(np.median(seconds[:tenth])), "last_tenth": float(np.median(seconds[-tenth:])),
        },
    }  # fmt: skip
