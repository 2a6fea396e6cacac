"""DistributedDataParallel and its reducer."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def comm_hooks(ddp: Any) -> list[tuple[Callable[..., Any], object]]:
    """``DDP._comm_hooks``: the communication hooks that were registered, with their states."""
    return [(hook, state) for hook, state in ddp._comm_hooks]


def is_joining(ddp: Any) -> bool:
    """``DDP._join_config``: whether ``join()`` is open."""
    return ddp._join_config.enable


def num_reduced(ddp: Any) -> int:
    """``DDP._get_ddp_logging_data``: how many parameters DDP reduces."""
    return ddp._get_ddp_logging_data()["num_parameter_tensors"]


def rebuild_buckets(ddp: Any) -> None:
    """``Reducer._rebuild_buckets``, which else the next forward does. Raises RuntimeError where one is not reduced."""
    ddp.reducer._rebuild_buckets()


def check_reduced(ddp: Any) -> None:
    """``DDP._check_reducer_finalized``. Raises RuntimeError where a bucket was not reduced."""
    ddp._check_reducer_finalized()


def broadcast_buffers(ddp: Any) -> None:
    """``DDP._sync_buffers``, which DDP calls before a forward that it reduces after, where it has buffers to sync."""
    if ddp.broadcast_buffers and ddp.modules_buffers:
        ddp._sync_buffers()


class _OneRank(dist.Work):
    """A finished message in which one rank took part."""

    def __init__(self) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result([torch.ones((), dtype=torch.int64, device="cpu")])

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


@cache
def _one_rank() -> _OneRank:
    return _OneRank()  # one for the process: the reducer in C++ does not keep it alive


@contextmanager
def summing(ddp: Any) -> Generator[None]:
    """While it is open, DDP divides by 1 and not by its ranks: ``Reducer._set_forward_pass_work_handle``.

    DDP's ``join()`` tells the reducer in the same way how many ranks still take part.
    """
    ddp.reducer._set_forward_pass_work_handle(_one_rank(), False)
    try:
        yield
    finally:
        ddp.reducer._set_forward_pass_work_handle(_one_rank(), True)  # True: divide by all ranks


def settle_buckets(ddp: Any, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Reduce these gradients, in the order in which they are to lie in the buckets, and rebuild the buckets by it.

    `Reducer.prepare_for_backward` and `Reducer._rebuild_buckets`, as DDP calls them.
    """
    if ddp.reducer._rebuild_buckets():  # by a backward before, which DDP's next forward would have done
        return
    ddp.reducer.prepare_for_backward([])
    for parameter, gradient in gradients:
        torch.autograd.backward(parameter, gradient)
    ddp.reducer._rebuild_buckets()
