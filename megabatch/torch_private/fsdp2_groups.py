"""FSDP2: states, and the parameter groups that it gathers and reduces."""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megabatch.torch_private.operations import address_of


def param_groups(modules: Iterable[Any]) -> list[Any]:
    """``_get_fsdp_state()._fsdp_param_groups``: parameters that are gathered and reduced together."""
    return [group for module in modules for group in groups_of_state(module._get_fsdp_state())]


def adopt_parameters(groups: Iterable[Any]) -> None:
    """``reset_sharded_param``: make groups hold the parameters that have replaced theirs since they were sharded.

    The first forward does the same. transformers replaces parameters when it loads weights into a sharded model.
    """
    groups = list(groups)
    for group in groups:
        if group.is_sharded and not group._reset_sharded_params:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()
    _share_storage_of_tied(groups)


def _share_storage_of_tied(groups: Iterable[Any]) -> None:
    """``_sharded_param_data``: let groups that hold one parameter gather it from its own storage.

    FSDP2 pads an uneven shard anew in each group. The optimizer would step one copy, and the others would stay behind.
    """
    by_parameter: dict[int, list[Any]] = {}
    for group in groups:
        for parameter in group.fsdp_params:
            by_parameter.setdefault(id(parameter.sharded_param), []).append(parameter)
    for tied in by_parameter.values():
        if len(tied) == 1:
            continue
        address = address_of(tied[0].sharded_param._local_tensor.untyped_storage())
        addresses = [address_of(parameter._sharded_param_data.untyped_storage()) for parameter in tied]
        holder = tied[addresses.index(address) if address in addresses else -1]
        for parameter in tied:
            parameter._sharded_param_data = holder._sharded_param_data


def home_of_parameter(parameter: Any) -> tuple[nn.Module, str]:
    """``_module_info``: the module of a parameter of a group, and its name there."""
    return parameter._module_info.module, parameter._module_info.param_name


def fsdp_policy(module: Any) -> Any:
    """``_get_fsdp_state()._mp_policy``: the MixedPrecisionPolicy that fully_shard was given."""
    return module._get_fsdp_state()._mp_policy


def unsharded_parameter(parameter: Any) -> nn.Parameter | None:
    """``_unsharded_param`` of a parameter of a group; None before the first forward."""
    return getattr(parameter, "_unsharded_param", None)


def unsharded_parameters(group: Any) -> list[nn.Parameter]:
    """Return the unsharded parameters of a group; none before the first forward."""
    return [unsharded for fsdp_param in group.fsdp_params if (unsharded := unsharded_parameter(fsdp_param)) is not None]


def sharded_parameters(group: Any) -> list[nn.Parameter]:
    """``sharded_param`` of each parameter of a group."""
    return [fsdp_param.sharded_param for fsdp_param in group.fsdp_params]


def partly_reduced(group: Any) -> Tensor | None:
    """``_partial_reduce_output``: gradients that HSDP has summed over the ranks of a shard, and not of replicas."""
    return group._partial_reduce_output


def awaits_gather(group: Any) -> bool:
    """``_all_gather_result``: True while a gather of the group has begun and is not waited for yet."""
    return group._all_gather_result is not None


def drop_gathers(groups: Sequence[Any]) -> None:
    """Drop gathers that were begun and not waited for, and the order of forwards by which FSDP2 begins them early.

    FSDP2 does this in the last backward of a module, by ``finalize_backward``. If that backward does not come, a later
    forward takes the weights of this moment from the gather.
    """
    for group in groups:
        result = group._all_gather_result
        if result is not None and result.all_gather_event is not None:
            group.device_handle.current_stream().wait_event(result.all_gather_event)
        if result is not None and isinstance(result.all_gather_work, dist.Work):
            result.all_gather_work.wait()
        group._all_gather_result = None
        group._post_forward_indices.clear()
        getattr(group.comm_ctx, "post_forward_order", []).clear()


def name_of_group(group: Any) -> str:
    """``_module_fqn``, which the first forward sets: the name of the module whose parameters a group holds."""
    return repr(group._module_fqn) if group._module_fqn else "the model itself"


def class_of_groups() -> type:
    """``FSDPParamGroup``: the class of what `param_groups` returns."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def fsdp_states(modules: Iterable[Any]) -> list[Any]:
    """``_get_fsdp_state()`` of modules, each once: a call of fully_shard has one state for all its modules."""
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))


def groups_of_state(state: Any) -> list[Any]:
    """``_fsdp_param_groups`` of one call of fully_shard; ``_fsdp_param_group`` in torch 2.11."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = state._fsdp_param_group
    return [] if group is None else [group]


def modules_of_state(state: Any) -> Sequence[nn.Module]:
    """``_modules`` of a state: those that one call of fully_shard was given."""
    return state._modules


def reshard_setting(state: Any, group: Any) -> bool | int | None:
    """Return the ``reshard_after_forward`` that fully_shard was given."""
    after = group.post_forward_mesh_info
    if state._auto_reshard_after_forward or after is None:
        return None if state._auto_reshard_after_forward else False
    return True if after is group.mesh_info else after.shard_mesh_size


