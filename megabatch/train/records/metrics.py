"""metrics.jsonl: a row for each update and for each evaluation of a set, which loggers and the console get too."""

import hashlib
import json
import linecache
import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megabatch import CostModel, Plan, Update
from megabatch.train.context import Callback, RunContext
from megabatch.train.records.loggers import Logger, make_loggers
from megabatch.train.runtime.console import utc_now
from megabatch.train.runtime.files import METRICS, JsonlFile, Row, is_evaluation
from megabatch.train.runtime.plugins import load_file, load_module
from megabatch.train.runtime.ranks import Ranks


class Metrics(Callback):
    """Make the row of each update, and hand the rows to metrics.jsonl, the loggers and the console."""

    def __init__(self, context: RunContext) -> None:
        self._counts_tokens = context.data.counts_tokens
        self._loggers = make_loggers(context.config, context.ranks, context.console)
        self._file = MetricsFile(
            context.folder, enabled=context.ranks.is_main, eval_every=context.config.eval.every, loggers=self._loggers
        )
        context.logs.append(self._file)
        context.exits.push(self._close)
        self._num_devices, self._lr, self._hash = context.ranks.size, 0.0, run_hash(context)
        self._utilization = context.model.utilization
        self._began = time.perf_counter()

    def start(self, context: RunContext) -> None:
        """Go on counting seconds, and show the rows of the step again: a logger drops what it has from there on."""
        rows = [] if context.is_new else self._file.rows()
        before = context.ranks.broadcast(max((row.get("seconds", 0.0) for row in rows), default=0.0))
        self._began = time.perf_counter() - before
        if self._loggers:
            self._file.show([row for row in rows if row["step"] == context.step])

    def before_update(self, context: RunContext) -> None:
        """Read the learning rate, before the step moves it on."""
        self._lr = float(context.learner.optimizer.param_groups[0]["lr"])

    def after_update(self, context: RunContext) -> None:
        """Make the row, together with the columns that other callbacks have added. Collective."""
        context.row = self._row(context) | context.row
        if "skipped_samples" in context.row:
            context.row = without_nan(context.row)
        self._file.append(context.row)
        context.console.update(context.row)
        num_samples = context.row["num_samples"] + context.row.get("skipped_samples", 0)
        if num_samples < context.expected_samples:
            context.console.say(
                "the epoch's data ran out: its last update was stepped exactly: "
                f"{num_samples} of {context.expected_samples} samples"
            )

    def after_evaluation(self, context: RunContext) -> None:
        """Add the row of a set."""
        context.row |= self._stamp(time.perf_counter())
        self._file.append(context.row)
        self._file.write()
        context.console.evaluation(context.step, context.row)

    def _row(self, context: RunContext) -> Row:
        update, plan, now = context.update, context.plan, time.perf_counter()
        assert update is not None
        sums = gather_sums(plan, context.ranks)
        if context.shared is not None:
            sums = sums._replace(predicted=())
        row = update_row(update, context.values, sums, now - context.started, counts_tokens=self._counts_tokens)
        row |= self._speed(row, self._num_devices * context.row.get("num_replicas", 1))
        epoch = {} if context.epoch is None else {"epoch": context.epoch}
        memory = {"memory_gib": sums.memory_gib}
        return {"step": context.learner.step, "lr": self._lr, **row, **epoch, **memory, **self._stamp(now)}

    def _speed(self, row: Row, num_devices: int) -> Row:
        """Return the speed of a device, and its MFU where that is known."""
        if "tokens_per_second" not in row:
            return {}
        tokens_per_second = row["tokens_per_second"] / num_devices
        mfu = self._utilization.mfu(tokens_per_second, row["num_tokens"] / max(1, row["num_samples"]))
        return {"tokens_per_second_per_device": tokens_per_second, **({} if mfu is None else {"mfu": mfu})}

    def _stamp(self, now: float) -> Row:
        """Return date, seconds of training, evaluating and saving since the run's first start, and the run's hash."""
        return {"time": utc_now(), "seconds": round(now - self._began, 3), "run_hash": self._hash}

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let loggers finish, unless the run fails: they may wait for a service."""
        self._file.write()
        for logger in self._loggers if kind is None else ():
            logger.close()


def run_hash(context: RunContext) -> str:
    """Return one hash of what a run is made of: versions, the source of the recipe's functions, settings, model, data.

    Folders, and the number and the layout of ranks, do not count.
    """
    parts = {key: value for key, value in context.identity.items() if key != "recipe"}
    named = (section.function for section in (context.config.model, context.config.data, context.config.loss))
    sources = [source_of(name) for name in (*named, context.config.optim.function) if name is not None]
    content = json.dumps([parts, sources], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def source_of(name: str) -> str:
    """Return the source of the file in which the recipe's function ``name`` is; "" for one without a file."""
    place = name.rpartition(":")[0]
    module = load_file(Path(place)) if place.endswith(".py") else load_module(place)
    path = getattr(module, "__file__", None)
    if path is None:
        return ""
    if not Path(path).is_file():
        return "".join(linecache.getlines(path, vars(module)))
    return Path(path).read_text(encoding="utf-8", errors="replace")


