"""A run as its callbacks see it: the `RunContext`, the six events of a `Callback`, and the `Callbacks` of a run."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.tensor.parallel import loss_parallel

from megabatch import Learner, Plan, Term, Update
from megabatch.errors import MegabatchError
from megabatch.losses import LossFunction
from megabatch.train.config import Config
from megabatch.train.data.load import Data
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import ParallelModel
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import JsonlFile, Row, sync
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.plugins import Event
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.shared_folder import SharedFolder
from megabatch.train.runtime.signals import StopSignal

EVENTS = ("start", "before_update", "around_backward", "after_update", "after_evaluation", "end")
# Adds samples to the open update.
ForwardBackward = Callable[[Sequence[Any]], Any]


@dataclass
class BestEvaluation:
    """The lowest loss so far on the set that the run follows (``eval.watch``)."""

    set: str | None = None  # None: the run evaluates no set
    loss: float | None = None
    step: int | None = None


@dataclass
class RunContext:
    """One run on this rank: all that the loop and its callbacks share.

    A callback reads it. Any callback may set `should_stop`, and may add columns to `row` in `before_update` and
    `around_backward`, which metrics.jsonl gets. The other attributes belong to the loop and to the callback named
    beside them.
    """

    config: Config  # the recipe
    ranks: Ranks
    console: Console  # only the main rank's speaks
    stop: StopSignal  # the signals that end the run
    heartbeat: Heartbeat
    tokenizer: Any  # None for a dataset of your own
    data: Data
    updates: Updates  # this rank's samples of each update
    model: ParallelModel  # the model, its wrapper and how it lies over the ranks
    learner: Learner  # model, optimizer, schedule and gradient accumulator
    loss_fn: LossFunction  # of training: in the model's precision, with a router loss if the recipe has one
    limit: Any  # `ChosenLimit` of the chapter autotune, the measured limit; None: the recipe states it
    identity: Mapping[str, Any]  # as JSON: a checkpoint with another identity belongs to another run
    checkpoint: Path | None = None  # the run resumes from it; None: it starts
    shared: SharedFolder | None = None  # the part in the run's folder of this replica, where there are several
    has_others_state: bool = False  # a replica that goes on from the state of another, not of a checkpoint
    callbacks: "Callbacks" = field(default_factory=lambda: Callbacks(()))

    saved: dict[str, Any] = field(default_factory=dict[str, Any])  # tensors of a checkpoint: parts with a state_dict
    positions: dict[str, Any] = field(default_factory=dict[str, Any])  # metadata of a checkpoint: parts, as JSON
    logs: list[JsonlFile] = field(default_factory=list[JsonlFile])
    next_write: float = 0.0  # of the rows in ``logs``, on time.perf_counter's clock
    exits: ExitStack = field(default_factory=ExitStack)  # closed when the run ends or fails
    evaluated_weights: Callable[[], AbstractContextManager[None]] = nullcontext  # inside, the model holds the EMA
    best: BestEvaluation = field(default_factory=BestEvaluation)  # from early stopping
    summary: list[str] = field(default_factory=list[str])  # lines to print when the run ends
    should_stop: bool = False  # True ends the run after this update
    stop_reason: str = "a callback has asked for it"

    batch: Sequence[Any] = ()  # this rank's samples of the update
    seed: int = 0  # of its random numbers on this rank
    expected_samples: int = 0  # of the update, over all ranks; the last one of an epoch may have fewer
    epoch: float | None = None  # passes over the data with this update; None: a stream
    plan: Plan = field(default_factory=lambda: Plan((), ()))  # of this rank: the last update's, or the first one's
    num_calls: int = 0  # of `forward_backward` in the open update
    update: Update | None = None  # the last one
    values: Mapping[str, float] = field(default_factory=dict[str, float])  # its scalars, on the host
    started: float = 0.0  # when the loop asked for its samples, on time.perf_counter's clock
    reading_seconds: float = 0.0  # of the host in this update, in which it has read samples and nothing else ran
    # This update's own seconds of each data rank, measured and predicted, from `RankTiming`. None: not measured.
    rank_seconds: tuple[Sequence[float], Sequence[float]] | None = None
    row: Row = field(default_factory=dict[str, Any])  # of metrics.jsonl: the update's, or the evaluation's

    @property
    def folder(self) -> Path:
        return Path(self.config.run.folder)

    @property
    def step(self) -> int:
        """The number of updates so far."""
        return self.learner.step

    @property
    def is_new(self) -> bool:
        """True if the run starts with this process, at update 0."""
        return self.checkpoint is None and not self.has_others_state

    @property
    def is_writer(self) -> bool:
        """True unless this is one of several replicas, and another one writes checkpoints and pages."""
        return self.shared is None or self.shared.is_writer

    @property
    def is_stopped(self) -> bool:
        """True once all ranks know of a signal that ends the run."""
        return self.stop.agreed is not None

    @property
    def is_over(self) -> bool:
        """True after the last update, unless a signal comes before."""
        planned = self.updates.num_updates.of_run
        return self.should_stop or (planned is not None and self.learner.step >= planned)

    def forward_backward(self, samples: Sequence[Any]) -> Mapping[str, Term]:
        """Add samples of this rank to the open update and return this rank's sums of the call. Collective.

        Each call of an update seeds its own random numbers, so that a resumed run draws the same dropout.
        """
        number, self.num_calls = self.num_calls, self.num_calls + 1
        seed = self.ranks.seed(self.config.run.seed, self.step + 1, number) if number else self.seed
        # torch.manual_seed takes long where no GPU is in use.
        torch.default_generator.manual_seed(seed)
        if self.ranks.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        with loss_parallel() if self.model.loss_parallel else nullcontext():
            sums = self.learner.forward_backward(samples, self.loss_fn)
        self.plan = cast(Plan, self.learner.gradient.last_plan)
        return sums

    def open_log(self, name: str) -> JsonlFile:
        """Return a file of rows in the run's folder. Checkpoints flush it; a resumed run drops its later rows."""
        self.logs.append(JsonlFile(self.folder / name, enabled=self.ranks.is_main))
        return self.logs[-1]

    def write_logs(self) -> None:
        """Write the rows that wait, if there is room."""
        for log in self.logs:
            log.write()

    def flush_logs(self) -> None:
        """Write the rows that wait, and wait until they are on the disk. Raises `OSError` if there is no room."""
        for log in self.logs:
            log.flush()
            if log.path is not None and log.path.exists():
                sync(log.path)

    def event(self) -> Event:
        model, device, is_main = self.model.run, self.ranks.device, self.ranks.is_main and self.is_writer
        return Event(self.step, model, device, self.folder, is_main, self.row, self.data.sets, self.tokenizer)


