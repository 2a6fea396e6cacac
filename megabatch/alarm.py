"""A rank that runs out of memory where others wait for it tells them, and all leave with its words.

A collective that one rank has left half-way cannot be called back, so the update is lost and the processes with it. The
others hear of it from the store by which they found each other.
"""

import contextlib
import json
import threading
import time
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from megabatch.errors import Bound, MegabatchError, Shortage, in_one_line
from megabatch.mesh import DataRanks, groups_of_process

ON_THE_CPU = "DefaultCPUAllocator: can't allocate memory"
TOLD, HEARD = "megabatch: out of memory", "megabatch: heard"  # keys of the store
SECONDS_TO_LOOK = 0.5  # from one look into the store to the next
SECONDS_TO_HEAR = 5.0  # which a rank gives the others before it leaves, since the store may be in its process
SECONDS_TO_WAKE = 3.0  # after which a collective that has not broken by itself is aborted


class Alarm:
    """Told by one rank, heard by the others within `SECONDS_TO_HEAR`, wherever they wait."""

    def __init__(self, ranks: DataRanks) -> None:
        self._ranks = ranks
        self._heard: MegabatchError | None = None
        self._own: Any = None  # a connection serves one call at a time, and the main thread's may take long

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Surrounds what may wait for other ranks; raises their `MegabatchError` in place of what came of it."""
        if self._ranks.num_all == 1:
            yield
            return
        ended = threading.Event()
        listener = threading.Thread(target=self._listen, args=(ended,), name="megabatch-alarm", daemon=True)
        listener.start()
        try:
            yield
        except Exception as error:
            _end(listener, ended)
            if (cause := self._cause(error)) is error:
                raise
            raise cause from error
        finally:
            _end(listener, ended)
        if self._heard is not None:
            raise self._heard

    def _cause(self, error: Exception) -> Exception:
        """Why this rank cannot go on, told to the others where it is the first to know."""
        if is_out_of_memory(error):
            change = "give smaller microbatches, or shard the model over more ranks"
            who, seen = whoever_runs(self._ranks.num_all), in_one_line(_first_cause(error))
            error = MegabatchError(f"{who} ran out of memory where ranks wait for each other; {change} ({seen})")
            error.shortage = Shortage(rank_of_process(), (), None)
        if isinstance(error, MegabatchError) and error.shortage is not None:
            if self._heard is None:
                self._tell(error)
            return error
        with contextlib.suppress(RuntimeError):  # the store went away with the rank that held it
            if self._heard is None and self._store().check([TOLD]):
                self._hear()
        return self._heard or error

    def _tell(self, error: MegabatchError) -> None:
        """Tell the others, and wait until they have heard; then nothing of this process keeps them."""
        with contextlib.suppress(RuntimeError):
            told = json.dumps([str(error), error.shortage])
            if self._store().compare_set(TOLD, "", told).decode() != told:  # another rank was faster
                self._store().add(HEARD, 1)
            deadline = time.monotonic() + SECONDS_TO_HEAR
            while self._store().add(HEARD, 0) < self._ranks.num_all - 1 and time.monotonic() < deadline:
                time.sleep(0.02)
        _abort()

    def _listen(self, ended: threading.Event) -> None:
        with contextlib.suppress(RuntimeError):
            while not ended.wait(SECONDS_TO_LOOK):
                if self._store().check([TOLD]):
                    self._hear()
                    if not ended.wait(SECONDS_TO_WAKE):
                        _abort()
                    return

    def _hear(self) -> None:
        text, shortage = json.loads(self._store().get(TOLD))
        heard = MegabatchError(text)
        rank, samples, bound = shortage
        heard.shortage = Shortage(rank, tuple(samples), None if bound is None else Bound(*bound))
        self._heard = heard
        self._store().add(HEARD, 1)

    def _store(self) -> Store:
        if self._own is None:
            self._own = cast(Any, dist).distributed_c10d._get_default_store().clone()
        return self._own


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the CPU, and nobody has said more of it.

    Torch's schedules of pipelines wrap what they meet.
    """
    first = _first_cause(error)
    return isinstance(error, RuntimeError) and (isinstance(first, torch.OutOfMemoryError) or ON_THE_CPU in str(first))


def _first_cause(error: BaseException) -> BaseException:
    cause = error.__cause__
    return error if cause is None or cause is error else _first_cause(cause)


def rank_of_process() -> int:
    """Among all of the job."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def whoever_runs(num_ranks: int) -> str:
    """This process, as an error names it."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}" if num_ranks > 1 else "this process"


def _abort() -> None:
    """Break the collectives that wait on a device; those of gloo break when a process ends."""
    for group in groups_of_process():
        with contextlib.suppress(RuntimeError):  # a backend that cannot
            cast(Any, group).abort()


def _end(listener: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    listener.join()
