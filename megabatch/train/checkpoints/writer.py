"""Writing: a checkpoint is written while the run waits for it, or beside the run; a full disk does not end a run.

In the background, the state is copied to host memory before the next update, and a thread of each rank writes the copy,
in a process group of its own: with the sums, the new name and the pointer, as in the foreground. At most one is on its
way. It is torch's async_save in its two parts, so that all of this is done before the checkpoint counts as written.
"""

import copy
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.metadata import Meta
from megabatch.train.checkpoints.paths import POINTER, checkpoints_of, path_of, step_named_by
from megabatch.train.checkpoints.retention import Checkpoints, point_to_best
from megabatch.train.checkpoints.tensor_files import ignore_group_warning, save
from megabatch.train.config import Config
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.shared_folder import CHECKPOINT, SharedFolder
from megabatch.train.runtime.signals import StopSignal

# Seconds between tries to write a run's last checkpoint.
SECONDS_BETWEEN_TRIES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
# These tries take about an hour.
SECONDS_BETWEEN_LATE_TRIES, MOST_TRIES = 10.0, 360
# Seconds for a checkpoint on its way when a run on several ranks fails.
SECONDS_TO_LEAVE = 3.0


@dataclass(frozen=True)
class CheckpointRequest:
    """A checkpoint to write."""

    step: int
    states: dict[str, Any]
    meta: Meta
    is_best: bool
    # A regular checkpoint is written again if that fails; after a best one the weights move on.
    in_turn: bool


