"""FSDP2, HSDP and the `replicate` built on FSDP2.

Each reduction adds to the sharded gradient. FSDP2 is told to sum and not to average, so that every sync policy gives
the same gradient.
"""

import contextlib
from collections.abc import Generator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from megabatch.core.gradients import Gradients, refuse_float16
from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import CHANGED, REQUIRES_GRAD, Choice, stranding
from megabatch.errors import MegabatchError, PlanError
from megabatch.torch_private.fsdp2_groups import (
    adopt_parameters,
    drop_fsdp_gradients,
    drop_gathers,
    finalizes_by_hand,
    fsdp_policy,
    holds_fsdp_gradients,
    keeping_gathered,
    name_of_group,
    noting_collectives,
    param_groups,
    reduce_fsdp_gradients,
    reduce_unused_parameters,
    reducing_in_one_dtype,
    reducing_to,
    refuse_backward_to,
    sharded_parameters,
    unsharded_parameters,
)
from megabatch.torch_private.versions import check_feature
from megabatch.wrappers.collective_order import END, OrderedWrapper
from megabatch.wrappers.wide_gradients import is_coarser

UNREDUCED = (
    "FSDP2 left gradients unreduced, since the loss did not go through the module that fully_shard was given last; "
    "call that module, and compute the loss from the tensors that it returns"
)
# The reason for each policy; the first is that of "auto".
REPLICATED_CHOICES = {
    "last": "replicas keep their whole gradient anyway: one all-reduce, in the last backward",
    "every": "as asked: replicate all-reduces the whole gradient with each microbatch",
}
TRADES_OF_MEMORY = {
    "last": "as asked: FSDP2 keeps the whole unsharded gradient until the last microbatch",
    "gather_once": "as asked: FSDP2 gathers parameters once per call, and keeps them until its last backward",
}
SHARDED_CHOICES = {
    "every": "FSDP2 reduce-scatters each microbatch, so that only a shard of the gradient is kept",
    **TRADES_OF_MEMORY,
}
HYBRID_CHOICES = {
    "replica_last": "HSDP reduce-scatters each microbatch, and all-reduces its shard once, in the last",
    "every": "as asked: HSDP reduce-scatters and all-reduces with each microbatch",
    **TRADES_OF_MEMORY,
}


