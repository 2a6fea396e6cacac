"""Reductions: what a policy of sync keeps on a rank and what it sends, from the groups that FSDP2 has made. Exact."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered and reduced together: bytes of all of them, of this rank's part under tp."""

    gathered_bytes: int  # with what fills up the shards
    reduced_bytes: int
    whole_bytes: int  # of their gradient as it is added up before it is reduced
    shard_bytes: int  # of their gradient after that, on this rank
    num_shards: int
    num_copies: int
    reshards: bool  # after a forward, so that the backward gathers again

    def sent_bytes(self, sync: str, num_microbatches: int, num_calls: int) -> float:
        """What a rank sends in rings for an update of so many microbatches in so many calls."""
        inside, across = ((ranks - 1) / ranks for ranks in (self.num_shards, self.num_copies))
        gathers = num_microbatches * (2 if self.reshards else 1)
        scatters = num_calls if sync == "last" else num_microbatches
        sums = num_microbatches if sync == "every" else num_calls
        within = inside * (gathers * self.gathered_bytes + scatters * self.reduced_bytes)
        return within + 2 * across * sums * self.reduced_bytes / self.num_shards


@dataclass(frozen=True)
class Reductions:
    """Those of a model on this rank."""

    groups: Sequence[Group]

    @property
    def num_shards(self) -> int:
        """How many ranks share the gradient of a parameter, at most."""
        return max((group.num_shards for group in self.groups), default=1)

    @property
    def whole_bytes(self) -> int:
        """Of the gradient that "last" keeps from microbatch to microbatch."""
        return sum(group.whole_bytes for group in self.groups)

    @property
    def more_bytes(self) -> int:
        """What "last" keeps beyond the other policies, which keep this rank's shard."""
        return self.whole_bytes - sum(group.shard_bytes for group in self.groups)

    def sent_bytes(self, sync: str, num_microbatches: int, num_calls: int) -> float:
        """What this rank sends in an update; nothing of tensor parallelism."""
        return sum(group.sent_bytes(sync, num_microbatches, num_calls) for group in self.groups)


def reductions_of(model: nn.Module, added_in: torch.dtype | None) -> Reductions:
    """Those of a model that has run a forward; ``added_in``: wider than its parameters, None for their own dtype."""
    modules: list[Any] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    return Reductions([group_of(each, added_in) for each in groups])


def group_of(group: Any, added_in: torch.dtype | None) -> Group:
    """One of FSDP2's groups in numbers."""
    found = {"gathered_bytes": 0, "reduced_bytes": 0, "whole_bytes": 0, "shard_bytes": 0}
    num_copies = getattr(group.mesh_info, "replicate_mesh_size", 1)
    num_shards = getattr(group.mesh_info, "shard_mesh_size", 1)
    for each in group.fsdp_params:
        own, policy = each.sharded_param.dtype, each.mp_policy
        computed = policy.param_dtype or own
        reduced, filled = policy.reduce_dtype or computed, each._sharded_param_data.numel() * num_shards
        found["gathered_bytes"] += filled * computed.itemsize
        if each.sharded_param.requires_grad:
            kept = reduced if num_copies > 1 else added_in or own  # replica_last keeps what it has reduced so far
            found["reduced_bytes"] += filled * reduced.itemsize
            found["whole_bytes"] += each._orig_size.numel() * reduced.itemsize
            found["shard_bytes"] += each.sharded_param.to_local().numel() * kept.itemsize
    return Group(**found, num_shards=num_shards, num_copies=num_copies, reshards=group._reshard_after_forward)
