"""Kinds of errors: out of memory, of a message between ranks, and known to every rank."""

import contextlib
import re
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.distributed as dist

from megabatch.core.mesh import DataRanks
from megabatch.errors import MegabatchError, PositionError, Shortage, in_one_line

NO_MEMORY = re.compile(  # where the type of an error does not say it
    r"DefaultCPUAllocator: can't allocate memory|MPS backend out of memory"
    r"|(CUDA|HIP|XPU)( driver)? error: out of memory|Triton Error \[\w+\]: out of memory"
    r"|\b(CU|HIP)\w+_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED"
    r"|miopenStatusAllocFailed|(cuda|hip) failure:? ?\d* ?'out of memory'",  # the last of NCCL and RCCL
    re.IGNORECASE,
)


def mark_known(error: BaseException) -> None:
    """Mark an error that every rank raises or has been told: nobody tells it again."""
    # A class with slots takes no attribute.
    with contextlib.suppress(AttributeError):
        cast(Any, error).is_known_to_all_ranks = True


def is_known_to_all(error: BaseException) -> bool:
    """Return True for an error that `mark_known` has marked."""
    return getattr(error, "is_known_to_all_ranks", False)


@contextlib.contextmanager
def agreeing() -> Generator[None]:
    """Surround an exchange between ranks whose outcome is an error on all of them, or on none."""
    try:
        yield
    except Exception as error:
        if not is_of_message(error) and not is_out_of_memory(error) and not isinstance(error, PositionError):
            mark_known(error)
        raise


def out_of_memory_error(error: Exception, ranks: DataRanks) -> MegabatchError:
    """Return the error of what ran out of memory where no microbatch can be named, or none be run again."""
    process, cause = whoever_runs(ranks.num_all), in_one_line(_first_cause(error))
    where = "beside a microbatch's forward and backward" if ranks.is_alone else "where ranks wait for each other"
    change = "give smaller microbatches, or shard the model over more ranks"
    failure = MegabatchError(f"{process} ran out of memory {where}; {change} ({cause})")
    failure.shortage = Shortage(rank_of_process(), (), None)
    return failure


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for a failed allocation, on a device or on the CPU, that is not yet a `MegabatchError`.

    This looks at the first cause, since torch's pipeline schedules wrap errors.
    """
    first = _first_cause(error)
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(first, torch.AcceleratorError):
        return "out of memory" in str(first)
    return isinstance(first, torch.OutOfMemoryError) or NO_MEMORY.search(str(first)) is not None


def is_of_backend(error: BaseException) -> bool:
    """Return True for an error of a message between ranks, which may have been half sent."""
    return isinstance(_first_cause(error), dist.DistBackendError)


def is_of_message(error: BaseException) -> bool:
    """Return True for an error of a message between ranks, which may be the consequence of another rank's error."""
    first = _first_cause(error)
    return isinstance(first, dist.DistError) or (isinstance(first, RuntimeError) and "gloo" in str(first))


def _first_cause(error: BaseException) -> BaseException:
    visited = {id(error)}
    while (cause := error.__cause__) is not None and id(cause) not in visited:
        visited.add(id(cause))
        error = cause
    return error


def rank_of_process() -> int:
    """Return the rank of this process in the job, 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def whoever_runs(num_ranks: int) -> str:
    """Return the name of this process for an error."""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}" if num_ranks > 1 else "this process"