def replicate_fsdp2(module: Any, mesh: DeviceMesh, ignored: set[nn.Parameter]) -> None:
    """Call the replicate built on FSDP2."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, ignored_params=ignored)


def reduce_unused_parameters(module: Any) -> None:
    """Let a rank reduce zeros for parameters of ``module`` that it has not used, and other ranks may have.

    Without it ranks reduce different parameters, and one's gradient is added to another's or the process aborts.
    """
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
        return
    for group in groups_of_state(module._get_fsdp_state()):
        group.__class__ = _class_of_groups_with_unused()


@cache
def _class_of_groups_with_unused() -> type:
    """Return the class of groups for torch 2.11 and 2.12, which have no `set_reduce_scatter_unused_params`."""

    class ParamGroupWithUnused(cast(Any, class_of_groups())):
        def post_backward(self, *unused: Any) -> None:
            if self.reduce_grads:
                for parameter in unsharded_parameters_without_gradient(self):
                    parameter.grad = torch.zeros_like(parameter)
            super().post_backward(*unused)

    return ParamGroupWithUnused


def unsharded_parameters_without_gradient(group: Any) -> list[nn.Parameter]:
    """Return the trained unsharded parameters of a group of which no backward has left a gradient."""
    waiting = [parameter for parameter in group.fsdp_params if accumulated_gradient(parameter) is None]
    unsharded = [leaf for parameter in waiting if (leaf := unsharded_parameter(parameter)) is not None]
    return [leaf for leaf in unsharded if leaf.requires_grad and leaf.grad is None]


def accumulated_gradient(parameter: Any) -> Tensor | None:
    """``unsharded_accumulated_grad`` of a parameter of a group, beside the unsharded parameter's own gradient.

    From torch 2.15 on there is no other gradient than the unsharded parameter's, and the name is a property.
    """
    return vars(parameter).get("unsharded_accumulated_grad")


def finalizes_by_hand(module: Any) -> bool:
    """``set_manual_backward_finalization`` of torch 2.15, after which no backward reduces."""
    return getattr(module._get_fsdp_state()._state_ctx, "manual_backward_finalization", False)


def drop_fsdp_gradients(modules: Sequence[Any]) -> None:
    """Drop what a backward of FSDP2's has left beside the shards' ``grad``."""
    # zero_grad does not reach what was accumulated unsharded, and reset_iter_state of torch 2.13 leaves it too.
    for module in modules:
        if module._get_fsdp_state()._is_root:  # None before the first forward
            _reset_iteration(module)
    for group in param_groups(modules):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if accumulated_gradient(parameter) is not None:
                parameter.unsharded_accumulated_grad = None
        for parameter in unsharded_parameters(group):
            parameter.grad = None


def _reset_iteration(root: Any) -> None:
    """``FSDPModule.reset_iter_state``, also for torch 2.11 and 2.12: forget a forward or backward that raised."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    context, shared = root._get_fsdp_state()._comm_ctx, root._get_fsdp_state()._state_ctx
    for state in shared.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in groups_of_state(state):
            _reset_group(group)
    context.all_gather_state = None
    context.post_forward_order.clear()
    if hasattr(context, "reduce_scatter_states"):
        context.reduce_scatter_states.clear()
    else:  # torch 2.11
        context.reduce_scatter_state = None
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _reset_group(group: Any) -> None:
    # What a collective still writes to must not be freed; this stands in for waiting for each of its events.
    if group.device.type != "cpu":
        torch.accelerator.synchronize(group.device)
    gathering = group._all_gather_result
    if gathering is not None and isinstance(gathering.all_gather_work, dist.Work):
        gathering.all_gather_work.wait()
    group._all_gather_result = None
    group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
    group._post_forward_indices.clear()
    group._training_state = type(group._training_state).IDLE
    group._to_sharded()


def holds_fsdp_gradients(groups: Sequence[Any], *, partly: bool = True) -> bool:
    """Return True if a backward has left gradients of FSDP2 that are not reduced.

    With ``partly``, also if HSDP has summed them over the ranks of a shard, and not of replicas.
    """
    return any(
        (partly and group._partial_reduce_output is not None)
        or any(accumulated_gradient(fsdp_param) is not None for fsdp_param in group.fsdp_params)
        or any(parameter.grad is not None for parameter in unsharded_parameters(group))
        for group in groups
    )


@torch.no_grad()
def reduce_fsdp_gradients(modules: Sequence[Any]) -> None:
    """``_root_post_backward_final_callback``: reduce what the backwards before have left, as if one had ended."""
    for module in modules:
        state = module._get_fsdp_state()
        if state._is_root:  # None before the first forward
            if hasattr(state._state_ctx, "manual_backward_finalization_active"):  # which a backward of torch 2.15 sets
                state._state_ctx.manual_backward_finalization_active = False
            state._root_post_backward_final_callback()


