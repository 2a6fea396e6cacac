"""Rendezvous: the processes that torchrun starts find each other in a store, before there is a process group.

torchrun's store outlives a restart with everything that earlier processes wrote, and each agent counts restarts by
itself. So rank 0 numbers the attempts, and each attempt gets a prefix of the store. The store also holds the job's key,
by which a restarted process recognizes a run that its own job began.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megabatch.errors import MegabatchError

ADDRESS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets besides RANK
STORE_ERRORS = (RuntimeError, ValueError)  # raised by a store whose host process is gone
NUMBER, JOB, ARRIVED = "megabatch: attempts", "megabatch: job", "arrived"  # keys of the store
UNNAMED = "none"  # torchrun's rdzv_id by default
SECONDS_TO_ARRIVE = 1800.0  # torch's default timeout of a process group
SECONDS_BETWEEN_POLLS = 0.02


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
        store, rank, size = next(rendezvous("env://"))
        store, job = join_attempt(store, rank, size)
    except STORE_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise MegabatchError(f"cannot meet the other ranks ({reason}); start with torchrun, or unset RANK") from None
    return Rendezvous(rank, size, store, job)


def join_attempt(store: Store, rank: int, size: int) -> tuple[Store, Job]:
    """Wait for all ranks of this attempt. Return the attempt's own part of the store, and the job.

    Raises `RuntimeError`, as torch's stores do, after half an hour.
    """
    deadline = time.monotonic() + SECONDS_TO_ARRIVE
    own, key = _admit_ranks(store, size, deadline) if rank == 0 else _ask_admission(store, rank, deadline)
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name is None:
        return own, NO_JOB
    return own, Job(key, "" if name == UNNAMED else name, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def _admit_ranks(store: Store, size: int, deadline: float) -> tuple[Store, str]:
    """Rank 0: number the attempt and tell every rank that asks, leftovers of earlier attempts included."""
    number, key = store.add(NUMBER, 1), store.compare_set(JOB, "", uuid4().hex).decode()
    own, answered = PrefixStore(f"attempt {number}", store), dict.fromkeys(range(1, size), "")
    while own.add(ARRIVED, 0) < size - 1:
        for rank in answered:
            if store.check([_request(rank)]) and (name := store.get(_request(rank)).decode()) != answered[rank]:
                store.set(_answer(name), json.dumps([number, key]))
                answered[rank] = name
        _sleep_until(deadline, "the other ranks have not come")
    return own, key


def _ask_admission(store: Store, rank: int, deadline: float) -> tuple[Store, str]:
    """Ask under a fresh name: rank 0 may still read the request of an earlier process of this rank."""
    name = uuid4().hex
    store.set(_request(rank), name)
    while not store.check([_answer(name)]):
        _sleep_until(deadline, "rank 0 has not come")
    number, key = json.loads(store.get(_answer(name)))
    own = PrefixStore(f"attempt {number}", store)
    own.add(ARRIVED, 1)
    return own, key


def _request(rank: int) -> str:
    return f"megabatch: rank {rank}"


def _answer(name: str) -> str:
    return f"megabatch: process {name}"


def _sleep_until(deadline: float, problem: str) -> None:
    """Sleep a moment, in which Python handles signals; raise after the deadline."""
    if time.monotonic() > deadline:
        raise RuntimeError(problem)
    time.sleep(SECONDS_BETWEEN_POLLS)
