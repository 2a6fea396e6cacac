"""Heartbeat: name a rank that has stopped answering within a deadline, and end the others.

A collective waits for a lost rank and does not know its name. So a thread of each rank writes every few seconds to the
store that the process is alive and what it is doing, and reads the next rank's entry. It checks progress only with
``run.stuck_after``, and only inside an update: a compilation, an evaluation or a checkpoint may take any time, and a
process that waits for another one answers.
"""

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch.distributed.distributed_c10d import Store

from megabatch.errors import MegabatchError
from megabatch.train.runtime.console import CRASHED, print_line
from megabatch.train.runtime.exit import FAILURE, SECONDS_TO_NOTICE, leave_now
from megabatch.train.runtime.files import check_own_path
from megabatch.train.runtime.rendezvous import SECONDS_TO_ARRIVE, STORE_ERRORS, Rendezvous

MAX_SECONDS, BEATS_PER_DEADLINE = 5.0, 6
# Activity before the first update and after the last.
BEGINNING, ENDED = "beginning", "at its end"
# Activity that may take any time.
AFTER, COMPILING = "after", "compiling"
# Updates of which the median is the time of an update: at least, and at most.
UPDATES_TO_KNOW, UPDATES_TO_KEEP = 5, 101
# Looks in a row at which a stuck rank must be in code of its own.
LOOKS = 3
STUCK, KEY = "stuck", "heartbeat of rank {}"
LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
COMPILERS = tuple(str(Path(torch.__file__).parent / name) for name in ("_dynamo", "_inductor", "_functorch"))
INSTALLED = (str(Path(torch.__file__).parents[1]), str(Path(os.__file__).parent))


class Beat(NamedTuple):
    """A rank's report about itself."""

    rank: int
    number: int
    doing: str
    host: str
    process: int