def without_nan(row: Mapping[str, Any]) -> Row:
    """Return a row with None for NaN and infinity, which a loss may be and JSON does not have."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


class MetricsFile(JsonlFile):
    """The rows of a run. A resumed run drops an evaluation out of turn: a run that never stopped would not have it."""

    has_every_update = True

    def __init__(self, folder: Path, *, enabled: bool, eval_every: int | None, loggers: Sequence[Logger] = ()) -> None:
        super().__init__(folder / METRICS, enabled=enabled)
        self._eval_every, self._loggers = eval_every, loggers
        # Rows that loggers do not have yet.
        self._hidden: list[Row] = []

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. Floats keep every digit."""
        if self.is_enabled:
            row = without_nan(row)
            self.pending.append(f"{json.dumps(row)}\n")
            if self._loggers:
                self._hidden.append(dict(row))

    def write(self) -> None:
        """Write the rows that wait, and show them to the loggers."""
        super().write()
        rows, self._hidden = self._hidden, []
        if self.shared is None or self.shared.is_writer:
            self.show(rows)

    def show(self, rows: Sequence[Row]) -> None:
        """Hand the numbers of rows to the loggers."""
        for row in rows:
            scalars = scalars_of(row)
            for logger in self._loggers:
                logger.log(scalars, row["step"])

    def flush(self) -> None:
        """Write what waits here and in the loggers. Raises `OSError` if there is no room."""
        self.write()
        super().flush()
        for logger in self._loggers:
            logger.flush()

    def is_kept(self, row: Row, step: int) -> bool:
        """Return True for a row that stays in a run that resumes after ``step`` updates."""
        in_turn = row["step"] == 0 or (self._eval_every is not None and row["step"] % self._eval_every == 0)
        return row["step"] < step or (row["step"] == step and (in_turn or not is_evaluation(row)))


class Sums(NamedTuple):
    """Numbers of an update's plans, over all ranks."""

    padded_tokens: float
    num_split: float
    memory_gib: float  # of the rank that has used the most
    predicted: Sequence[float] = ()  # seconds of each data rank's microbatches, in the units of `CostModel`


def gather_sums(plan: Plan, ranks: Ranks) -> Sums:
    """Add up the numbers of the plans of all data ranks, and find the most memory of a rank. Collective."""
    memory = memory_gib(ranks.device)
    if ranks.size == 1:
        return Sums(plan.padded_tokens, plan.num_split, memory)
    seconds = at_its_place(predict_seconds(plan), ranks) if ranks.dp_degree > 1 else []
    numbers, memories = ranks.sum_of_data_and_gather([plan.padded_tokens, plan.num_split, *seconds], memory)
    padded_tokens, num_split, *predicted = numbers
    return Sums(padded_tokens, num_split, max(memories), predicted)


def predict_seconds(plan: Plan, cost: CostModel | None = None) -> float:
    """Return the time of the plan's microbatches by ``cost``, or by the plan's own.

    It is in units of a token's work where no cost was measured.
    """
    if plan.seconds is not None and cost is None:
        return plan.seconds
    cost, microbatches = cost or CostModel(), [plan.lengths_of(rows) for rows in plan.microbatches if rows]
    if not plan.padded:
        return sum(sum(map(cost.sample_seconds, lengths)) for lengths in microbatches)
    return sum(cost.seconds(len(lengths), max(lengths)) for lengths in microbatches)


def at_its_place(number: float, ranks: Ranks) -> list[float]:
    """Return zeros for each data rank, and ``number`` at the place of this one: a sum over ranks has all numbers."""
    return [number if rank == ranks.dp_rank else 0.0 for rank in range(ranks.dp_degree)]


def update_row(update: Update, values: Mapping[str, float], sums: Sums, seconds: float, *, counts_tokens: bool) -> Row:
    """Return the columns of an update.

    Args:
        update: Counts its samples, tokens and microbatches.
        values: Its scalars, from `read_values`.
        sums: Of its plans.
        seconds: From the request for its samples until now, for the throughput.
        counts_tokens: A sample's length is its number of tokens. The throughput is that of real tokens, without
            padding, and a whole weight is the number of target tokens. Otherwise the throughput is that of samples.
    """
    row: Row = {"loss": values["loss"] if values["weight"] else None, "grad_norm": values.get("grad_norm")}
    terms = {key: value for key, value in values.items() if key.startswith("loss_")}
    row |= {key: None if math.isnan(value) else value for key, value in terms.items()}
    row["weight"] = values["weight"]
    row["num_samples"], row["num_microbatches"] = update.num_samples, update.num_microbatches
    if sums.num_split:
        row["num_split"] = int(sums.num_split)
    if counts_tokens:
        row["num_tokens"] = update.num_tokens
        if row["weight"].is_integer():
            row["num_target_tokens"] = int(row["weight"])
        row["padding"] = 1 - update.num_tokens / sums.padded_tokens if sums.padded_tokens else 0.0
        row["tokens_per_second"] = update.num_tokens / seconds
    else:
        row["samples_per_second"] = update.num_samples / seconds
    if any(sums.predicted):
        row["slowest_over_mean"] = max(sums.predicted) * len(sums.predicted) / sum(sums.predicted)
    return row


def memory_gib(device: torch.device) -> float:
    """Return the most memory that this rank has used: allocated on its GPU, or resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    # macOS counts bytes, Linux KiB.
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def scalars_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return every number of the row by its tag."""
    place = f"eval/{row['set']}" if is_evaluation(row) else "train"
    return {
        f"{place}/{key.removeprefix('eval_')}": float(value)
        for key, value in row.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }
