"""Rendezvous: the processes that torchrun starts find each other in a store, before there is a process group.

torchrun's store outlives a restart with everything that earlier processes wrote, and each agent counts restarts by
itself. So rank 0 numbers the attempts, and each attempt gets a prefix of the store. The store also holds the job's key,
by which a restarted process recognizes a run that its own job began.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from megabatch.errors import MegabatchError
from megabatch.train.runtime.console import print_line

# Variables that torchrun sets besides RANK.
ADDRESS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Errors of a store whose host process is gone.
STORE_ERRORS = (RuntimeError, ValueError)
# Keys of the store.
NUMBER, JOB, ARRIVED, READY = "megabatch: attempts", "megabatch: job", "arrived", "ready"
REQUEST, ANSWER, ARRIVAL = "megabatch: rank {}", "megabatch: process {}", "arrived {}"
# torchrun's default rdzv_id.
UNNAMED = "none"
# torch's default timeout of a process group.
SECONDS_TO_ARRIVE = 1800.0
# Seconds after which a rank says for whom it waits, and again after twice the time.
SECONDS_TO_TELL = 60.0
SECONDS_BETWEEN_POLLS, MOST_SECONDS_BETWEEN_POLLS = 0.02, 0.5
# Ranks in a line.
MOST_NAMES = 8


@dataclass(frozen=True)
class Job:
    """One call of torchrun, restarts included."""

    key: str = ""  # of the store, which outlives restarts; "" without torchrun
    name: str = ""  # the user's rdzv_id, for a store that moved to another host
    num_restarts: int = 0  # counted by this process's agent

    def has_started(self, start: Mapping[str, Any]) -> bool:
        """Return True if this job made ``start``, an entry of a run's environment.json."""
        there = start.get("job", {})
        if self.key and there.get("key") == self.key:
            return True
        return self.num_restarts > 0 and bool(self.name) and there.get("name") == self.name

    def to_json(self) -> dict[str, Any]:
        """Return the job as environment.json keeps it; empty without torchrun."""
        return {"job": {"key": self.key, "name": self.name}} if self.key else {}


NO_JOB = Job()


@dataclass(frozen=True)
class Rendezvous:
    """This process among those of its attempt. A process that was started alone has no store."""

    rank: int = 0
    size: int = 1
    store: Store | None = None
    job: Job = NO_JOB


def find_ranks() -> Rendezvous:
    """Find the other ranks at the address in the environment. Raises `MegabatchError` if that fails."""
    if "RANK" not in os.environ:
        return Rendezvous()
    missing = [name for name in ADDRESS if not os.environ.get(name)]
    if missing:
        unset = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
        raise MegabatchError(f"RANK is set, as torchrun does, and {unset}; start with torchrun, or unset RANK")
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store, job = join_attempt(connect(rank, size), rank, size)
    except STORE_ERRORS as error:
        raise cannot_meet(error) from None
    return Rendezvous(rank, size, store, job)


def cannot_meet(error: Exception) -> MegabatchError:
    """Return the error of a rank that does not find the others."""
    reason = " ".join(str(error).split())[:200]
    return MegabatchError(f"cannot meet the other ranks ({reason}); start with torchrun, or unset RANK")


class Wait:
    """A rank's wait for others: it sleeps in moments, names those that are missing, and ends after half an hour."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._start, self._next_line = time.monotonic(), SECONDS_TO_TELL

    def sleep(self, find_missing: Callable[[], Sequence[int]], *, only_lowest: bool = False) -> None:
        """Sleep a moment, in which Python handles signals. Raises `RuntimeError` after half an hour.

        Args:
            find_missing: Returns the ranks that have not come.
            only_lowest: All ranks wait for the same ones, and the lowest of them speaks.
        """
        seconds = time.monotonic() - self._start
        if seconds > SECONDS_TO_ARRIVE:
            raise RuntimeError(f"{ranks_text(find_missing())} not come in {SECONDS_TO_ARRIVE:.0f} s")
        if seconds > self._next_line:
            self._next_line *= 2
            missing = find_missing()
            is_lowest = all(rank in missing for rank in range(self._rank))
            if missing and (is_lowest or not only_lowest):
                print_line(
                    f"megabatch: rank {self._rank} of {self._size} has waited {seconds:.0f} s: {ranks_text(missing)} "
                    f"not come; look if each was started, and at its log; it waits {SECONDS_TO_ARRIVE:.0f} s at most",
                    sys.stderr,
                )
        time.sleep(min(max(seconds / 10, SECONDS_BETWEEN_POLLS), MOST_SECONDS_BETWEEN_POLLS))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the names of ranks before a participle."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    names = ", ".join(map(str, ranks[:MOST_NAMES]))
    more = f" and {len(ranks) - MOST_NAMES} more" if len(ranks) > MOST_NAMES else ""
    return f"ranks {names}{more} have"


def connect(rank: int, size: int) -> Store:
    """Return the store at the address in the environment, which rank 0 holds unless torchrun's agent does.

    A thread connects: the constructor returns once the store is there, and sees no signal before.
    """
    port = int(os.environ["MASTER_PORT"])
    if not 0 <= port < 2**16:
        raise ValueError(f"MASTER_PORT is {port}, and a port has a number below {2**16}")
    is_held_here = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    stores, errors = list[Store](), list[Exception]()

    def construct() -> None:
        try:
            stores.append(
                cast(Any, dist).TCPStore(
                    os.environ["MASTER_ADDR"], port, is_master=is_held_here, wait_for_workers=False,
                    timeout=timedelta(seconds=SECONDS_TO_ARRIVE), multi_tenant=is_held_here,
                    use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
                )
            )  # fmt: skip
        except Exception as error:
            errors.append(error)

    threading.Thread(target=construct, name="megabatch-store", daemon=True).start()
    wait = Wait(rank, size)
    while not stores and not errors:
        wait.sleep(lambda: [0])
    if errors:
        raise errors[0]
    return stores[0]


def meet(rendezvous: Rendezvous) -> None:
    """Wait until every rank is about to make the process group, which waits in silence. Collective.

    Raises `MegabatchError` after half an hour, or if the process that holds the store is gone.
    """
    store, wait = rendezvous.store, Wait(rendezvous.rank, rendezvous.size)
    if store is None:
        return

    def find_missing() -> list[int]:
        return [rank for rank in range(rendezvous.size) if not store.check([f"{READY} {rank}"])]

    try:
        store.set(f"{READY} {rendezvous.rank}", "")
        store.add(READY, 1)
        while store.add(READY, 0) < rendezvous.size:
            wait.sleep(find_missing, only_lowest=True)
    except STORE_ERRORS as error:
        raise cannot_meet(error) from None


def join_attempt(store: Store, rank: int, size: int) -> tuple[Store, Job]:
    """Wait for all ranks of this attempt. Return the attempt's own part of the store, and the job.

    Raises `RuntimeError`, as torch's stores do, after half an hour.
    """
    wait = Wait(rank, size)
    attempt, key = _admit_ranks(store, size, wait) if rank == 0 else _ask_admission(store, rank, wait)
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return attempt, NO_JOB
    return attempt, Job(key, "" if name == UNNAMED else name, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def _admit_ranks(store: Store, size: int, wait: Wait) -> tuple[Store, str]:
    """Rank 0: number the attempt and tell every rank that asks, leftovers of earlier attempts included."""
    number, key = store.add(NUMBER, 1), store.compare_set(JOB, "", uuid4().hex).decode()
    attempt, answered = PrefixStore(f"attempt {number}", store), dict.fromkeys(range(1, size), "")
    while attempt.add(ARRIVED, 0) < size - 1:
        for rank in answered:
            request = REQUEST.format(rank)
            if store.check([request]) and (name := store.get(request).decode()) != answered[rank]:
                store.set(ANSWER.format(name), json.dumps([number, key]))
                answered[rank] = name
        wait.sleep(lambda: [rank for rank in answered if not attempt.check([ARRIVAL.format(rank)])])
    return attempt, key


def _ask_admission(store: Store, rank: int, wait: Wait) -> tuple[Store, str]:
    """Ask under a fresh name: rank 0 may still read the request of an earlier process of this rank."""
    name = uuid4().hex
    store.set(REQUEST.format(rank), name)
    while not store.check([ANSWER.format(name)]):
        wait.sleep(lambda: [0])
    number, key = json.loads(store.get(ANSWER.format(name)))
    attempt = PrefixStore(f"attempt {number}", store)
    attempt.set(ARRIVAL.format(rank), "")
    attempt.add(ARRIVED, 1)
    return attempt, key