class StallTimer:
    """Seconds for which a value has not changed, counted while this process ran.

    One poll counts at most twice the usual interval: if all ranks were suspended together (a laptop asleep, a container
    paused), none of them has stalled.
    """

    def __init__(self, interval_seconds: float) -> None:
        self._most, self._value, self._last = 2 * interval_seconds, cast(object, None), time.monotonic()
        self.seconds = 0.0

    def poll(self, value: object) -> float:
        """Return for how many seconds the value has been the same."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, self._most), now
        self.seconds = self.seconds + passed if value == self._value else 0.0
        self._value = value
        return self.seconds


class Heartbeat:
    """This rank's beats, and its watch over the next rank, the store and this host's processes.

    Args:
        within_seconds: Deadline for an answer. None turns the heartbeat off.
        stuck_after: Times the median of the last updates, after which one is stuck. None: nobody looks.
        folder: The run's folder, for the stacks of a stuck rank.
    """

    def __init__(
        self, rendezvous: Rendezvous, within_seconds: float | None, stuck_after: float | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._stuck_after, self._folder = stuck_after, folder or Path()
        self._update_began_at = self.last_stepped_at = 0.0
        self._seconds = deque[float](maxlen=UPDATES_TO_KEEP)
        self._rendezvous, self._within = rendezvous, within_seconds or 0.0
        self._is_used = rendezvous.store is not None and rendezvous.size > 1 and within_seconds is not None
        self._interval = min(MAX_SECONDS, self._within / BEATS_PER_DEADLINE or MAX_SECONDS)
        self._ended = threading.Event()
        self._num_updates, self._doing, self._awaits_samples = 0, BEGINNING, False
        # Answers of the store.
        self._num_answers = 0

    def wait_for_samples(self, step: int) -> None:
        """Say that this rank waits for the samples of an update."""
        self._num_updates += 1
        if self.last_stepped_at > self._update_began_at:
            self._seconds.append(self.last_stepped_at - self._update_began_at)
        self._update_began_at = time.monotonic()
        self._doing, self._awaits_samples = f"waiting for the samples of update {step}", True

    def start_update(self, step: int) -> None:
        """Say that this rank computes an update, or evaluates or saves after it."""
        self._doing, self._awaits_samples = f"in update {step}", False

    @contextlib.contextmanager
    def reading_ahead(self, step: int) -> Generator[None, None, None]:
        """Say, inside of an update, that this rank waits for the samples of a later one."""
        doing = self._doing
        self._doing, self._awaits_samples = f"waiting for the samples of update {step}", True
        try:
            yield
        finally:
            self._doing, self._awaits_samples = doing, False

    @contextlib.contextmanager
    def running(self) -> Generator[None, None, None]:
        """Beat while the block runs. A rank must answer from its first update until it says that it has ended."""
        works = [self._beat, self._watch_itself] if self._is_used else []
        works += [] if self._stuck_after is None else [self._watch_update]
        threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(self._interval)

    def _beat(self) -> None:
        """In the thread that talks to the store, which may never answer."""
        with contextlib.suppress(*STORE_ERRORS):
            # A connection serves one call at a time.
            store = cast(Any, self._rendezvous.store).clone()
            next_rank = (self._rendezvous.rank + 1) % self._rendezvous.size
            timer, number, processes = StallTimer(self._interval), 0, dict[int, Beat]()
            self._write(store, number, BEGINNING)
            while not self._ended.wait(self._interval):
                number += 1
                self._write(store, number, self._activity())
                beat = self._read(store, next_rank)
                self._num_answers += 1
                # All ranks have begun once the first update is made.
                has_begun = self._num_updates > (1 if beat.doing == BEGINNING else 0)
                if timer.poll(beat) > (self._within if has_begun and beat.doing != ENDED else SECONDS_TO_ARRIVE):
                    here = f"rank {self._rendezvous.rank} is {self._doing}"
                    self._leave(store, f"{self._name(beat)} {self._silence()}; last heard {beat.doing}, {here}")
                self._check_processes(store, processes)
            self._write(store, 0, ENDED)

    def _watch_itself(self) -> None:
        """Look, in a thread that waits for nothing, if the store's answer or a batch of samples is overdue."""
        store, samples, warned = StallTimer(self._interval), StallTimer(self._interval), set[str]()
        while not self._ended.wait(self._interval):
            doing, awaits, begun = self._doing, self._awaits_samples, self._num_updates > 0
            if store.poll(self._num_answers if begun else None) > self._within and begun:
                self._leave(None, f"the store by which ranks have met, torchrun's or rank 0's, {self._silence()}")
            if samples.poll(doing if awaits else None) > self._within and awaits and doing not in warned:
                warned.add(doing)
                name = f"rank {self._rendezvous.rank} of {self._rendezvous.size}"
                print_line(f"megabatch: {name} has been {doing} for {self._within:g} s", sys.stderr)

    def _watch_update(self) -> None:
        """Look if the update of this rank is overdue, and if it is this rank that holds up the others."""
        timer, looks = StallTimer(self._interval), 0
        while not self._ended.wait(self._interval):
            seconds = timer.poll(self._update_began_at)
            if self.last_stepped_at > self._update_began_at or len(self._seconds) < UPDATES_TO_KNOW:
                looks = 0
                continue
            bound = max(cast(float, self._stuck_after) * median(self._seconds), self._within)
            is_own = self._awaits_samples or is_in_own_code()
            looks = looks + 1 if is_own and seconds > bound else 0
            if looks == LOOKS:
                self._leave_stuck("is stuck", seconds)
            if seconds > 2 * bound and not is_own and not self._is_held_up():
                self._leave_stuck("is stuck, as all ranks are, and none is in code of your own", seconds)

    def _activity(self) -> str:
        """Return what this rank does, as the others are told."""
        if self._stuck_after and is_compiling():
            return COMPILING
        return (
            f"{AFTER} {self._doing.removeprefix('in ')}"
            if self.last_stepped_at > self._update_began_at
            else self._doing
        )

    def _is_held_up(self) -> bool:
        """Return True if another rank does what may take any time."""
        if not self._is_used:
            return is_compiling()
        with contextlib.suppress(*STORE_ERRORS):
            store = cast(Any, self._rendezvous.store).clone()
            doing = [self._read(store, rank).doing for rank in range(self._rendezvous.size)]
            return any(state.startswith((AFTER, COMPILING, BEGINNING, ENDED)) for state in doing)
        return True

    def _leave_stuck(self, verdict: str, seconds: float) -> NoReturn:
        """Write the stacks of this rank's threads, name it, and end this process."""
        file = self._folder / STUCK / f"rank-{self._rendezvous.rank}.txt"
        with contextlib.suppress(OSError, MegabatchError):
            file.parent.mkdir(exist_ok=True)
            check_own_path(file.parent)
            file.unlink(missing_ok=True)
            with file.open("x") as opened:
                faulthandler.dump_traceback(opened, all_threads=True)
        beat = Beat(self._rendezvous.rank, 0, self._doing, socket.gethostname(), os.getpid())
        store = None if self._rendezvous.store is None else cast(Any, self._rendezvous.store).clone()
        text = f"{beat.doing} for {seconds:.0f} s, and the median update takes {median(self._seconds):.2g} s"
        self._leave(store, f"{self._name(beat)} {verdict}: {text}; {file} has the stacks of its threads")

    def _check_processes(self, store: Store, processes: dict[int, Beat]) -> None:
        """Leave if a rank of this host is gone: a collective on a GPU would not break."""
        ranks = set[int]()
        if "LOCAL_WORLD_SIZE" in os.environ:
            first = self._rendezvous.rank - int(os.environ["LOCAL_RANK"])
            ranks = set(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))) - {self._rendezvous.rank}
        for rank in ranks - processes.keys():
            beat = self._read(store, rank)
            if beat.host == socket.gethostname() and is_alive(beat.process):
                processes[rank] = beat
        for beat in processes.values():
            if is_alive(beat.process) or self._read(store, beat.rank).doing == ENDED:
                continue
            if not self._ended.wait(SECONDS_TO_NOTICE) and self._read(store, beat.rank).doing != ENDED:
                self._leave(store, f"{self._name(beat)} has gone without a word, which was killed or ran out of memory")

    def _write(self, store: Store, number: int, doing: str) -> None:
        beat = Beat(self._rendezvous.rank, number, doing, socket.gethostname(), os.getpid())
        store.set(KEY.format(beat.rank), json.dumps(beat))

    def _read(self, store: Store, rank: int) -> Beat:
        if not store.check([KEY.format(rank)]):
            return Beat(rank, 0, BEGINNING, "an unknown host", 0)
        return Beat(*json.loads(store.get(KEY.format(rank))))

    def _name(self, beat: Beat) -> str:
        return f"rank {beat.rank} of {self._rendezvous.size} (process {beat.process} on {beat.host})"

    def _silence(self) -> str:
        return f"has not answered for {self._within:g} s (stopped, or its host gone)"

    def _leave(self, store: Store | None, line: str) -> NoReturn:
        """Print why, unless another rank has, and end this process. Without a store, one rank of each host prints."""
        is_first = os.environ.get("LOCAL_RANK", "0") == "0" if store is None else store.add(FAILURE, 1) == 1
        if is_first:
            print_line(f"megabatch: {line}", sys.stderr)
        leave_now(CRASHED)


def frames_of_main() -> Iterator[str]:
    """Yield the files of the main thread's frames, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame.f_code.co_filename
        frame = frame.f_back


def is_in_own_code() -> bool:
    """Return True if the main thread is in a function of the user's; in torch's or megabatch's it may wait."""
    for file in frames_of_main():
        if file.startswith(LIBRARIES):
            return False
        if not file.startswith((*INSTALLED, "<frozen")):
            return True
    return False


def is_compiling() -> bool:
    return any(file.startswith(COMPILERS) for file in frames_of_main())


def is_alive(process: int) -> bool:
    """Return True while a process of this host exists, a zombie included."""
    try:
        with contextlib.suppress(PermissionError):
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
