"""A run on replicas, each under a torchrun of its own, which may be lost, stopped and added. See docs/elastic.md.

`Replicas` shares each update among the replicas that are there. This module does the rest of a run: a replica takes the
state of another or that of the checkpoint, opens the run's folder, and knows if it is the one that writes.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from copy import copy
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from megabatch import Plan, UpdateSampler
from megabatch.errors import MegabatchError, in_one_line
from megabatch.integrations.lighthouse import LighthouseError
from megabatch.integrations.torchft import Replicas
from megabatch.train.checkpoints.metadata import check_same_run
from megabatch.train.checkpoints.paths import POINTER, checkpoints_of, path_of, step_of
from megabatch.train.checkpoints.run_folder import enter_shared_folder
from megabatch.train.config import Config
from megabatch.train.context import BestEvaluation, Callback, RunContext
from megabatch.train.data.updates import sampler_of
from megabatch.train.model.build_accumulator import build_accumulator
from megabatch.train.runtime.console import count
from megabatch.train.runtime.exit import CrashedError
from megabatch.train.runtime.files import replace_text
from megabatch.train.runtime.ranks import Ranks

# Environment variables of torchft.
LIGHTHOUSE, REPLICA = "TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID"
# In seconds, as in torchft.
COLLECTIVE_TIMEOUT = 60.0
# A replica that comes waits until the others have made their update.
QUORUM_TIMEOUT = timedelta(minutes=10)


def check_launch(config: Config, ranks: Ranks) -> None:
    """Raise `MegabatchError` where this process cannot be a replica."""
    problem = None
    if find_spec("torchft") is None:
        problem = 'torchft is not installed; pip install "megabatch[elastic]"'
    elif not ranks.job.key:
        problem = "this process is not under torchrun; start each replica with torchrun"
    elif not os.environ.get(LIGHTHOUSE):
        problem = f"{LIGHTHOUSE} is not set; start torchft_lighthouse, and set it to http://HOST:29510"
    elif ranks.size > 1 and config.parallel.wrapper != "fsdp2":
        problem = f'a replica has {ranks.size} processes; set parallel.wrapper = "fsdp2", or start one for each replica'
    elif ranks.size > 1 and config.optim.ema_decay is not None:
        problem = "optim.ema_decay is set, whose average is in shards; leave it out, or start one process a replica"
    if problem is not None:
        raise MegabatchError(f'parallel.replicas is "torchft" and {problem}')


def check_callbacks(callbacks: list[Callback]) -> None:
    """Raise `MegabatchError` for a callback of the user's that takes part in making a gradient."""
    for callback in callbacks:
        for event in ("before_update", "around_backward"):
            if getattr(type(callback), event) is not getattr(Callback, event):
                raise MegabatchError(
                    f'parallel.replicas is "torchft" and {type(callback).__name__} has {event}(), which would see the '
                    "samples of one replica; leave the callback out of run.callbacks"
                )


class DrawnUpdates(UpdateSampler):
    """An `UpdateSampler` that remembers the samples of its last update."""

    drawn: list[int]

    def __iter__(self) -> Iterator[list[int]]:
        for self.drawn in super().__iter__():
            yield self.drawn


@contextmanager
def one_line_for_lighthouse() -> Generator[None]:
    """Raise `CrashedError`, after which torchrun may start the replica again, where no quorum forms."""
    try:
        yield
    except LighthouseError as error:
        raise CrashedError(str(error)) from None
    except (RuntimeError, TimeoutError) as error:
        raise CrashedError(
            f"no quorum with the Lighthouse at {os.environ[LIGHTHOUSE]} ({in_one_line(error)}); look if "
            "torchft_lighthouse runs there, and start the replicas again"
        ) from None


class OpeningReplicas(Replicas):
    """Replicas that open the run in their first quorum."""

    open_run: Callable[[], None]

    def start_quorum(self) -> None:
        with one_line_for_lighthouse():
            super().start_quorum()
        self.open_run()