class Beside(threading.Thread):
    """A thread beside the run. A daemon: a thread that waits for a lost rank keeps no process from ending."""

    def __init__(self, write: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self._write = write
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error

    def result(self) -> None:
        """Wait, and raise what was raised."""
        self.join()
        if self.error is not None:
            raise self.error


class Writer:
    """Writes the checkpoints of a run, one at a time. Every method is collective.

    Args:
        flush: Writes what the run's other files still lack; no checkpoint is ahead of them.
        shared: The replica's part in the run's folder, where it is one of several. Each of them can write the last
            checkpoint: the first whose turn it is does.
    """

    def __init__(
        self, config: Config, ranks: Ranks, console: Console, flush: Callable[[], None],
        shared: SharedFolder | None = None,
    ) -> None:  # fmt: skip
        self._shared = shared
        self._folder, self._keep_last = Path(config.run.folder), config.run.keep_last
        self._ranks, self._console, self._flush = ranks, console, flush
        self._shelf = Checkpoints(self._folder)
        # The update at which a failed write is tried again.
        self._retry_step: int | None = None
        # Tries follow after 1, 2, 4, 8, ... updates until the checkpoint is written.
        self._retry_gap = 1
        self._apart: Ranks | None = None
        if in_background(config, ranks):
            group = None
            if dist.is_initialized():
                # Threads need a process group of their own.
                group = dist.new_group(backend="gloo")
            else:
                ignore_group_warning()
            self._apart = replace(ranks, group=group)
        self._on_its_way: tuple[CheckpointRequest, Beside] | None = None
        self.written_step: int | None = None

    def go_on(self, step: int) -> None:
        """Take note of the whole checkpoint that a run resumes from."""
        self._shelf.add(step)
        self.written_step = step

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is on its way, or waits to be tried again."""
        return self._on_its_way is not None or self._retry_step is not None

    def is_due(self, step: int) -> bool:
        """Return True if a checkpoint that could not be written is to be tried again."""
        return self._retry_step is not None and step >= self._retry_step

    def write(self, request: CheckpointRequest) -> None:
        """Write a checkpoint, or begin to, and delete those that it makes superfluous.

        One that cannot be written is warned of and tried again later.
        """
        self.wait()
        try:
            self._flush_logs()
            if self._apart is None or not self._begin(request, self._apart):
                self._store(request, self._ranks)
                self._succeed(request)
        except MegabatchError as error:
            self._fail(request, error)

    def write_last(self, request: CheckpointRequest, stop: StopSignal) -> None:
        """Write the last checkpoint of a run.

        It waits for room for an hour or until a signal comes, and for a minute after one has. Raises `MegabatchError`.
        """
        self.wait()
        if self._shared is not None:
            self._shared.is_writer = True
        for number, seconds in enumerate(chain((0.0, *SECONDS_BETWEEN_TRIES), repeat(SECONDS_BETWEEN_LATE_TRIES))):
            time.sleep(seconds)
            try:
                self._flush_logs()
                self._store(request, self._ranks)
                return self._succeed(request)
            except MegabatchError as error:
                if number >= len(SECONDS_BETWEEN_TRIES) and stop.agree(self._ranks):
                    raise
                if number + 1 >= MOST_TRIES:
                    raise MegabatchError(
                        f"{error}; it was tried {MOST_TRIES} times, and the run ends without it"
                    ) from None
                if number == 0:
                    self._console.warn(
                        f"{error}; the last one is tried until it is written, or a signal ends the run, "
                        f"{MOST_TRIES} times at most"
                    )
        return None

    def poll(self) -> None:
        """Take in a checkpoint that every rank has written beside the run by now."""
        if self._on_its_way is not None and not any(self._ranks.sum([float(self._on_its_way[1].is_alive())])):
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is on its way, if any."""
        if self._on_its_way is None:
            return
        (request, beside), self._on_its_way = self._on_its_way, None
        try:
            beside.result()
        except MegabatchError as error:
            self._fail(request, error)
        else:
            self._succeed(request)

    @contextmanager
    def closing(self) -> Generator[None, None, None]:
        """Let a checkpoint that is on its way be written if the run fails.

        With other ranks for a few seconds only: one of them may be gone.
        """
        try:
            yield
        except BaseException:
            if self._on_its_way is not None:
                request, beside = self._on_its_way
                beside.join(None if self._ranks.size == 1 else SECONDS_TO_LEAVE)
                if not beside.is_alive() and beside.error is None:
                    self._succeed(request)
            raise

    def _begin(self, request: CheckpointRequest, apart: Ranks) -> bool:
        """Copy the state and begin to write the copy; whether every rank has the memory for that."""
        problem, states = None, request.states
        try:
            states = staged(request.states)
        except Exception as error:
            problem = in_one_line(error)
        shared_problem = self._ranks.first_problem(problem)
        if shared_problem is not None:
            self._console.warn(
                f"the state cannot be copied ({shared_problem}); the run waits until step-{request.step} is written"
            )
            return False
        copied = replace(request, states=states, meta=copy.deepcopy(request.meta))
        self._on_its_way = (replace(request, states={}), Beside(lambda: self._store(copied, apart)))
        return True

    def _store(self, request: CheckpointRequest, ranks: Ranks) -> None:
        if self._shared is None:
            self._write(request, ranks)
            return
        shared, pointer = self._shared, checkpoints_of(self._folder) / POINTER
        ranks.on_main(lambda: shared.take(CHECKPOINT), str(self._folder))
        try:
            latest = ranks.on_main(lambda: step_named_by(pointer), str(pointer), verb="read")
            if latest is None or latest < request.step:
                self._write(request, ranks)
        finally:
            if ranks.is_main:
                shared.give(CHECKPOINT)

    def _write(self, request: CheckpointRequest, ranks: Ranks) -> None:
        waits = ranks is self._ranks
        with self._console.progress("saving a checkpoint", None, "files") if waits else nullcontext():
            self._with_room(lambda: save(self._folder, request.states, request.meta, ranks), ranks)
            self._shelf.add(request.step)
            if request.is_best:
                point_to_best(self._folder, request.step, ranks)
            self._shelf.prune(self._keep_last, ranks)

    def _flush_logs(self) -> None:
        self._with_room(lambda: self._ranks.on_main(self._flush, str(self._folder)), self._ranks)

    def _with_room(self, write: Callable[[], object], ranks: Ranks) -> None:
        """Write; where that fails for want of room, let the oldest of several checkpoints go and try once more."""
        try:
            write()
        except MegabatchError:
            if self._keep_last is None or not self._shelf.make_room(ranks):
                raise
            write()

    def _succeed(self, request: CheckpointRequest) -> None:
        self.written_step = request.step
        self._retry_step, self._retry_gap = None, 1
        self._console.say(f"saved {path_of(self._folder, request.step)}")

    def _fail(self, request: CheckpointRequest, error: MegabatchError) -> None:
        after = "is not the best one that is kept"
        if request.in_turn:
            self._retry_step, self._retry_gap = request.step + self._retry_gap, 2 * self._retry_gap
            after = f"is tried again after update {self._retry_step}"
        self._console.warn(f"{error}; the run continues, and step-{request.step} {after}")


def in_background(config: Config, ranks: Ranks) -> bool:
    """Return True if checkpoints are written beside the run."""
    stated = config.checkpoint.background
    is_on_device = ranks.device.type == "cuda" and not config.parallel.cpu_offload
    return is_on_device if stated is None else stated


def staged(states: dict[str, Any]) -> dict[str, Any]:
    """Copy the states to host memory, where the next update does not reach them."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        return stager.stage(states)  # pyright: ignore[reportReturnType]  # no future: staging is not asynchronous
    finally:
        stager.close()
