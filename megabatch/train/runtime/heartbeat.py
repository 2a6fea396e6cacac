"""Pulse: a rank that has stopped answering is noticed within a deadline and named, and the others leave.

A collective waits for it for half an hour and does not know whom it waits for. So a thread of each rank says every few
seconds, in the store by which ranks have met, that the process is there and what it is doing, and looks whether the
next rank has said so. It never asks whether work is done: a first compilation or an evaluation may take as long as it
likes, and a process that waits for another one answers.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Generator
from typing import Any, NamedTuple, NoReturn, cast

from torch.distributed.distributed_c10d import Store

from megabatch.train.runtime.exit import leave_now
from megabatch.train.runtime.ranks import CRASHED, FAILURE, SECONDS_TO_NOTICE, Meeting

MOST_SECONDS, LOOKS = 5.0, 6  # between two looks, of which there are so many in the time that a rank is given
BEGINNING, ENDED = "beginning", "at its end"  # what a rank is doing before its first update, and after its last
STORE_FAILS = (RuntimeError, ValueError)  # it went away with the process that held it


class Word(NamedTuple):
    """What a rank says of itself."""

    rank: int
    number: int  # of its words
    doing: str
    host: str
    process: int


class Silence:
    """For how long something has stayed the same while this process ran.

    A look counts no more than twice the usual time since the last one: where all ranks were stopped together, a laptop
    asleep or a container paused, none of them has been silent.
    """

    def __init__(self, seconds_between: float) -> None:
        self._most, self._seen, self._last = 2 * seconds_between, cast(object, None), time.monotonic()
        self.seconds = 0.0

    def look(self, seen: object) -> float:
        """Seconds since it was other than this."""
        now = time.monotonic()
        passed, self._last = min(now - self._last, self._most), now
        self.seconds = self.seconds + passed if seen == self._seen else 0.0
        self._seen = seen
        return self.seconds


class Pulse:
    """This rank's word to the others that it is there, and its ear for theirs.

    Args:
        within_seconds: In which a rank must answer; None: nobody looks.
    """

    def __init__(self, met: Meeting, within_seconds: float | None) -> None:
        self._met, self._within = met, within_seconds or 0.0
        self._is_used = met.store is not None and met.size > 1 and within_seconds is not None
        self._seconds = min(MOST_SECONDS, self._within / LOOKS)
        self._ended = threading.Event()
        self._num_begun, self._doing, self._waits = 0, BEGINNING, False
        self._num_answers = 0  # of the store
        self._next = (met.rank + 1) % met.size
        self._beside, self._processes = beside(met), dict[int, Word]()  # other ranks of this host, and those there
        self._told: set[str] = set()

    def waits(self, step: int) -> None:
        """Say that this rank waits for the samples of an update, its own or a loader's matter."""
        self._num_begun += 1
        self._doing, self._waits = f"waiting for the samples of update {step}", True

    def works(self, step: int) -> None:
        """Say that this rank makes an update, or evaluates or saves after it."""
        self._doing, self._waits = f"in update {step}", False

    @contextlib.contextmanager
    def beating(self) -> Generator[None, None, None]:
        """Surrounds a run. A rank is expected to answer from its first update on, until it says that it has ended."""
        if not self._is_used:
            yield
            return
        threads = [
            threading.Thread(target=work, name="megabatch-pulse", daemon=True) for work in (self._beat, self._watch)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join(self._seconds)

    def _beat(self) -> None:
        """In the thread that speaks with the store, which may never come back from it."""
        with contextlib.suppress(*STORE_FAILS):
            store = cast(Any, self._met.store).clone()  # a connection serves one call at a time
            silence, number = Silence(self._seconds), 0
            self._say(store, number, BEGINNING)
            while not self._ended.wait(self._seconds):
                number += 1
                self._say(store, number, self._doing)
                heard = self._hear(store, self._next)
                self._num_answers += 1
                if silence.look(heard) > self._within and self._expects(heard):
                    here = f"rank {self._met.rank} is {self._doing}"
                    self._leave(store, f"{self._who(heard)} {self._silent()}; last heard {heard.doing}, {here}")
                self._look_for_processes(store)
            self._say(store, 0, ENDED)

    def _watch(self) -> None:
        """In a thread that waits for nobody."""
        store, samples = Silence(self._seconds), Silence(self._seconds)
        while not self._ended.wait(self._seconds):
            doing, waits, begun = self._doing, self._waits, self._num_begun > 0
            if store.look(self._num_answers if begun else None) > self._within and begun:
                self._leave(None, f"the store by which ranks have met, torchrun's or rank 0's, {self._silent()}")
            if samples.look(doing if waits else None) > self._within and waits and doing not in self._told:
                self._told.add(doing)
                who = f"rank {self._met.rank} of {self._met.size}"
                print(f"megabatch: {who} has been {doing} for {self._within:g} s", file=sys.stderr, flush=True)

    def _expects(self, word: Word) -> bool:
        """Whether a rank that said this has more to say: all have begun when the first update is made."""
        return self._num_begun > (1 if word.doing == BEGINNING else 0) and word.doing != ENDED

    def _look_for_processes(self, store: Store) -> None:
        """Leave where one of this host has gone without a word: a collective on a device would not break."""
        for rank in self._beside - self._processes.keys():
            word = self._hear(store, rank)
            if word.host == socket.gethostname() and is_there(word.process):
                self._processes[rank] = word
        for word in self._processes.values():
            if is_there(word.process) or self._hear(store, word.rank).doing == ENDED:
                continue
            if not self._ended.wait(SECONDS_TO_NOTICE) and self._hear(store, word.rank).doing != ENDED:
                self._leave(store, f"{self._who(word)} has gone without a word, which was killed or ran out of memory")

    def _say(self, store: Store, number: int, doing: str) -> None:
        word = Word(self._met.rank, number, doing, socket.gethostname(), os.getpid())
        store.set(key_of(self._met.rank), json.dumps(word))

    def _hear(self, store: Store, rank: int) -> Word:
        if not store.check([key_of(rank)]):
            return Word(rank, 0, BEGINNING, "an unknown host", 0)
        return Word(*json.loads(store.get(key_of(rank))))

    def _who(self, word: Word) -> str:
        return f"rank {word.rank} of {self._met.size} (process {word.process} on {word.host})"

    def _silent(self) -> str:
        return f"has not answered for {self._within:g} s (stopped, or its host gone)"

    def _leave(self, store: Store | None, line: str) -> NoReturn:
        """Say why, unless another rank has; without a store the first rank of each host does."""
        is_first = os.environ.get("LOCAL_RANK", "0") == "0" if store is None else store.add(FAILURE, 1) == 1
        if is_first:
            print(f"megabatch: {line}", file=sys.stderr, flush=True)
        leave_now(CRASHED)


def key_of(rank: int) -> str:
    """Where the store has a rank's last word."""
    return f"pulse of rank {rank}"


def is_there(process: int) -> bool:
    """Whether a process of this host has not ended, or its parent not seen that yet."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def beside(met: Meeting) -> set[int]:
    """The other ranks that torchrun has started on this host."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return set()
    first = met.rank - int(os.environ["LOCAL_RANK"])
    return set(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))) - {met.rank}
