"""Ranks: the processes of a run, which of them sees which samples, and the small messages that they exchange."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, RunConfig
from megabatch.train.config.parallel_layout import ALONE, Layout, layout_of
from megabatch.train.runtime.files import NotAFileError
from megabatch.train.runtime.rendezvous import NO_JOB, Job, Rendezvous, meet

Value = TypeVar("Value")
CPU = torch.device("cpu")
NO_TIMEOUT, TORCHS_TIMEOUT = timedelta(days=365), distributed_c10d.default_pg_timeout
CHANGES = {"write": "make room, allow it, or choose another run.folder", "read": "allow it, or look at its disk"}


@dataclass(frozen=True)
class Ranks:
    """This process among the others. Every method that sends anything is collective and works on the CPU."""

    rank: int
    size: int
    device: torch.device
    layout: Layout = ALONE
    job: Job = NO_JOB
    group: dist.ProcessGroup | None = None  # for messages; None: the default group

    @property
    def dp_rank(self) -> int:
        """Number of this rank's share of the samples."""
        return self.rank // (self.layout.cp * self.layout.tp) % self.dp_degree

    @property
    def dp_degree(self) -> int:
        """Number of ranks that see different samples."""
        return self.layout.dp_degree(self.size)

    @property
    def pp_rank(self) -> int:
        """Number of this rank's pipeline stages."""
        return self.rank // (self.size // self.layout.pp)

    @property
    def is_counted(self) -> bool:
        """True on one of the ranks that work on the same part of the same samples."""
        return self.rank % self.layout.tp == 0 and self.rank < self.size // self.layout.pp

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes the run's files."""
        return self.rank == 0

    def seed(self, *parts: int) -> int:
        """Return a random seed for the parts and this rank, the same on every machine.

        Ranks along tp share it: an activation that each of them has whole needs one dropout mask.
        """
        return int(np.random.SeedSequence([*parts, self.rank // self.layout.tp]).generate_state(1, np.uint64)[0])

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over ranks, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def sum_of_data(self, values: Sequence[float]) -> list[float]:
        """Sum values that follow from each rank's samples, once per sample."""
        counted = self.sum(values if self.is_counted else [0.0] * len(values))
        return [value / self.layout.cp for value in counted]

    def sum_of_data_and_gather(self, values: Sequence[float], value: float) -> tuple[list[float], list[float]]:
        """Return `sum_of_data` of the values, and ``value`` of each rank, by one message."""
        counted = values if self.is_counted else [0.0] * len(values)
        of_ranks = [value if rank == self.rank else 0.0 for rank in range(self.size)]
        sums = self.sum([*counted, *of_ranks])
        return [total / self.layout.cp for total in sums[: len(values)]], sums[len(values) :]

    def barrier(self) -> None:
        self.sum([0.0])

    def gather(self, value: Value) -> list[Value]:
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: Value) -> Value:
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, device=CPU, group=self.group)
        return values[0]

    def first_problem(self, problem: str | None) -> str | None:
        return next((answer for answer in self.gather(problem) if answer), None)

    def agree(self, problem: str | None) -> None:
        """Raise the main rank's problem, if it has one, as a `MegabatchError` on every rank."""
        if (answer := self.broadcast(problem)) is not None:
            raise MegabatchError(answer)

    def on_main(self, write: Callable[[], Value], where: str, *, verb: str = "write") -> Value:
        """Call a function on the main rank and return its result on all; its errors are raised on all ranks.

        Raises:
            MegabatchError: what the function raised, or an `OSError` of ``where``, which it was to ``verb``.
        """
        result, problem = cast(Any, None), None
        if self.is_main:
            try:
                result = write()
            except NotAFileError as error:
                problem = f"{error.filename} cannot be used: {error.strerror}; move it away, or choose another folder"
            except OSError as error:
                problem = f"cannot {verb} {where} ({error.strerror or error}); {CHANGES[verb]}"
            except MegabatchError as error:
                problem = str(error)
        result, problem = self.broadcast((result, problem))
        if problem is not None:
            raise MegabatchError(problem)
        return result


ONE_RANK = Ranks(0, 1, CPU)


def init_ranks(rendezvous: Rendezvous, config: Config) -> Ranks:
    """Create the process group and choose this process's device; a wrapper on one process gets a group of one."""
    layout, device = layout_of(config.parallel, rendezvous.size), choose_device(config.run.device)
    if rendezvous.store is not None or config.parallel.wrapper is not None:
        meet(rendezvous)
        store = PrefixStore("group", rendezvous.store or cast(Any, dist).HashStore())
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = collective_timeout(config.run)
        # Of the groups that meshes and the library make, too.
        distributed_c10d.default_pg_timeout = timeout
        distributed_c10d.default_pg_nccl_timeout = timeout  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=rendezvous.rank, world_size=rendezvous.size, timeout=timeout)
    return Ranks(rendezvous.rank, rendezvous.size, device, layout, rendezvous.job)


def collective_timeout(run: RunConfig) -> timedelta:
    """Return how long ranks wait for each other in a collective."""
    if run.collective_timeout is not None:
        return timedelta(seconds=run.collective_timeout)
    return TORCHS_TIMEOUT if run.answer_within_seconds is None else NO_TIMEOUT


def choose_device(stated: str | None) -> torch.device:
    """Return this process's device: its own GPU if there are any."""
    if stated == "cuda" and not torch.cuda.is_available():
        raise MegabatchError('run.device is "cuda" and torch sees no GPU; set it to "cpu" or leave it out')
    if stated == "cpu" or not torch.cuda.is_available():
        return CPU
    index, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if index >= num_gpus:
        started = f"{index + 1} or more processes were started on a host whose GPUs are {num_gpus}"
        raise MegabatchError(f'{started}; start one for each, or set run.device to "cpu"')
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
