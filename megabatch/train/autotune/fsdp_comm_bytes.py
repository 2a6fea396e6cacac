"""FSDP communication: the exact bytes that a policy of sync sends, and keeps on a rank, from FSDP2's own groups."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megabatch.planning import num_gathered_once


@dataclass(frozen=True)
class CommGroup:
    """Parameters that FSDP2 gathers and reduces together; bytes of all of them, or of this rank's part under tp."""

    gathered_bytes: int  # padding included
    reduced_bytes: int
    whole_bytes: int  # of the gradient that is accumulated before it is reduced
    shard_bytes: int  # of the gradient after that, on this rank
    num_shards: int
    num_copies: int
    reshards: bool  # frees parameters after a forward, and gathers them again for the backward

    def sent_bytes(self, sync: str, num_microbatches: int, num_calls: int, *, gathers_once: bool) -> float:
        """Return the bytes that a rank sends in rings for an update of several microbatches and calls."""
        inside, across = ((ranks - 1) / ranks for ranks in (self.num_shards, self.num_copies))
        gathers = num_calls if gathers_once else num_microbatches * (2 if self.reshards else 1)
        scatters = num_calls if sync == "last" else num_microbatches
        sums = num_microbatches if sync == "every" else num_calls
        within = inside * (gathers * self.gathered_bytes + scatters * self.reduced_bytes)
        return within + 2 * across * sums * self.reduced_bytes / self.num_shards


@dataclass(frozen=True)
class FSDPComm:
    """The groups of a model on this rank."""

    groups: Sequence[CommGroup]

    @property
    def num_shards(self) -> int:
        """Most ranks that share a parameter's gradient."""
        return max((group.num_shards for group in self.groups), default=1)

    def whole_bytes(self, sync: str) -> int:
        """Return the bytes kept between microbatches: "gather_once" keeps the parameters, "last" the gradient."""
        if gathered := self.groups[: num_gathered_once(sync)]:
            return sum(group.gathered_bytes for group in gathered)
        return sum(group.whole_bytes for group in self.groups)

    def more_bytes(self, sync: str) -> int:
        """Return the bytes that a policy keeps beyond the wrapper's own, which keeps this rank's shards."""
        if gathered := self.groups[: num_gathered_once(sync)]:
            # Groups that are not freed after a forward are all there at the peak anyway.
            return sum(group.gathered_bytes for group in gathered if group.reshards)
        return self.whole_bytes(sync) - sum(group.shard_bytes for group in self.groups)

    def sent_bytes(self, sync: str, num_microbatches: int, num_calls: int) -> float:
        """Return the bytes that this rank sends in an update, tensor parallelism excluded."""
        kept = num_gathered_once(sync)
        return sum(
            group.sent_bytes(sync, num_microbatches, num_calls, gathers_once=index < kept)
            for index, group in enumerate(self.groups)
        )


def measure_comm(model: nn.Module, accumulate_dtype: torch.dtype | None) -> FSDPComm:
    """Return the groups of a model that has run a forward. Gradients have the parameters' dtype unless one is given."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return FSDPComm([_measure_group(each, accumulate_dtype) for each in groups])


def _measure_group(group: Any, accumulate_dtype: torch.dtype | None) -> CommGroup:
    found = {"gathered_bytes": 0, "reduced_bytes": 0, "whole_bytes": 0, "shard_bytes": 0}
    num_copies = getattr(group.mesh_info, "replicate_mesh_size", 1)
    num_shards = getattr(group.mesh_info, "shard_mesh_size", 1)
    for each in group.fsdp_params:
        own, policy = each.sharded_param.dtype, each.mp_policy
        computed = policy.param_dtype or own
        reduced, filled = policy.reduce_dtype or computed, each._sharded_param_data.numel() * num_shards
        found["gathered_bytes"] += filled * computed.itemsize
        if each.sharded_param.requires_grad:
            kept = reduced if num_copies > 1 else accumulate_dtype or own  # replica_last keeps reduced sums
            found["reduced_bytes"] += filled * reduced.itemsize
            found["whole_bytes"] += each._orig_size.numel() * reduced.itemsize
            found["shard_bytes"] += each.sharded_param.to_local().numel() * kept.itemsize
    return CommGroup(**found, num_shards=num_shards, num_copies=num_copies, reshards=group._reshard_after_forward)
