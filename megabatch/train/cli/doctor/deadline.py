"""Deadline: a rank that does not come, or a network that does not carry, is named instead of waited for."""

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from torch.distributed.distributed_c10d import Store

from megabatch.train.runtime.exit import CRASHED, FAILURE, leave_now
from megabatch.train.runtime.rendezvous import Rendezvous

STORE_FAILS = (RuntimeError, ValueError)  # it went away with the process that held it


class Deadline:
    """Ends this process, and says why unless another rank has, where a stage takes longer than it may.

    Args:
        seconds: Of a stage, from when this rank has come to it.
    """

    def __init__(self, met: Rendezvous, seconds: float) -> None:
        self._met, self._seconds = met, seconds
        self._store = None if met.store is None else cast(Store, cast(Any, met.store).clone())

    @contextmanager
    def of(self, stage: str) -> Generator[None, None, None]:
        """Surrounds a stage; that this rank has come to it is told to the others."""
        if self._store is not None:
            self._store.set(key_of(stage, self._met.rank), "here")
        timer = threading.Timer(self._seconds, self._leave, [stage])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _leave(self, stage: str) -> NoReturn:
        """In the timer's thread: the stage's own may never come back."""
        line = f"megabatch: doctor: {stage} has not ended within {self._seconds:g} s"
        try:
            is_first = self._store is None or self._store.add(FAILURE, 1) == 1
            line += f"; {self._why(stage)}"
        except STORE_FAILS:
            is_first, line = self._met.rank == 0, f"{line}; the store by which ranks have met does not answer"
        if is_first:
            print(line, file=sys.stderr, flush=True)
        leave_now(CRASHED)

    def _why(self, stage: str) -> str:
        """Who has not come to it, or what is wrong if all have."""
        store, size = self._store, self._met.size
        missing = [] if store is None else [rank for rank in range(size) if not store.check([key_of(stage, rank)])]
        if missing:
            who = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            return f"of {size} ranks these have not come to it: {who}; look at their hosts"
        if size == 1:
            return "look at what else runs on this host"
        return (
            "every rank has come to it, so what they send does not arrive: let hosts reach each other on every port, "
            "or name their common network in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )


def key_of(stage: str, rank: int) -> str:
    """Where the store has that a rank has come to a stage."""
    return f"doctor: {stage}: {rank}"
