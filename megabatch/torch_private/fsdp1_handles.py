"""FSDP1: flat parameters and their handles."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def hybrid_strategies() -> tuple[Any, ...]:
    """Return the members of ShardingStrategy that shard within a node and replicate between nodes."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2  # pyright: ignore[reportPrivateUsage]


def has_comm_hook(module: Any) -> bool:
    """``_comm_hook`` of a module of FSDP1, which reduces in FSDP1's place."""
    return module._comm_hook is not None


@contextmanager
def summing_flat(modules: Sequence[Any]) -> Generator[None]:
    """While it is open, FSDP1 sums: ``_gradient_predivide_factor`` and ``_gradient_postdivide_factor`` are 1."""
    factors = [(module._gradient_predivide_factor, module._gradient_postdivide_factor) for module in modules]
    try:
        for module in modules:
            module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0
        yield
    finally:
        for module, before in zip(modules, factors, strict=True):
            module._gradient_predivide_factor, module._gradient_postdivide_factor = before


def replica_group(fsdp: Any) -> dist.ProcessGroup:
    """``_inter_node_pg``: the ranks that hold the same shard."""
    return fsdp._inter_node_pg


def flat_parameters(module: Any) -> list[nn.Parameter]:
    """``_handle.flat_param`` of a module of FSDP1's, and the parameters that are views of it."""
    if module._handle is None:
        return []
    flat = module._handle.flat_param
    return [flat, *(flat._params or ())]


def is_gathered(module: Any) -> bool:
    """Return True if a module of FSDP1 has its whole parameters gathered."""
    return module._handle is not None and not module._handle.is_sharded(module._handle.flat_param)


def reshard_flat(module: Any) -> None:
    """Let go of gathered parameters, which SHARD_GRAD_OP keeps between forward and backward."""
    if (handle := module._handle) is not None and handle.uses_sharded_strategy:
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


def drop_flat_gradient(module: Any) -> None:
    """Drop what a backward of FSDP1's has left: ``flat_param.grad`` and ``_saved_grad_shard``."""
    if (handle := module._handle) is not None:
        handle.flat_param.grad = None
        if hasattr(handle.flat_param, "_saved_grad_shard"):
            del handle.flat_param._saved_grad_shard


@contextmanager
def noting_flat_collectives(modules: Sequence[Any], note: Callable[[int], None], *, reduces: bool) -> Generator[None]:
    """While it is open, call ``note`` with a number before each gather and each reduction that FSDP1 begins."""
    handles = [module._handle for module in modules if module._handle is not None]
    hooks: list[Any] = []
    for number, handle in enumerate(handles):
        handle.unshard = partial(_unshard_flat, handle, partial(note, 2 * number))
        if reduces and handle.flat_param.requires_grad:  # FSDP1 reduces in a hook that runs right after this one
            hook = partial(_note_flat_gradient, partial(note, 2 * number + 1))
            hooks.append(handle.flat_param.register_post_accumulate_grad_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            vars(handle).pop("unshard", None)
        for hook in hooks:
            hook.remove()


def _unshard_flat(handle: Any, note: Callable[[], None]) -> None:
    if handle.needs_unshard():
        note()
    type(handle).unshard(handle)


def _note_flat_gradient(note: Callable[[], None], _: Tensor) -> None:
    note()
