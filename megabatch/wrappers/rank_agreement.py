"""Ranks that sum one gradient have one model and the same settings: a single process imports none of it."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from megabatch.core.wrapper import Wrapper, local
from megabatch.errors import PlanError
from megabatch.inspection.checksum import checksum
from megabatch.torch_private.classes import is_fsdp1, is_fsdp2
from megabatch.torch_private.module_members import name_without_wrappers
from megabatch.torch_private.operations import is_traceable_wrapper_subclass
from megabatch.wrappers.checks import is_beyond_tp, is_outer_wrapper

Facts = list[tuple[str, str]]  # what a fact is about, and what it says, as shown in an error


def check_rank_agreement(wrapper: Wrapper, policy: str, accumulate_dtype: torch.dtype | None, planner: str) -> None:
    """Raise `PlanError` on all ranks where ranks that sum one gradient differ in model or settings. Collective.

    Ranks along tp and pp hold other parts of the model, so each is compared with those of the same coordinates there.
    The weights of DDP, which broadcasts them, and of sharded models are not looked at.
    """
    ranks = wrapper.ranks
    if ranks.num_weighing == 1:
        return
    settings: Facts = [("sync", repr(policy)), ("accumulate_dtype", str(accumulate_dtype)), ("planner", planner)]
    facts = settings + _structure(wrapper.models)
    weights = _checksums(wrapper.models)
    digests = ranks.exchange_numbers([_digest(facts), _digest(weights)])
    # The first row of each tp and pp coordinate, for every rank of it.
    first_rows = [row // ranks.num_weighing * ranks.num_weighing for row in range(ranks.num_all)]
    if digests == [digests[first_row] for first_row in first_rows]:
        return
    reports: list[tuple[int, Facts, Facts]] = ranks.exchange_objects((dist.get_rank(), facts, weights))
    for first_row, report in zip(first_rows, reports, strict=True):
        _compare(reports[first_row], report)


def _compare(first: tuple[int, Facts, Facts], second: tuple[int, Facts, Facts]) -> None:
    """Raise `PlanError` for the first fact in which two ranks differ."""
    missing = ("a further parameter", "missing")
    for a, b in zip_longest(first[1], second[1], fillvalue=missing):
        if a != b:
            raise PlanError(
                f"ranks sum the gradients of different models or settings: {a[0]} is {a[1]} on rank {first[0]}, and "
                f"{b[0]} is {b[1]} on rank {second[0]}; make the model, freeze it and choose sync, accumulate_dtype "
                "and planner alike on all ranks"
            )
    for a, b in zip(first[2], second[2], strict=True):
        if a != b:
            raise PlanError(
                f"{a[0]} has other weights on rank {first[0]} than on rank {second[0]}, and no wrapper broadcasts "
                "them; seed all ranks alike before the model is made, load one checkpoint on all, or wrap the model "
                "with DistributedDataParallel"
            )


def _structure(models: Sequence[nn.Module]) -> Facts:
    facts: Facts = []
    for name, parameter, model in _parameters(models):
        state = "trained" if parameter.requires_grad else "frozen"
        facts.append((name, f"{_shape(parameter, model)} {parameter.dtype} {state}"))
    return facts


def _shape(parameter: Tensor, model: nn.Module) -> str:
    """Return the whole shape. It is unknown for FSDP1, whose parameters are pieces of a flat one."""
    if any(map(is_fsdp1, model.modules())):
        return "sharded"
    # The shape of a lazy parameter comes with the first forward.
    return "lazy" if isinstance(parameter, UninitializedParameter) else str(tuple(parameter.shape))


def _checksums(models: Sequence[nn.Module]) -> Facts:
    """Return a checksum of each parameter that every rank holds itself."""
    replicated = [model for model in models if not any(map(_is_wrapper, model.modules()))]
    facts: Facts = []
    with torch.no_grad():
        for name, parameter, _ in _parameters(replicated):
            pieces = [int(checksum(tensor)) for tensor in _local_tensors(parameter)]
            if pieces:
                facts.append((name, str(sum(pieces))))
    return facts


def _is_wrapper(module: nn.Module) -> bool:
    return is_outer_wrapper(module) or is_fsdp2(module)


def _parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for number, model in enumerate(models):
        prefix = f"model {number}'s " if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            yield f"{prefix}parameter {name_without_wrappers(name)!r}", parameter, model


def _local_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield this rank's plain tensors that must be equal on data ranks. Yield nothing for a meta tensor."""
    # A frozen model may be sharded over ranks that see different samples.
    if is_beyond_tp(tensor):
        return
    tensor = local(tensor.detach())
    # A quantized tensor holds several plain ones.
    if is_traceable_wrapper_subclass(tensor):
        for name in cast(Any, tensor).__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from _local_tensors(inner)
    elif tensor.layout == torch.strided and not tensor.is_meta:
        yield tensor


def _digest(facts: Facts) -> float:
    """48 bits of a hash, which float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=6).digest(), "big"))
