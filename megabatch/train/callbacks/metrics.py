"""Metrics: one JSON object per update and per evaluation of a set, in a file that a resumed run goes on with; and the
same numbers for TensorBoard and for trackers."""

import json
import resource
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megabatch import CostModel, Plan, Update
from megabatch.train.callbacks.tensorboard import Events
from megabatch.train.callbacks.tracking import Tracking
from megabatch.train.checkpoints.run_folder import METRICS as FILE_NAME
from megabatch.train.checkpoints.run_folder import Row, is_evaluation, read_rows
from megabatch.train.config import Config
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import RetryingAppender, replace_text
from megabatch.train.runtime.ranks import Ranks

TENSORBOARD = "tensorboard"


class MetricsFile:
    """Rows appended as they come, each a line and written at once. Only the main rank writes.

    Rows for which the disk has no room wait in memory, in their order, and are written when there is room again.
    """

    def __init__(self, folder: Path, *, enabled: bool, tensorboard: bool, tracking: Tracking | None = None) -> None:
        self._path = folder / FILE_NAME
        self._enabled = enabled
        self._lines = RetryingAppender(self._path)
        self._folder = folder / TENSORBOARD if enabled and tensorboard else None
        self._tracking = tracking if enabled else None
        self._events: Events | None = None  # made with the first row: a folder stays as it is until then

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; floats keep every digit. The row of an evaluation has a "set"."""
        if not self._enabled:
            return
        self._lines.append((json.dumps(row) + "\n").encode())
        if self._folder is not None:  # at once: a killed run goes on from a checkpoint, whose updates must all be there
            self._events = self._events or Events(self._folder)
            self._events.add(scalars_of(row), row["step"])
        if self._tracking is not None:
            self._tracking.add(scalars_of(row), row["step"])

    def flush(self) -> None:
        """Write what waits. Raises `OSError` where that cannot be done: no checkpoint may be ahead of the rows."""
        self._lines.flush()
        if self._events is not None:
            self._events.flush()

    def cut(self, step: int, eval_every: int | None) -> None:
        """Drop what a run never stopped would not have at ``step``: later rows, and an evaluation out of turn."""
        if not self._enabled or not any(path and path.exists() for path in (self._path, self._folder)):
            return

        def keep(row: Row) -> bool:
            due = row["step"] == 0 or (eval_every is not None and row["step"] % eval_every == 0)
            return row["step"] < step or (row["step"] == step and (due or not is_evaluation(row)))

        kept = [row for row in read_rows(self._path) if keep(row)]
        replace_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))
        if self._folder is not None:  # TensorBoard drops what it has of the step and later: the step's rows come again
            self._events = Events(self._folder, purge_step=step)
            for row in kept:
                if row["step"] == step:
                    self._events.add(scalars_of(row), step)

    def close(self) -> None:
        """Write what is left; no row comes after it. Raises `OSError` where that cannot be done."""
        if self._tracking is not None:
            self._tracking.close()
        self.flush()
        self._events = None


def metrics_of(config: Config, ranks: Ranks, console: Console) -> MetricsFile:
    """Those of a run. Raises `MegabatchError` on every rank where a tracker is not installed; collective."""
    tracking = Tracking(config, ranks, console)
    tensorboard = config.run.tensorboard
    return MetricsFile(Path(config.run.folder), enabled=ranks.is_main, tensorboard=tensorboard, tracking=tracking)


class UpdateClock:
    """Seconds from the end of an update to the end of the next one: loading, computing and logging it, and waiting for
    other ranks; evaluations and checkpoints between them are not counted."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> float:
        """Seconds of the update that ends now."""
        end = time.perf_counter()
        seconds, self._start = end - self._start, end
        return seconds

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Surrounds what is no part of an update."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._start += time.perf_counter() - start


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """TensorBoard's tag of every number in the row → the number."""
    place = f"eval/{row['set']}" if is_evaluation(row) else "train"
    return {
        f"{place}/{key.removeprefix('eval_')}": float(value)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


class Sums(NamedTuple):
    """What the ranks told each other of an update."""

    padded_tokens: float
    num_split: float
    predicted: list[float]  # seconds of each data rank's microbatches, in the units of `CostModel`
    measured: list[float]  # seconds of its own work; zeros where they are not measured


def sums_of(plan: Plan, ranks: Ranks, own_seconds: float | None = None) -> Sums:
    """Of an update's plans; collective. ``own_seconds`` are those of this rank's own work, where they are measured."""
    predicted = predicted_seconds(plan)
    of_ranks = [at_its_place(number or 0.0, ranks) for number in (predicted, own_seconds)]
    padded_tokens, num_split, *seconds = ranks.sum_of_data(
        [plan.padded_tokens, plan.num_split, *of_ranks[0], *of_ranks[1]]
    )
    return Sums(padded_tokens, num_split, seconds[: ranks.dp_degree], seconds[ranks.dp_degree :])


def predicted_seconds(plan: Plan) -> float:
    """Of its microbatches; in units of a token's work where no cost was measured."""
    if plan.seconds is not None:
        return plan.seconds
    cost, cut = CostModel(), [plan.lengths_of(rows) for rows in plan.microbatches if rows]
    if not plan.padded:
        return sum(sum(map(cost.sample_seconds, lengths)) for lengths in cut)
    return sum(cost.seconds(len(lengths), max(lengths)) for lengths in cut)


def at_its_place(number: float, ranks: Ranks) -> list[float]:
    """This rank's number at its place among the data ranks, and zeros at those of the others, to be summed."""
    return [number if rank == ranks.dp_rank else 0.0 for rank in range(ranks.dp_degree)]


def update_row(
    update: Update,
    sums: Sums,
    step: int,
    lr: float,
    seconds: float,
    device: torch.device,
    *,
    counts_tokens: bool = True,
    epoch: float | None = None,
) -> Row:
    """What is logged of an update.

    With ``counts_tokens`` a sample's length is its tokens, and a whole weight the number of target tokens. The
    throughput is then that of real input tokens, padding not counted, else that of samples; over ``seconds``, those of
    an `UpdateClock`.
    """
    row: Row = {
        "step": step,
        "loss": float(update.loss) if update.weight else None,
        **({} if len(update.terms) < 2 else term_numbers(update)),
        "grad_norm": None if update.grad_norm is None else float(update.grad_norm),
        "lr": lr,
        "weight": float(update.weight),
        **({} if epoch is None else {"epoch": epoch}),
        "num_samples": update.num_samples,
        "num_microbatches": update.num_microbatches,
        **({"num_split": int(sums.num_split)} if sums.num_split else {}),
    }
    if counts_tokens:
        row["num_tokens"] = update.num_tokens
        if row["weight"].is_integer():
            row["num_target_tokens"] = int(row["weight"])
        row["padding"] = 1 - update.num_tokens / sums.padded_tokens if sums.padded_tokens else 0.0
    throughput = ("tokens", update.num_tokens) if counts_tokens else ("samples", update.num_samples)
    row[f"{throughput[0]}_per_second"] = throughput[1] / seconds
    row |= balance(sums)
    row["memory_gib"] = memory_gib(device)
    return row


def balance(sums: Sums) -> Row:
    """The slowest rank's work over the mean: as predicted, and as measured where it was."""
    row: Row = {}
    predicted, measured = sums.predicted, sums.measured
    if len(predicted) > 1 and any(predicted):
        row["slowest_over_mean"] = max(predicted) * len(predicted) / sum(predicted)
    if len(measured) > 1 and all(measured):
        row["measured_slowest_over_mean"] = max(measured) * len(measured) / sum(measured)
        row["slowest_rank"] = max(range(len(measured)), key=measured.__getitem__)
    return row


def term_numbers(update: Update) -> Row:
    """Each of the loss's several terms and metrics; None for one without weight."""
    numbers = {name: float(term) for name, term in update.terms.items()}
    return {f"loss_{name}": None if number != number else number for name, number in numbers.items()}  # NaN is 0 / 0


def memory_gib(device: torch.device) -> float:
    """Most memory that the main rank has used: allocated on its GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 2**10  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
