"""Ranks: the processes of a run, how they find each other, add up numbers, and leave together.

A rank that fails says why, once for all ranks, and leaves; the others, which fail the same way, whose next collective
breaks, or who are found waiting for it, end in silence. A line names its rank where not every rank would have said it.
"""

import contextlib
import errno
import hashlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from megabatch.errors import MegabatchError
from megabatch.train.config import Config
from megabatch.train.config.parallel_layout import ALONE, Layout, layout_of
from megabatch.train.runtime.elastic_attempt import NO_JOB, Job, meet_apart
from megabatch.train.runtime.exit import CRASHED, FAILED, UNREAD, drop_output, end_of, leave_now
from megabatch.train.runtime.retrying_appender import DISK_FULL

ADDRESS = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells a process besides its RANK
PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
UNSEEN = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)  # of a path that may not even be looked at
FAILURE = "failure"  # key of the store: how many have seen that the run has failed
SECONDS_TO_NOTICE = 3.0  # in which ranks see by themselves that one has failed, before they are ended
SECONDS_TO_AGREE = 0.5  # in which ranks that fail the same way do so
SECONDS_TO_LEAVE = 5.0  # torchrun kills whoever is left once the first rank is gone, whatever its status would be


class FailedError(Exception):
    """The run has failed and one of its ranks has said why; what is left is an exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a run know each other, before and after their process group; alone there is no store."""

    rank: int = 0
    size: int = 1
    store: Store | None = None
    job: Job = NO_JOB

    def is_first(self, event: str) -> bool:
        """Whether no other rank has come here before."""
        if self.store is None:
            return True
        try:
            return self.store.add(event, 1) == 1
        except RuntimeError:  # the store went away with the rank that held it
            return False

    def is_of_all(self, line: str) -> bool:
        """Whether every rank fails with this line; waits a moment for the others to do so.

        Until the process group is there, ranks read the same recipe, each at its own time, and nothing else.
        """
        if self.store is None or not dist.is_initialized():
            return True
        deadline = time.monotonic() + SECONDS_TO_AGREE
        with contextlib.suppress(RuntimeError):  # the store went away with the rank that held it
            while (num_same := self.store.add(failure_key(line), 0)) < self.size and time.monotonic() < deadline:
                time.sleep(0.01)
            return num_same == self.size
        return False

    def end(self) -> None:
        """End the process group, which frees ranks that wait in a collective, and wait until all have come here."""
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.store is None:
            return
        deadline = time.monotonic() + SECONDS_TO_LEAVE
        with contextlib.suppress(RuntimeError):  # the store went away with the rank that held it
            num_ended = self.store.add("ended", 1)
            while num_ended < self.size and time.monotonic() < deadline:
                time.sleep(0.02)
                num_ended = self.store.add("ended", 0)


@dataclass(frozen=True)
class Ranks:
    """This process among the others, with a process group unless it is alone and plain."""

    rank: int
    size: int
    device: torch.device
    layout: Layout = ALONE
    job: Job = NO_JOB
    group: dist.ProcessGroup | None = None  # in which they tell each other; None: that of all

    @property
    def dp_rank(self) -> int:
        """Which share of the samples this rank sees; others may see it too."""
        return self.layout.dp_rank(self.rank, self.size)

    @property
    def dp_degree(self) -> int:
        """How many ranks see different samples."""
        return self.layout.dp_degree(self.size)

    @property
    def pp_rank(self) -> int:
        """Which stages of the model this rank has."""
        return self.layout.pp_rank(self.rank, self.size)

    @property
    def is_counted(self) -> bool:
        """Whether this rank is the first of those that work on its stretch of its samples."""
        return self.layout.is_counted(self.rank, self.size)

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks and writes files."""
        return self.rank == 0

    def seed(self, *parts: int) -> int:
        """A seed for this rank's random numbers, of the parts and the rank; the same on every machine.

        Ranks along tp draw the same: where an activation is whole on each, so is its dropout.
        """
        own = self.layout.draws_as(self.rank)
        return int(np.random.SeedSequence([*parts, own]).generate_state(1, np.uint64)[0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over ranks, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def sum_of_data(self, values: Sequence[float]) -> list[float]:
        """Each value, which follows from this rank's samples, summed over those who see different ones."""
        counted = self.sum(values if self.is_counted else [0.0] * len(values))
        return [value / self.layout.cp for value in counted]

    def barrier(self) -> None:
        """Wait for every rank; on the CPU, without a device."""
        self.sum([0.0])

    def agree(self, problem: str | None) -> None:
        """Raise on every rank what the main rank found wrong, if anything."""
        found = [problem]
        if self.size > 1:
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"), group=self.group)
        if found[0] is not None:
            raise MegabatchError(found[0])

    def on_main(self, write: Callable[[], object], where: str) -> None:
        """Let the main rank write while the others wait; what it cannot write is a `MegabatchError` on every rank."""
        problem = None
        if self.is_main:
            try:
                write()
            except OSError as error:
                reason = error.strerror or str(error)
                problem = f"cannot write {where} ({reason}); make room, allow it, or choose another run.folder"
            except MegabatchError as error:
                problem = str(error)
        self.agree(problem)

    def gather(self, text: str) -> list[str]:
        """The text of each rank."""
        texts = [text] * self.size
        if self.size > 1:
            dist.all_gather_object(texts, text, group=self.group)
        return texts


