"""Attempt: the processes that torchrun starts at a time find each other, apart from those that it started before.

Its store outlives them, with all that they wrote there, and its agents count restarts each for itself: nothing that a
process is told when it starts tells on every host the same attempt from any other. So rank 0 numbers the attempts, and
welcomes those that are there. What all attempts of a job have in common is kept in the store too, by which a process
knows the run that its own job has begun.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from torch.distributed.distributed_c10d import PrefixStore, Store

NUMBER, JOB, MET = "megabatch: attempts", "megabatch: job", "met"  # keys of the store
UNNAMED = "none"  # torchrun's rdzv_id where none is given
SECONDS_TO_MEET = 1800.0  # as torch gives a process group
SECONDS_TO_LOOK = 0.02  # from one look into the store to the next


@dataclass(frozen=True)
class Job:
    """What all attempts of torchrun at one command have in common."""

    key: str = ""  # of the store that outlives them; "" outside of torchrun
    name: str = ""  # given by the user, for a store that has moved to another host
    num_restarts: int = 0  # as this process's agent counts them

    def has_made(self, start: Mapping[str, Any]) -> bool:
        """Whether the start of a run, as its folder has it, was an attempt of this job."""
        there = start.get("job", {})
        if self.key and there.get("key") == self.key:
            return True
        return self.num_restarts > 0 and bool(self.name) and there.get("name") == self.name

    def to_json(self) -> dict[str, Any]:
        """What a run's folder keeps of the job; nothing outside of torchrun."""
        return {"job": {"key": self.key, "name": self.name}} if self.key else {}


NO_JOB = Job()


def meet_apart(store: Store, rank: int, size: int) -> tuple[Store, Job]:
    """A part of the store that is this attempt's alone, and the job; comes back when all ranks have come.

    Raises RuntimeError, as torch's stores do, where they do not come.
    """
    own, key = (welcome if rank == 0 else be_welcomed)(store, rank, size, time.monotonic() + SECONDS_TO_MEET)
    name = os.environ.get("TORCHELASTIC_RUN_ID", UNNAMED)
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return own, Job(key if is_of_torchrun else "", "" if name == UNNAMED else name, num_restarts)


def welcome(store: Store, rank: int, size: int, deadline: float) -> tuple[Store, str]:
    """Rank 0: number the attempt and tell everyone who asks, those that a former attempt has left in the store too."""
    number, key = store.add(NUMBER, 1), store.compare_set(JOB, "", uuid4().hex).decode()
    own, asked = PrefixStore(f"attempt {number}", store), dict.fromkeys(range(1, size), "")
    while own.add(MET, 0) < size - 1:
        for other in asked:
            if store.check([asking(other)]) and (name := store.get(asking(other)).decode()) != asked[other]:
                store.set(answering(name), json.dumps([number, key]))
                asked[other] = name
        wait(deadline, "the other ranks have not come")
    return own, key


def be_welcomed(store: Store, rank: int, size: int, deadline: float) -> tuple[Store, str]:
    """Any other rank: ask under a name that no process had before, since rank 0 may still read the name of one."""
    name = uuid4().hex
    store.set(asking(rank), name)
    while not store.check([answering(name)]):
        wait(deadline, "rank 0 has not come")
    number, key = json.loads(store.get(answering(name)))
    own = PrefixStore(f"attempt {number}", store)
    own.add(MET, 1)
    return own, key


def asking(rank: int) -> str:
    """Where the process that is now that rank says its name."""
    return f"megabatch: rank {rank}"


def answering(name: str) -> str:
    """Where the process of that name is told its attempt."""
    return f"megabatch: process {name}"


def wait(deadline: float, problem: str) -> None:
    """A moment, in which signals are heard; RuntimeError when there is no more time."""
    if time.monotonic() > deadline:
        raise RuntimeError(problem)
    time.sleep(SECONDS_TO_LOOK)