class Replica:
    """This replica of a run.

    Args:
        context: The run, with the state of its checkpoint.
        start: Opens the run's folder and starts the callbacks. Called in the first quorum, when the state is right: no
            replica makes an update before.
    """

    def __init__(self, context: RunContext, start: Callable[[], None]) -> None:
        config, learner = context.config, context.learner
        self._context, self._start, self._is_open, self._num_replicas = context, start, False, 0
        assert context.shared is not None
        self._shared = context.shared
        self._folder_id = enter_shared_folder(context.folder, self._shared, context.ranks)
        for log in context.logs:
            log.shared = self._shared
        self._sampler = sampler_of(context.data, config, Ranks(0, 1, context.ranks.device), DrawnUpdates)
        self._sampler.load_state_dict(context.updates.state_dict())
        self._manager, group = self._connect()
        # Before `Replicas` registers: a replica of another run is refused before it takes weights.
        self._manager.register_state_dict_fn("trainer", self._load_state, self._state)
        self._manager.load_state_dict({"step": learner.step, "batches_committed": learner.step})
        self._replicas = OpeningReplicas(
            self._manager, group, self._sampler, learner.optimizer, scheduler=learner.scheduler, seed=config.run.seed
        )
        self._replicas.open_run = self._open_after_quorum
        learner.gradient = build_accumulator(context.model.model, config, None, [self._replicas])
        learner.gradient.reserve_for(learner.optimizer)

    def updates(self) -> Iterator[None]:
        """Make updates until the run is over. Yield once the weights have moved."""
        context, learner = self._context, self._context.learner
        updates = self._replicas.updates(
            learner.gradient, context.updates.load, context.loss_fn,
            num_updates=context.updates.num_updates.of_run or 0, max_norm=learner.max_norm,
        )  # fmt: skip
        while True:
            context.started = time.perf_counter()
            update = next(updates, None)
            if update is None:
                break
            context.stop.has_begun = True
            self._note(context)
            context.update = learner.apply(update)
            yield
            if context.is_over or context.stop.agree(context.ranks):
                break
        if not self._is_open:
            self._open()
        self._manager.shutdown(wait=False)
        self._shared.is_writer = True

    def _note(self, context: RunContext) -> None:
        """Take note of an update that is to be applied."""
        context.heartbeat.start_update(context.step + 1)
        context.updates.go_on(self._sampler.drawn, self._sampler.state_dict())
        context.expected_samples, context.epoch = context.updates.size, context.updates.epochs
        context.num_calls, context.plan = 1, self._on_main(self._replicas.last_plan)
        number = self._replicas.num_replicas
        is_first = self._manager.participating_rank() == 0
        self._shared.is_writer = context.console.is_logged = is_first
        if number != self._num_replicas:
            before = f", {self._num_replicas} before" if self._num_replicas else ""
            context.console.say(f"{count(number, 'replica')} from update {context.step + 1} on{before}")
        self._num_replicas = number
        context.row = {"num_replicas": number}
        for callback in context.callbacks.before_update:
            callback.before_update(context)

    def _on_main(self, plan: Plan) -> Plan:
        """Return a plan on the main rank, which counts the microbatches of all replicas, and an empty one elsewhere."""
        return plan if self._context.ranks.is_main else Plan((), ())

    def _connect(self) -> tuple[Any, Any]:
        """Return torchft's manager and its process group. Other replicas wait for this one from here on."""
        torchft: Any = import_module("torchft")
        ranks, number = self._context.ranks, os.environ.get(REPLICA)
        timeout = timedelta(seconds=self._context.config.run.collective_timeout or COLLECTIVE_TIMEOUT)
        kind = torchft.ProcessGroupNCCL if ranks.device.type == "cuda" else torchft.ProcessGroupGloo
        group = kind(timeout=timeout)
        if ranks.rank > 0:
            ranks.barrier()
        with one_line_for_lighthouse():
            manager = torchft.Manager(
                group, None, None, min_replica_size=1, use_async_quorum=False, timeout=timeout,
                quorum_timeout=QUORUM_TIMEOUT, replica_id=f"megabatch_{number}" if number else None,
            )  # fmt: skip
        if ranks.rank == 0:
            ranks.barrier()
        return manager, group

    def _open_after_quorum(self) -> None:
        """Open the run, once the first quorum that did not fail has said which update it is at. Collective."""
        if not self._is_open and not any(self._context.ranks.gather(self._manager.errored() is not None)):
            self._open()

    def _open(self) -> None:
        context, is_joined = self._context, self._shared.is_joined
        step = self._manager.current_step()
        if context.checkpoint is not None and step_of(context.checkpoint.name) != step:
            context.checkpoint = None
        context.has_others_state = is_joined or (step > 0 and context.checkpoint is None)
        if is_joined:
            context.console.say(f"joined the run after update {step}")
            context.console.is_logged = False
        elif context.checkpoint is not None:
            # Later checkpoints, of updates that are made again, do not count.
            pointer = checkpoints_of(context.folder) / POINTER
            context.ranks.on_main(lambda: replace_text(pointer, path_of(context.folder, step).name), str(pointer))
        ids = next(iter(copy(self._sampler)), [])
        context.plan = self._on_main(self._replicas.plan(self._sampler.lengths[ids].tolist()))
        self._start()
        self._is_open = True

    def _state(self) -> dict[str, Any]:
        """Return what a replica that joins needs besides weights, optimizer, schedule and samples."""
        context = self._context
        return {
            "is_open": self._is_open,
            "folder": self._folder_id,
            "step": context.step,
            "num_replicas": self._num_replicas,
            "identity": dict(context.identity),
            "positions": {name: part.state_dict() for name, part in context.positions.items()},
            "saved": {name: part.state_dict() for name, part in context.saved.items() if name != "learner"},
            "rows": [[*log.pending] for log in context.logs],
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        context = self._context
        if state["folder"] != self._folder_id:
            raise MegabatchError(
                f"run.folder is {context.folder}, where other replicas do not write: it is on another disk; name a "
                "folder on a disk that all hosts share"
            )
        check_same_run(path_of(context.folder, state["step"]), state["identity"], dict(context.identity))
        context.learner.step, self._shared.is_joined = state["step"], state["is_open"]
        self._num_replicas = state["num_replicas"]
        for name, part in context.positions.items():
            part.load_state_dict(state["positions"][name])
        watch = context.positions["watch"]
        context.best = BestEvaluation(watch.name, watch.best, watch.best_step)
        for name, part in context.saved.items():
            if name != "learner":
                part.load_state_dict(state["saved"][name])
        for log, lines in zip(context.logs, state["rows"], strict=True):
            log.pending[:] = lines
