"""FSDP1: sums over shards and replicas, and keeps each gradient as a flat shard that no DTensor describes."""

import contextlib
from collections.abc import Generator
from itertools import chain
from typing import Any, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from megabatch.core.gradients import Gradients, refuse_float16
from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Choice
from megabatch.errors import PlanError
from megabatch.torch_private.classes import is_fsdp1
from megabatch.torch_private.fsdp1_handles import (
    drop_flat_gradient,
    flat_parameters,
    has_comm_hook,
    hybrid_strategies,
    is_gathered,
    noting_flat_collectives,
    replica_group,
    reshard_flat,
    summing_flat,
)
from megabatch.wrappers.collective_order import END, OrderedWrapper
from megabatch.wrappers.wide_gradients import is_coarser


class FSDP1Wrapper(OrderedWrapper):
    """Reduces increments as FSDP2 does. FSDP1 averages by itself, and sums in the microbatches of this wrapper.

    Without shards it reduces the whole gradient each time, with what earlier reductions have left in it. A mean of
    equal parts leaves those as they are, and a sum would multiply them. There ``loss_factor`` undoes the mean.
    """

    kind_name = "FSDP1"
    forwards_meet = True
    replaces_gradients = True

    def __init__(self, model: nn.Module, fsdp: FullyShardedDataParallel, ranks: DataRanks) -> None:
        super().__init__(model, ranks)
        self._fsdp = fsdp
        self._states = _states_of(fsdp)
        if any(map(has_comm_hook, self._states)):
            raise PlanError(
                "FSDP1 has a communication hook, which is not known to average or to sum over its ranks; leave it out"
            )
        self._is_sharded = fsdp.sharding_strategy != ShardingStrategy.NO_SHARD
        if self._is_sharded:
            # A flat shard is a plain tensor, so torch's norm would be that of this shard alone.
            self.norm_groups = [cast(dist.ProcessGroup, fsdp.process_group)]
        else:
            self.loss_factor = float(ranks.num_weighing)
        self._check_precision()

    def accumulate_in(self, wide: Gradients) -> None:
        if wide.widens:
            raise PlanError(
                f"accumulate_dtype is {wide.dtype} but FSDP1 accumulates in the parameters' dtype; shard with "
                f"fully_shard and MixedPrecisionPolicy(reduce_dtype={wide.dtype}), or leave accumulate_dtype out"
            )

    @property
    def is_microbatch_local(self) -> bool:
        return False  # every forward gathers parameters

    def choose(self, policy: str) -> Choice:
        self._refuse_sharded_policy(policy)
        if policy == "last":
            return "last", "as asked: FSDP1 keeps the whole unsharded gradient until the last microbatch"
        if policy == "auto" and not self._is_sharded:
            return "last", "FSDP1 without shards keeps the whole gradient anyway: one all-reduce, in the last backward"
        return "every", "FSDP1 reduces each microbatch, so that only a shard of the gradient is kept"

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        # no_sync keeps the unsharded gradient, as "last" of FSDP2 does.
        reduces = last or policy == "every"
        with (
            summing_flat(self._states if self._is_sharded else []),
            contextlib.nullcontext() if reduces else self._fsdp.no_sync(),
            noting_flat_collectives(self._states, self.meet, reduces=reduces),
        ):
            yield
        self.meet(END)

    def finish_update(self) -> None:
        """Begin another hash of collectives. FSDP1 has reduced in the backward."""
        self.collective_order.reset()

    def before_agreement(self, *, is_new: bool) -> None:
        # A forward without a backward leaves weights gathered, perhaps those before the step.
        self.reshard()
        self.collective_order.want_comparison(is_new=is_new)

    def reshard(self) -> None:
        for state in self._states:
            if is_gathered(state):
                reshard_flat(state)

    def check_unchanged(self) -> None:
        # An evaluation's forward leaves other parameters to be seen.
        self.reshard()
        super().check_unchanged()

    def discard(self) -> None:
        self.collective_order.reset()
        # A failed backward leaves parameters gathered, and sums beside p.grad.
        for state in self._states:
            reshard_flat(state)
            drop_flat_gradient(state)

    def _check_precision(self) -> None:
        parameter_dtypes = {parameter.dtype for parameter in self.parameters}
        for state in self._states:
            policy = state.mixed_precision
            refuse_float16(
                ("a dtype of FSDP1's MixedPrecision", dtype) for dtype in (policy.param_dtype, policy.reduce_dtype)
            )
            used = policy.reduce_dtype or policy.param_dtype
            if is_coarser(used, parameter_dtypes):
                raise PlanError(
                    f"FSDP1 would accumulate and reduce gradients in {used}, coarser than the parameters; leave "
                    "MixedPrecision out, or shard with fully_shard and MixedPrecisionPolicy(reduce_dtype=torch.float32)"
                )


def _states_of(fsdp: FullyShardedDataParallel) -> list[Any]:
    return list(filter(is_fsdp1, fsdp.modules()))


def reducing_groups(model: nn.Module, fsdp: FullyShardedDataParallel) -> list[dist.ProcessGroup]:
    """Return the process groups over which FSDP1 reduces all parameters. Raises `PlanError` if they differ."""
    states = _states_of(fsdp)
    if any(
        (state.process_group, state.sharding_strategy) != (fsdp.process_group, fsdp.sharding_strategy)
        for state in states
    ):
        raise PlanError("FSDP1 shards parts of the model over different ranks or in different ways; use one for all")
    # FSDP1 replaces parameters by flat ones; what it ignores stays as it was.
    managed = set(map(id, chain.from_iterable(map(flat_parameters, states))))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            raise PlanError(
                f"parameter {name.replace('_fsdp_wrapped_module.', '')!r} is ignored by FSDP1, which would leave its "
                "gradient unreduced; freeze it, or take it out of ignored_modules"
            )
    replicas = [replica_group(fsdp)] if fsdp.sharding_strategy in hybrid_strategies() else []
    return [cast(dist.ProcessGroup, fsdp.process_group), *replicas]