@contextlib.contextmanager
def meeting() -> Generator[Meeting, None, None]:
    """Surrounds all that a process does: finds the others that torchrun started, and ends with them, failed or not."""
    met = meet() if "RANK" in os.environ else Meeting()
    ended = threading.Event()
    if met.store is not None:
        threading.Thread(target=leave_with_others, args=(met.store, ended), daemon=True).start()
    try:
        yield met
    except FailedError:
        raise
    except MegabatchError as error:
        fail(met, f"megabatch: {error}", FAILED)
    except KeyboardInterrupt as error:
        fail(met, *end_of(error))
    except BrokenPipeError:  # `| head`: whoever read the output has seen enough
        met.is_first(FAILURE)
        drop_output()
        raise FailedError(UNREAD) from None
    except (Exception, SystemExit) as error:  # SystemExit: of a user's function, which would leave the others waiting
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            fail(met, f"megabatch: the disk is full ({error}); make room and go on with --run.resume=true", FAILED)
        if isinstance(error, OSError) and error.errno in UNSEEN and error.filename is not None:
            reason = f"cannot use {str(error.filename)[:200]} ({error.strerror})"
            fail(met, f"megabatch: {reason}; allow it, or name another", FAILED)
        if not met.is_first(FAILURE):  # a collective whose peer has gone
            raise FailedError(FAILED) from None
        if met.store is None:
            raise
        say_crash(met, error)  # now: the way out may take long, or end before its end
        raise FailedError(CRASHED) from None
    finally:
        ended.set()
        met.end()


def meet() -> Meeting:
    """Find the others where the environment says that they are."""
    missing = [name for name in ADDRESS if not os.environ.get(name)]
    if missing:
        who = f"RANK is set, as torchrun does, and {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not"
        fail(Meeting(), f"megabatch: {who}; start with torchrun, or unset RANK", FAILED)
    try:
        store, rank, size = next(rendezvous("env://"))
        store, job = meet_apart(store, rank, size)
    except (RuntimeError, ValueError) as error:  # torch's errors of networks and stores are RuntimeErrors
        reason = " ".join(str(error).split())[:200]
        line = f"megabatch: cannot meet the other ranks ({reason}); start with torchrun, or unset RANK"
        fail(Meeting(), line, FAILED)
    return Meeting(rank, size, store, job)


def leave_with_others(store: Store, ended: threading.Event) -> None:
    """End this process where another has failed and this one does not notice.

    It may wait for the other in a rendezvous, or in a collective of NCCL, which no lost peer breaks.
    """
    with contextlib.suppress(RuntimeError):  # the store went away with the rank that held it
        own = cast(Any, store).clone()  # a connection serves one call at a time, and the main thread's may take long
        while not ended.wait(0.5):
            if own.add(FAILURE, 0) and not ended.wait(SECONDS_TO_NOTICE):
                leave_now(FAILED)


def fail(met: Meeting, line: str, status: int) -> NoReturn:
    """Say why, unless another rank has, and end with a status."""
    with contextlib.suppress(RuntimeError):  # the store went away with the rank that held it
        if met.store is not None:
            met.store.add(failure_key(line), 1)
    if met.is_first(FAILURE):
        who = f"rank {met.rank} of {met.size}"
        if not line.startswith(f"megabatch: {who} ") and not met.is_of_all(line):
            line = line.replace("megabatch: ", f"megabatch: {who}: ", 1)
        print(line, file=sys.stderr, flush=True)
    raise FailedError(status) from None


def failure_key(line: str) -> str:
    """Where the store counts the ranks that fail with the line."""
    return f"failure {hashlib.sha256(line.encode()).hexdigest()}"


def say_crash(met: Meeting, error: Exception | SystemExit) -> None:
    """Say what nobody has foreseen, and on which rank; or that another rank ended without a word."""
    who = f"megabatch: rank {met.rank} of {met.size}"
    if met.size > 1 and isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_GONE):
        reason = " ".join(str(error).split())[:200]
        print(f"{who} lost another rank, which was killed or ran out of memory ({reason})", file=sys.stderr, flush=True)
        return
    if met.size > 1:
        print(f"{who} failed:", file=sys.stderr)
    traceback.print_exception(error)


def join(met: Meeting, config: Config) -> Ranks:
    """Make the process group, on this process's device; a wrapper on a lone process gets a group of one."""
    layout, device = layout_of(config.parallel, met.size), choose_device(config.run.device)
    if met.store is not None or config.parallel.wrapper is not None:
        store = PrefixStore("group", cast(Any, dist).HashStore() if met.store is None else met.store)
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=store, rank=met.rank, world_size=met.size)
    return Ranks(met.rank, met.size, device, layout, met.job)


def choose_device(asked: str | None) -> torch.device:
    """The device of this process: its own GPU where there are any."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise MegabatchError('run.device is "cuda" and torch sees no GPU; set it to "cpu" or leave it out')
    if asked == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    index, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= there:
        started = f"{index + 1} or more processes were started on a host whose GPUs are {there}"
        raise MegabatchError(f'{started}; start one for each, or set run.device to "cpu"')
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