@contextmanager
def reducing_in_one_dtype(groups: Sequence[Any]) -> Generator[None]:
    """While it is open, a group's reduction casts what the last microbatch alone has used, as it cast the rest."""
    try:
        for group in groups:
            group.post_backward = partial(_reduce_in_one_dtype, group)
        yield
    finally:
        for group in groups:
            vars(group).pop("post_backward", None)


@contextmanager
def reducing_to(modules: Sequence[Any], dtype: torch.dtype | None) -> Generator[None]:
    """While it is open, FSDP2 hands over what it has reduced in ``dtype``, in place of ``_orig_dtype``."""
    for module in modules:  # else the first forward does this, and sets the dtype again
        module._get_fsdp_state()._lazy_init()
    groups = param_groups(modules)
    places = [place for group in groups for place in _places_of_dtype(group)]
    before = [getattr(place, name) for place, name in places]
    try:
        for place, name in places:
            setattr(place, name, dtype)
        for group in groups:
            group.post_backward = partial(_reduce_in_one_dtype, group)
        yield
    finally:
        for (place, name), original in zip(places, before, strict=True):
            setattr(place, name, original)
        for group in groups:
            vars(group).pop("post_backward", None)


def _places_of_dtype(group: Any) -> list[tuple[Any, str]]:
    """``_orig_dtype`` of a group; from torch 2.15 on ``sharded_grad_dtype`` of each parameter."""
    if hasattr(group, "_orig_dtype"):
        return [(group, "_orig_dtype")]
    return [(parameter, "sharded_grad_dtype") for parameter in group.fsdp_params]


def _reduce_in_one_dtype(group: Any, *args: Any) -> None:
    """Widen what the last microbatch alone has used, and what none has: FSDP2 reduces gradients of one dtype."""
    parameters = [fsdp_param for fsdp_param in group.fsdp_params if unsharded_parameter(fsdp_param) is not None]
    if not parameters:  # no microbatch has used the group yet, which torch 2.13 does not expect where it casts
        return
    if group.reduce_grads and any(accumulated_gradient(parameter) is not None for parameter in parameters):
        for pending in [parameter for parameter in parameters if accumulated_gradient(parameter) is None]:
            pending.to_accumulated_grad_if_needed()
            if accumulated_gradient(pending) is None and pending._unsharded_param.requires_grad:
                zeros = torch.zeros_like(pending._unsharded_param, dtype=pending.reduce_dtype, requires_grad=False)
                pending.unsharded_accumulated_grad = zeros
    type(group).post_backward(group, *args)


@contextmanager
def keeping_gathered(modules: Sequence[Any], groups: Sequence[Any], *, frees: bool) -> Generator[None]:
    """While it is open, FSDP2 frees no parameters after a forward, nor after a backward unless ``frees``.

    ``post_forward_mesh_info`` says where parameters stay after a forward; None: gathered. The public setter could not
    set it back.
    """
    for module in modules:  # else the first forward does this, and sets that of the root
        module._get_fsdp_state()._lazy_init()
    for group in groups:  # a forward without a backward leaves a part where its mesh, unset below, would be needed
        if group.is_sharded_post_forward:
            group.reshard()
    settings = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info, group.reshard_after_backward = None, frees
        yield
    finally:
        for group, before in zip(groups, settings, strict=True):
            group.post_forward_mesh_info, group.reshard_after_backward = before


@contextmanager
def noting_collectives(groups: Sequence[Any], note: Callable[[int], None]) -> Generator[None]:
    """While it is open, call ``note`` with a number before each gather and each reduction that FSDP2 begins.

    Torch pairs them across ranks by their order alone. A rank in another order is sent the parameters of another
    module, or adds the gradient of one to that of another.
    """
    for number, group in enumerate(groups):
        group.unshard = partial(_unshard, group, partial(note, 2 * number))
        # What FSDP2 calls before each reduction, and only there.
        group._wait_for_post_backward = partial(_wait_to_reduce, group, partial(note, 2 * number + 1))
    try:
        yield
    finally:
        for group in groups:  # one is there twice where fully_shard was given a list of modules
            vars(group).pop("unshard", None)
            vars(group).pop("_wait_for_post_backward", None)


def _unshard(group: Any, note: Callable[[], None], *args: Any, **named: Any) -> None:
    is_there = group._all_gather_result is not None or group.is_unsharded
    is_left_out = not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"
    if not is_there and not is_left_out and getattr(group.mesh_info, "shard_mesh_size", 1) > 1:
        note()
    type(group).unshard(group, *args, **named)


def _wait_to_reduce(group: Any, note: Callable[[], None]) -> None:
    if group._training_state.name == "POST_BACKWARD":  # torch 2.11 and 2.12 wait here at the end of a backward too
        note()
    type(group)._wait_for_post_backward(group)


def refuse_backward_to(parameters: Iterable[Tensor], refuse: Callable[..., None]) -> list[Any]:
    """Call ``refuse`` before autograd adds a gradient to a parameter. This lasts as long as the returned nodes live."""
    nodes = [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]
    for node in nodes:
        node.register_prehook(refuse)
    return nodes
