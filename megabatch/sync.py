"""How each wrapper holds its reduction back, and what it does to the sum over ranks.

A reducer's ``loss_factor`` undoes the wrapper's own division, so that gradients come out summed over ranks:
DDP averages and is given the loss times its ranks; FSDP2 is told to sum; a plain model is summed here.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import MegabatchError, PlanError
from megabatch.mesh import DataRanks, data_axes, mesh_groups
from megabatch.wrapped import check_buckets, check_hooks, check_precision, fsdp_mesh, refuse_unknown

POLICIES = ("auto", "last", "every")
CHANGED = (
    "parameters were frozen, unfrozen, added or replaced since the GradientAccumulator was made; make a new one "
    "(and wrap the model anew) after such a change"
)


class PlainReducer:
    """A model without a wrapper: one rank needs no reduction, several are summed once, in `finish_update`."""

    loss_factor = 1.0

    def __init__(self, model: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
        self.ranks = DataRanks(groups)
        self.parameters = _trainable(model)
        self._model = model

    def check_unchanged(self) -> None:
        """Raise `PlanError` where an update would be reduced otherwise than what was looked at in the beginning."""
        now = _trainable(self._model)
        if len(now) != len(self.parameters) or any(a is not b for a, b in zip(now, self.parameters, strict=True)):
            raise PlanError(CHANGED)

    def choose(self, policy: str) -> tuple[str, str]:
        """The policy to follow and why."""
        if self.ranks.degree == 1:
            return "last", "one rank, nothing to reduce"
        return "last", "no wrapper: every rank keeps its whole gradient, summed once per update"

    @contextlib.contextmanager
    def microbatch(self, *, reduce: bool, last: bool) -> Generator[None]:
        """Surrounds the forward and backward of one microbatch; ``last`` of its call."""
        yield

    def finish_call(self) -> None:
        """After the last backward of a call: what had to be reduced was reduced, or an error says so."""

    def finish_update(self) -> None:
        """After the last call: gradients are summed over ranks from here on."""
        if self.ranks.degree == 1:
            return
        has_gradient = self.ranks.exchange([parameter.grad is not None for parameter in self.parameters])
        for parameter, *flags in zip(self.parameters, *has_gradient, strict=True):
            if parameter.grad is None and any(flags):
                parameter.grad = torch.zeros_like(parameter)
        for group in self.ranks.groups:
            works = [
                dist.all_reduce(parameter.grad, group=group, async_op=True)
                for parameter in self.parameters
                if parameter.grad is not None
            ]
            for work in works:
                cast(dist.Work, work).wait()

    def discard(self) -> None:
        """Drop what an update that failed half-way has left, outside of ``p.grad``."""


class DDPReducer(PlainReducer):
    """DDP averages what it reduces; what is equal on all ranks already is its own mean, so any policy is right."""

    def __init__(self, model: nn.Module, ddp: DistributedDataParallel) -> None:
        super().__init__(model, [cast(dist.ProcessGroup, ddp.process_group)])
        check_hooks(ddp)
        check_buckets(ddp, len(self.parameters))
        self.loss_factor = float(self.ranks.degree)
        self._ddp = ddp
        self._first_of_static_graph = bool(ddp.static_graph)
        self._went_through_ddp = False
        ddp.register_forward_pre_hook(self._note_forward)

    def check_unchanged(self) -> None:
        super().check_unchanged()
        check_hooks(self._ddp)

    def _note_forward(self, *_: object) -> None:
        self._went_through_ddp = True

    def choose(self, policy: str) -> tuple[str, str]:
        if policy == "every":
            return "every", "as asked: DDP all-reduces the whole gradient with each microbatch"
        return "last", "DDP keeps the whole gradient anyway: one all-reduce, overlapping the last backward"

    @contextlib.contextmanager
    def microbatch(self, *, reduce: bool, last: bool) -> Generator[None]:
        # A static graph is recorded in the first backward, which must be a reducing one.
        reduce, self._first_of_static_graph = reduce or self._first_of_static_graph, False
        self._went_through_ddp = False
        with contextlib.nullcontext() if reduce else self._ddp.no_sync():
            yield

    def finish_call(self) -> None:
        if not self._went_through_ddp:
            raise MegabatchError(
                "the loss did not call the DDP model, so no gradient was reduced; call the model that it is given, "
                "not model.module"
            )
        # A bucket with a parameter that the last microbatch did not use is never reduced, without any error.
        try:
            self._ddp._check_reducer_finalized()  # pyright: ignore[reportPrivateUsage]
        except RuntimeError:
            raise MegabatchError(
                "DDP left gradients unreduced: a parameter that requires a gradient was not used in the last "
                "microbatch; wrap with DistributedDataParallel(..., find_unused_parameters=True)"
            ) from None

    def finish_update(self) -> None:
        """Nothing is left to do: DDP has reduced."""


class FSDP2Reducer(PlainReducer):
    """FSDP2 reduces increments and adds them to the sharded gradient; told to sum, it divides nowhere."""

    def __init__(self, model: nn.Module, modules: list[FSDPModule]) -> None:
        trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
        mesh = fsdp_mesh(trainable)
        super().__init__(model, mesh_groups(mesh, range(mesh.ndim)))
        self._modules = modules
        self._trained = [parameter.requires_grad for parameter in model.parameters()]
        check_precision(modules, trainable)
        for module in modules:  # neither setter reaches the children
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if hasattr(module, "set_reduce_scatter_unused_params"):
                # Ranks that used different parameters would else reduce one's gradient into another's.
                module.set_reduce_scatter_unused_params(True, recurse=False)

    def check_unchanged(self) -> None:
        # By flags, since a module that an evaluation has left unsharded shows other parameters.
        if [parameter.requires_grad for parameter in self._model.parameters()] != self._trained:
            raise PlanError(CHANGED)

    def choose(self, policy: str) -> tuple[str, str]:
        if policy == "last":
            return "last", "as asked: FSDP2 keeps the whole unsharded gradient until the last microbatch"
        return "every", "FSDP2 reduce-scatters each microbatch, so that only a shard of the gradient is kept"

    @contextlib.contextmanager
    def microbatch(self, *, reduce: bool, last: bool) -> Generator[None]:
        self._set(reduce=reduce, last=last)
        try:
            yield
        finally:
            self._set(reduce=True, last=True)

    def finish_update(self) -> None:
        """Nothing is left to do: FSDP2 has reduced."""

    def discard(self) -> None:
        # zero_grad does not reach what was accumulated unsharded, and reset_iter_state of torch 2.13 leaves it too.
        for module in self._modules:
            state = cast(Any, module)._get_fsdp_state()
            if state._is_root:  # None before the first forward
                cast(Any, module).reset_iter_state()
            for parameter in (each for group in state._fsdp_param_groups for each in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def _set(self, *, reduce: bool, last: bool) -> None:
        for module in self._modules:
            module.set_requires_gradient_sync(reduce, recurse=False)
            module.set_is_last_backward(last)


Reducer = PlainReducer | DDPReducer | FSDP2Reducer


def choose_policy(reducer: Reducer, policy: str) -> tuple[str, str]:
    """The policy that ``policy`` means for this wrapper, "last" or "every", and why."""
    if policy not in POLICIES:
        raise PlanError(f"sync is {policy!r}; expected one of {', '.join(POLICIES)}")
    return reducer.choose(policy)


def reducer_for(model: nn.Module, mesh: DeviceMesh | None) -> Reducer:
    """The reducer of the model's wrapper. Raises `PlanError` for a wrapper or mesh that it cannot be exact with."""
    if not isinstance(cast(object, model), nn.Module):
        raise PlanError(f"model is a {type(model).__name__}; expected one torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PlanError("no parameter of the model requires a gradient; unfreeze what is to be trained")
    axes = None if mesh is None else data_axes(mesh)
    wrapper = getattr(model, "_orig_mod", model)  # torch.compile keeps what it compiled here
    modules = [module for module in wrapper.modules() if isinstance(module, FSDPModule)]
    if isinstance(wrapper, DistributedDataParallel):
        reducer = DDPReducer(model, wrapper)
    elif modules:
        reducer = FSDP2Reducer(model, modules)
    else:
        refuse_unknown(wrapper)
        reducer = PlainReducer(model, _plain_groups(mesh, axes))
    if mesh is not None and axes is not None:
        _check_mesh_agrees(reducer.ranks, DataRanks(mesh_groups(mesh, axes)))
    return reducer


def _plain_groups(mesh: DeviceMesh | None, axes: Sequence[str] | None) -> list[dist.ProcessGroup]:
    if mesh is not None and axes is not None:
        return mesh_groups(mesh, axes)
    if not (dist.is_available() and dist.is_initialized()):
        return []
    world = dist.group.WORLD
    assert world is not None
    return [world]


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _check_mesh_agrees(wrapper: DataRanks, mesh: DataRanks) -> None:
    if wrapper.degree != mesh.degree:
        raise PlanError(
            f"the mesh has {mesh.degree} data ranks but the wrapper reduces over {wrapper.degree}; "
            "give both the same mesh"
        )