class FSDP2Wrapper(OrderedWrapper):
    """Reduce-scatters where parameters are sharded, all-reduces where they are replicated."""

    kind_name = "FSDP2 without replicas"
    forwards_meet = True

    def __init__(self, model: nn.Module, modules: list[FSDPModule], ranks: DataRanks) -> None:
        check_feature("FSDP2")
        super().__init__(model, ranks)
        self._modules = modules
        self._groups = param_groups(modules)
        self.device = self._groups[0].device
        # FSDP2 fixes at wrapping which parameters it reduces.
        self._trained = list(map(REQUIRES_GRAD, model.parameters()))
        self._has_shards = any(hasattr(group.mesh_info, "shard_process_group") for group in self._groups)
        self._has_replicas = any(hasattr(group.mesh_info, "replicate_process_group") for group in self._groups)
        self._choices = SHARDED_CHOICES
        if not self._has_shards:
            self.kind_name, self._choices = "replicate", REPLICATED_CHOICES
        elif self._has_replicas:
            self._choices = HYBRID_CHOICES
        check_precision(modules, self.parameters)
        for module in modules:  # neither setter reaches the children
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            reduce_unused_parameters(module)
        self._casts = any(fsdp_policy(module).reduce_dtype is not None for module in modules)
        self._refusing_nodes = refuse_backward_to(self.parameters, _refuse_shard) if ranks.num_weighing > 1 else []

    def accumulate_in(self, wide: Gradients) -> None:
        check_wide(self._modules, wide, self.parameters)
        super().accumulate_in(wide)

    def check_unchanged(self) -> None:
        if list(map(REQUIRES_GRAD, self._model.parameters())) != self._trained:
            raise PlanError(CHANGED)
        if any(map(finalizes_by_hand, self._modules)):
            raise PlanError(
                "set_manual_backward_finalization(True) keeps FSDP2 from reducing gradients; leave it off, since "
                "finalize() of the accumulator finishes the update"
            )
        super().check_unchanged()

    @property
    def shows_gathered(self) -> bool:
        return not all(group.is_sharded for group in self._groups)  # an evaluation has left some unsharded

    @property
    def accumulating(self) -> Sequence[nn.Parameter]:
        return [*self.parameters, *chain.from_iterable(map(unsharded_parameters, self._groups))]

    @property
    def is_microbatch_local(self) -> bool:
        return False  # every forward gathers parameters

    def choose(self, policy: str) -> Choice:
        if policy not in self._choices:
            self._refuse_sharded_policy(policy)
            policy = next(iter(self._choices))
        return policy, self._choices[policy]

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        ends_call, keeping = last, contextlib.nullcontext()
        if policy == "gather_once":
            keeping = keeping_gathered(self._modules, self._groups, frees=ends_call)
        # A held update has no last microbatch: finish_update reduces what all of them have left.
        last = last and not self.is_held
        # FSDP2 reads these in the backward hooks of the microbatch.
        reduces, reduces_all = last or policy != "last", last or policy == "every"
        self._set(reduce=reduces, all_reduce=reduces_all, last=last)
        try:
            with keeping, self._reducing_wide(), noting_collectives(self._groups, self.meet):
                yield
                # No hook has run where the loss depends on no tensor that FSDP2 found in a root module's output.
                if reduces and holds_fsdp_gradients(self._groups, partly=reduces_all):
                    reduce_fsdp_gradients(self._modules)
            self.meet(END)
            if reduces and holds_fsdp_gradients(self._groups, partly=reduces_all):
                raise stranding(MegabatchError(UNREDUCED))
        finally:
            self._set(reduce=True, all_reduce=True, last=True)
            if ends_call:  # a model that this microbatch has not used may be gathered still
                self.reshard()

    @contextlib.contextmanager
    def without_reduction(self) -> Generator[None]:
        is_holding = holds_fsdp_gradients(self._groups)
        self._set(reduce=False, all_reduce=False, last=False)
        try:
            yield
        finally:
            self._set(reduce=True, all_reduce=True, last=True)
            if not is_holding:
                drop_fsdp_gradients(self._modules)

    def hold_reduction(self, policy: str) -> None:
        """Keep unsharded gradients, or the sums over a shard's ranks, until `finish_update`."""
        self.is_held = policy in ("last", "replica_last") or (policy == "gather_once" and self._has_replicas)

    def before_agreement(self, *, is_new: bool) -> None:
        # A forward without a backward leaves weights gathered, perhaps those before the step.
        self.reshard()
        self.collective_order.want_comparison(is_new=is_new)

    def reshard(self) -> None:
        drop_gathers(self._groups)
        for module in self._modules:
            module.reshard()

    def finish_update(self) -> None:
        """Reduce what was held back. Otherwise FSDP2 has reduced already."""
        self.collective_order.reset()
        if self.is_held:
            self.is_held = False
            self._set(reduce=True, all_reduce=True, last=True)
            # A model of a list that no rank has used keeps its gradients None, which optimizers skip.
            if [True] in self.ranks.exchange_numbers([holds_fsdp_gradients(self._groups)]):
                with self._reducing_wide():
                    reduce_fsdp_gradients(self._modules)
                if holds_fsdp_gradients(self._groups):
                    raise stranding(MegabatchError(UNREDUCED))

    def discard(self) -> None:
        self.is_held = False
        self.collective_order.reset()
        # Sums of a failed update lie beside p.grad, where zero_grad does not reach them.
        drop_fsdp_gradients(self._modules)

    def _reducing_wide(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which FSDP2 reduces to the wider dtype, so that it does not round before it adds."""
        if self._wide.widens:
            return reducing_to(self._modules, self._wide.dtype)
        return reducing_in_one_dtype(self._groups) if self._casts else contextlib.nullcontext()

    def describe_collective(self, number: int) -> str:
        description = super().describe_collective(number)
        # Another model of a list, or `END`, has no group here.
        if number >> 32 != self.index:
            return description
        return f"{description} of {name_of_group(self._groups[(number & 0xFFFFFFFF) // 2])}"

    def _set(self, *, reduce: bool, all_reduce: bool, last: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(reduce, recurse=False)
            if self._has_replicas:  # last, since the former sets it too
                module.set_requires_all_reduce(all_reduce, recurse=False)
            module.set_is_last_backward(last)


def _refuse_shard(*_: object) -> None:
    """Raise for a loss that uses a parameter as a DTensor: its gradient would be that of this rank's samples."""
    raise stranding(
        MegabatchError(
            "the loss uses a sharded parameter itself (by full_tensor(), say), outside of the forward of its module, "
            "and FSDP2 would not sum its gradient over ranks; use it in the forward of the module that holds it"
        )
    )


def managed_groups(model: nn.Module, modules: list[FSDPModule]) -> list[Any]:
    """Return FSDP2's groups of parameters. Raises `PlanError` for a trained parameter in none of them."""
    groups = param_groups(modules)
    adopt_parameters(groups)
    managed = managed_ids(groups)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in managed:
            raise PlanError(
                f"parameter {name!r} is not sharded, so FSDP2 would leave its gradient unreduced; call fully_shard on "
                "the root too, and reshard() after an evaluation"
            )
    return groups


def managed_ids(groups: Sequence[Any]) -> set[int]:
    """Return the ids of the parameters in groups of FSDP2."""
    return set(map(id, chain.from_iterable(map(sharded_parameters, groups))))


def reducing_groups(model: nn.Module, modules: list[FSDPModule]) -> list[dist.ProcessGroup]:
    """Return the process groups over which FSDP2 reduces. Raises `PlanError` for a trained parameter without one."""
    groups = [group for group in managed_groups(model, modules) if any(map(REQUIRES_GRAD, sharded_parameters(group)))]
    info = groups[0].mesh_info
    if any(group.mesh_info.mesh != info.mesh for group in groups):
        raise PlanError(
            "the model's parameters are sharded over different meshes; use one mesh for all, and name the axis "
            "'ep' that deals out experts"
        )
    return groups_of_info(info)


def groups_of_info(info: Any) -> list[dist.ProcessGroup]:
    """Return the process groups over which FSDP2 reduces a group of parameters."""
    names = ("shard_process_group", "replicate_process_group")
    return [getattr(info, name) for name in names if hasattr(info, name)]


def check_precision(modules: Sequence[Any], trainable: list[nn.Parameter]) -> None:
    """Refuse where FSDP2 would accumulate gradients in a coarser dtype than the parameters'."""
    parameter_dtypes = {parameter.dtype for parameter in trainable}
    for module in modules:
        policy = fsdp_policy(module)
        refuse_float16([("FSDP2's param_dtype", policy.param_dtype), ("FSDP2's reduce_dtype", policy.reduce_dtype)])
        used = policy.reduce_dtype or policy.param_dtype
        if is_coarser(used, parameter_dtypes):
            raise PlanError(
                f"FSDP2 would accumulate and reduce gradients in {used}, coarser than the parameters; "
                "give MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )


def check_wide(modules: Sequence[Any], wide: Gradients, trainable: list[nn.Parameter]) -> None:
    """Refuse where FSDP2 would reduce in a coarser dtype than gradients are to be added in."""
    if wide.dtype is None or not wide.widens:
        return
    coarsest = max((parameter.dtype for parameter in trainable), key=lambda dtype: torch.finfo(dtype).eps)
    for module in modules:
        policy = fsdp_policy(module)
        used = policy.reduce_dtype or policy.param_dtype or coarsest
        if is_coarser(used, [wide.dtype]):
            raise PlanError(
                f"accumulate_dtype is {wide.dtype} but FSDP2 reduces gradients in {used}; "
                f"give MixedPrecisionPolicy(reduce_dtype={wide.dtype})"
            )
