"""Ranks that sum one gradient have one model and the same settings: a single process imports none of it."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from megabatch.core.wrapper import Wrapper, local
from megabatch.errors import PlanError
from megabatch.inspection.checksum import checksum
from megabatch.torch_private.classes import is_dtensor, is_fsdp1, is_fsdp2
from megabatch.torch_private.module_members import name_without_wrappers
from megabatch.torch_private.operations import is_traceable_wrapper_subclass

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
    starts = range(0, ranks.num_all, ranks.num_weighing)  # the first row of each tp and pp coordinate
    if all(digests[i] == digests[start] for start in starts for i in range(start, start + ranks.num_weighing)):
        return
    reports: list[tuple[int, Facts, Facts]] = ranks.exchange_objects((dist.get_rank(), facts, weights))
    for start in starts:
        first, *further_reports = reports[start : start + ranks.num_weighing]
        for report in further_reports:
            _compare(first, report)


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
    for a, b in zip(first[2], second[2], strict=True):  # of the same parameters
        if a != b:
            raise PlanError(
                f"{a[0]} has other weights on rank {first[0]} than on rank {second[0]}, and no wrapper broadcasts "
                "them; seed all ranks alike before the model is made, load one checkpoint on all, or wrap the model "
                "with DistributedDataParallel"
            )


def _structure(models: Sequence[nn.Module]) -> Facts:
    return [
        (name, f"{_shape(parameter, model)} {parameter.dtype} {'trained' if parameter.requires_grad else 'frozen'}")
        for name, parameter, model in _parameters(models)
    ]


def _shape(parameter: Tensor, model: nn.Module) -> str:
    """Return the whole shape. It is unknown for FSDP1, whose parameters are pieces of a flat one."""
    is_piece = any(map(is_fsdp1, model.modules()))
    is_lazy = isinstance(parameter, UninitializedParameter)  # whose shape comes with the first forward
    return "sharded" if is_piece else "lazy" if is_lazy else str(tuple(parameter.shape))


def _checksums(models: Sequence[nn.Module]) -> Facts:
    """Compute a checksum of each parameter that every rank holds itself. Wait once for each device."""
    replicated = [model for model in models if not any(map(_is_wrapper, model.modules()))]
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter, _ in _parameters(replicated):
            pieces = [checksum(tensor) for tensor in _local_tensors(parameter)]
            if pieces:
                sums[name] = torch.stack([piece.to(pieces[0].device) for piece in pieces]).sum()
        by_device: dict[torch.device, list[str]] = {}
        for name, tensor in sums.items():
            by_device.setdefault(tensor.device, []).append(name)
        numbers = {
            name: number
            for names in by_device.values()
            for name, number in zip(names, torch.stack([sums[key] for key in names]).tolist(), strict=True)
        }
    return [(name, str(numbers[name])) for name in sums]


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) or is_fsdp1(module) or is_fsdp2(module)


def _parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for number, model in enumerate(models):
        prefix = f"model {number}'s " if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            yield f"{prefix}parameter {name_without_wrappers(name)!r}", parameter, model


def _local_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield this rank's plain tensors that must be equal on data ranks. Yield nothing for a meta tensor."""
    if is_dtensor(tensor) and tuple(tensor.device_mesh.mesh_dim_names or ()) != ("tp",):
        return  # a frozen model that is sharded over ranks which see different samples
    tensor = local(tensor.detach())
    if is_traceable_wrapper_subclass(tensor):  # a quantized tensor, say, of several plain ones
        for name in cast(Any, tensor).__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from _local_tensors(inner)
    elif tensor.layout == torch.strided and not tensor.is_meta:
        yield tensor


def _digest(facts: Facts) -> float:
    """48 bits of a hash, which float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=6).digest(), "big"))
