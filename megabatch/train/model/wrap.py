"""Wrap: the model as a plain module, DDP or FSDP2."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch.train.ranks import Ranks

SHARD_FROM_PARAMETERS = 1_000_000_000  # a rule of thumb; parallel.wrapper overrules it


@dataclass(frozen=True)
class Wrapper:
    """How the model lies over the ranks, and why."""

    name: str  # "plain", "ddp" or "fsdp2"
    reason: str


def choose_wrapper(asked: str | None, num_ranks: int, model: nn.Module) -> Wrapper:
    """The wrapper that was asked for, or the one that suits the number of ranks and parameters."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if asked is not None:
        return Wrapper(asked, "asked for")
    if num_ranks == 1:
        return Wrapper("plain", "one process")
    if num_parameters < SHARD_FROM_PARAMETERS:
        return Wrapper("ddp", f"{num_parameters:,} parameters are below {SHARD_FROM_PARAMETERS:,}: replicas send least")
    return Wrapper("fsdp2", f"{num_parameters:,} parameters are {SHARD_FROM_PARAMETERS:,} or more: sharded they fit")


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that stay in one piece, by name, as the model says in ``_no_split_modules``; to be asked before
    FSDP2 gives them another class."""
    kinds: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    return {name: module for name, module in model.named_modules() if name and type(module).__name__ in kinds}


def shard(model: nn.Module, blocks: Sequence[nn.Module], policy: MixedPrecisionPolicy, ranks: Ranks) -> None:
    """Give each block to FSDP2, then what is left; collective."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def replicate(model: nn.Module, *, find_unused: bool) -> nn.Module:
    """The model in DDP, which looks for parameters that a microbatch leaves out if it is told to; collective."""
    return DistributedDataParallel(model, find_unused_parameters=find_unused)


def reshard(model: nn.Module) -> None:
    """Drop FSDP2's unsharded weights after forwards without a backward: the next update would not be seen in them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
