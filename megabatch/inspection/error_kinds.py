"""Kinds of errors: out of memory, of a message between ranks, and known to every rank."""

import contextlib
import re
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.distributed as dist

from megabatch.errors import MegabatchError, PositionError, Shortage, in_one_line

# The texts of errors whose type does not say that memory ran out. The last are those of NCCL and RCCL.
NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: can't allocate memory|MPS backend out of memory"
    r"|(CUDA|HIP|XPU)( driver)? error: out of memory|Triton Error \[\w+\]: out of memory"
    r"|\b(CU|HIP)\w+_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED"
    r"|miopenStatusAllocFailed|(cuda|hip) failure:? ?\d* ?'out of memory'",
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
        is_of_one_rank = is_of_message(error) or is_out_of_memory(error) or isinstance(error, PositionError)
        if not is_of_one_rank:
            mark_known(error)
        raise


def out_of_memory_error(error: Exception, num_ranks: int) -> MegabatchError:
    """Return the error for code that ran out of memory, and is no microbatch that can run again."""
    process = whoever_runs(num_ranks)
    cause = in_one_line(_first_cause(error))
    where = "beside a microbatch's forward and backward" if num_ranks == 1 else "where ranks wait for each other"
    change = "give smaller microbatches, or shard the model over more ranks"
    failure = MegabatchError(f"{process} ran out of memory {where}; {change} ({cause})")
    failure.shortage = Shortage(rank_of_process(), (), None)
    return failure


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for a failed allocation, on a device or on the CPU, that is not yet a `MegabatchError`.

    This looks at the first cause, since torch's pipeline schedules wrap errors.
    """
    if not isinstance(error, RuntimeError):
        return False
    first = _first_cause(error)
    if isinstance(first, torch.OutOfMemoryError):
        return True
    if isinstance(first, torch.AcceleratorError):
        return "out of memory" in str(first)
    return NO_MEMORY.search(str(first)) is not None


def is_of_backend(error: BaseException) -> bool:
    """Return True for an error of a message between ranks, which may have been half sent."""
    return isinstance(_first_cause(error), dist.DistBackendError)


def is_of_message(error: BaseException) -> bool:
    """Return True for an error of a message between ranks, which may be the consequence of another rank's error."""
    first = _first_cause(error)
    if isinstance(first, dist.DistError):
        return True
    return isinstance(first, RuntimeError) and "gloo" in str(first)


def _first_cause(error: BaseException) -> BaseException:
    # An error may be the cause of its own cause.
    visited = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in visited:
        error = error.__cause__
        visited.add(id(error))
    return error


def rank_of_process() -> int:
    """Return the rank of this process in the job, 0 without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return 0


def whoever_runs(num_ranks: int) -> str:
    """Return the name of this process for an error."""
    if num_ranks > 1:
        return f"rank {dist.get_rank()} of {dist.get_world_size()}"
    return "this process"