class Callback:
    """Something that a run does beside its updates. Override the events that you need.

    Every rank calls every event, so a callback may use collectives. It writes files and prints on the main rank only.
    """

    every: int | None = 1
    """`after_update` is called every so many updates, and after the last update if the run knows that it is the last.
    It does not know where a stream ends, or when a signal or ``eval.patience`` ends the run. None: only after such a
    last update."""

    # True for an update in several calls of `RunContext.forward_backward`.
    splits_updates = False

    def start(self, context: RunContext) -> None:
        """Prepare the run: called once, before the first update of this start. State is restored."""

    def before_update(self, context: RunContext) -> None:
        """Look at the samples of the next update, before it runs."""

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Make the gradient of the update: call ``forward_backward(batch)`` once, with the whole batch.

        Later callbacks surround earlier ones.

        Args:
            context: The run.
            batch: This rank's samples of the update.
            forward_backward: ``(samples)``: that of the callback before, or `RunContext.forward_backward`.
        """
        forward_backward(batch)

    def after_update(self, context: RunContext) -> None:
        """React to an update, after the step, with ``context.update`` and ``context.row``."""

    def after_evaluation(self, context: RunContext) -> None:
        """React to each evaluation of a set, with ``context.row``. The model holds the weights evaluated."""

    def end(self, context: RunContext) -> None:
        """Finish after the last update, or when a signal has stopped the run.

        A run that fails does not call it. A last evaluation may follow.
        """


def check_whole(context: RunContext) -> None:
    """Raise where a callback that surrounds this one has given a part of the batch before."""
    if context.num_calls:
        raise MegabatchError(
            f"a callback called forward_backward twice in update {context.step + 1}; call it once in around_backward, "
            "with the whole batch"
        )


class Callbacks:
    """The callbacks of a run. Each event holds those that override it, in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.all = callbacks
        self.start = self._overriding("start")
        self.before_update = self._overriding("before_update")
        self.around_backward = self._overriding("around_backward")
        self.after_update = self._overriding("after_update")
        self.after_evaluation = self._overriding("after_evaluation")
        self.end = self._overriding("end")
        self.may_split = any(callback.splits_updates for callback in callbacks)
        # Callbacks of the user's may change the samples, by numpy too.
        self.may_change = any(
            not type(callback).__module__.startswith("megabatch.")
            for callback in (*self.before_update, *self.around_backward)
        )

    def without(self, callback: Callback) -> "Callbacks":
        """Return the others."""
        return Callbacks([candidate for candidate in self.all if candidate is not callback])

    def _overriding(self, event: str) -> list[Callback]:
        return [callback for callback in self.all if getattr(type(callback), event) is not getattr(Callback, event)]


# Streams for copies to the host.
_apart: dict[torch.device, torch.cuda.Stream] = {}


def read_values(update: Update) -> dict[str, float]:
    """Copy the scalars of an update to the host: loss, weight, finite, grad_norm, and each of several terms.

    On a GPU they go in one copy, on a stream of its own: the host has waited for all of them (`Learner.optim_step`
    asks if the update is finite), and need not wait for the optimizer's step, which runs by now.
    """
    scalars = {"loss": update.loss, "weight": update.weight, "finite": update.finite}
    if update.grad_norm is not None:
        scalars["grad_norm"] = update.grad_norm
    if len(update.terms) > 1:
        scalars |= {f"loss_{name}": term for name, term in update.terms.items()}
    device = update.loss.device
    if device.type != "cuda":
        return {name: float(scalar) for name, scalar in scalars.items()}
    if device not in _apart:
        _apart[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(_apart[device]):
        stacked = torch.stack([scalar.to(device, torch.float64) for scalar in scalars.values()])  # [scalars]
        return dict(zip(scalars, stacked.tolist(), strict=True))
