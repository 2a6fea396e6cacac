"""Wrap: the model as a plain module, DDP, FSDP2, or FSDP2's replicate."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch.train.config.parallel_layout import ALONE, Layout, check_wrapper

SHARD_FROM_PARAMETERS = 1_000_000_000  # a rule of thumb; parallel.wrapper overrules it


@dataclass(frozen=True)
class Wrapper:
    """How the model lies over the ranks that see different data, and why."""

    name: str  # "plain", "ddp", "fsdp2" or "replicate"
    reason: str

    @property
    def is_of_fsdp(self) -> bool:
        """Whether it is built on FSDP2."""
        return self.name in ("fsdp2", "replicate")

    @property
    def casts_as(self) -> str:
        """The wrapper whose way to compute in another dtype it has."""
        return "fsdp2" if self.is_of_fsdp else self.name


def choose_wrapper(asked: str | None, num_ranks: int, model: nn.Module, layout: Layout = ALONE) -> Wrapper:
    """The wrapper that was asked for, or the one that suits the degrees, the number of ranks and the parameters."""
    wrapper = Wrapper(asked, "asked for") if asked is not None else suited(num_ranks, model, layout)
    if wrapper.name != "plain":
        check_wrapper(wrapper.name, *layout.data_degrees(wrapper.name, num_ranks))
    return wrapper


def suited(num_ranks: int, model: nn.Module, layout: Layout) -> Wrapper:
    """The wrapper where the recipe names none."""
    if num_ranks == 1:
        return Wrapper("plain", "one process")
    if num_ranks == layout.tp * layout.pp:
        return Wrapper("plain", "one data rank")
    copies = "ddp" if layout.tp == layout.cp == layout.pp == 1 else "replicate"
    if layout.dp_shard is not None or layout.dp_replicate is not None:
        dp_replicate, dp_shard = layout.data_degrees(None, num_ranks)
        name = "fsdp2" if dp_shard > 1 else copies
        return Wrapper(name, f"parallel.dp_replicate is {dp_replicate} and parallel.dp_shard {dp_shard}")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters < SHARD_FROM_PARAMETERS:
        return Wrapper(
            copies, f"{num_parameters:,} parameters are below {SHARD_FROM_PARAMETERS:,}: replicas send least"
        )
    return Wrapper("fsdp2", f"{num_parameters:,} parameters are {SHARD_FROM_PARAMETERS:,} or more: sharded they fit")


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that stay in one piece, by name, as the model says in ``_no_split_modules``; to be asked before
    FSDP2 gives them another class."""
    kinds: set[str] = set(getattr(model, "_no_split_modules", None) or ())
    return {name: module for name, module in model.named_modules() if name and type(module).__name__ in kinds}


def distribute(
    model: nn.Module, blocks: Sequence[nn.Module], wrapper: Wrapper, policy: MixedPrecisionPolicy, mesh: DeviceMesh,
    *, reshards: bool,
) -> None:  # fmt: skip
    """Give each block to FSDP2, which ``reshards`` it after its forward or keeps it, or to its replicate, then what is
    left; collective."""
    over = reduced_mesh(wrapper, mesh)
    for module in (*blocks, model):
        if wrapper.name == "fsdp2":
            after = None if reshards else False  # None: as torch does it, the root stays for its backward
            fully_shard(module, mesh=over, mp_policy=policy, reshard_after_forward=after)
        else:
            replicate_with_fsdp.replicate(module, mesh=over, mp_policy=policy)


def reduced_mesh(wrapper: Wrapper, mesh: DeviceMesh) -> DeviceMesh:
    """The part of the mesh over which gradients are summed: the data axes, the last of them with cp."""
    names = mesh.mesh_dim_names or ()
    axes = [axis for axis in ("dp_replicate", "dp_shard") if axis in names]
    if "cp" not in names:
        return mesh[tuple(axes)]
    joined = mesh[axes[-1], "cp"]._flatten(f"{axes[-1]}_cp")  # pyright: ignore[reportPrivateUsage]
    return joined if len(axes) == 1 else mesh[axes[0], f"{axes[-1]}_cp"]


def replicate(model: nn.Module, *, find_unused: bool, group: dist.ProcessGroup | None = None) -> nn.Module:
    """The model in DDP, which looks for parameters that a microbatch leaves out if it is told to; collective over the
    group, or all ranks."""
    return DistributedDataParallel(model, find_unused_parameters=find_unused, process_group=group)


def reshard(model: nn.Module) -> None:
    """Drop FSDP2's unsharded weights after forwards without a backward: the next update would not be seen in them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
