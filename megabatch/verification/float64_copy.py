"""Float64 copies of models, so that two runs differ by more than rounding only if they are wrong."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from megabatch.core.samples import Microbatch
from megabatch.errors import PlanError
from megabatch.inspection.mesh_axes import is_expert
from megabatch.inspection.tree import each_leaf, to_device
from megabatch.pipeline.stages import Pipeline
from megabatch.torch_private.classes import is_dtensor, is_fsdp1, is_fsdp2, is_replicate_module
from megabatch.torch_private.fsdp2_groups import (
    fsdp_states,
    groups_of_state,
    home_of_parameter,
    modules_of_state,
    replicate_fsdp2,
    reshard_setting,
)
from megabatch.torch_private.module_members import apply_to_tensors, forward_hooks, forward_pre_hooks, original_of
from megabatch.torch_private.operations import has_function_mode, pytree
from megabatch.wrappers.checks import find_dispatches

DOUBLE = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
# Functions that concern the tensor objects, and casts that are left out.
AS_THEY_ARE = ("__get__", "__set__", "backward", "grad")
NARROWING = ("float", "half", "bfloat16", "cfloat")
DDP_SETTINGS = ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")


class Float64WithoutDropout(TorchFunctionMode):
    """A mode without dropout and without casts from float64 to a lower precision.

    A tensor of lower precision, such as a class weight, is widened in operations with float64 tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "native_dropout":
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if "dropout" in name and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
        if name not in AS_THEY_ARE and any(map(_is_double, (*args, *kwargs.values()))):
            args, kwargs = _widen(name, args, kwargs)
        if args and _is_double(args[0]):
            if name in NARROWING:
                return args[0]
            if name == "_grouped_mm" and args[0].ndim == 2 and kwargs.get("offs") is not None:
                return _grouped_mm(args[0], args[1], kwargs["offs"])
            args = tuple(map(_keep_dtype, args))
            kwargs = {key: _keep_dtype(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _widen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in float64, except one that the operation writes to."""
    named = {key: _double(argument) for key, argument in kwargs.items()}
    if "out" in kwargs:
        named["out"] = kwargs["out"]
    widened = tuple(map(_double, args))
    is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if not is_in_place or not args:
        return widened, named
    return ((args[0], *widened[1:]), named) if _is_double(args[0]) else (args, kwargs)


def _is_double(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float64, torch.complex128)


def _double(value: Any) -> Any:
    """Cast a tensor of lower precision to float64 or complex128."""
    return value.to(DOUBLE[value.dtype]) if isinstance(value, Tensor) and value.dtype in DOUBLE else value


def _grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """Multiply [n, k] by [experts, k, m], each expert for the rows up to its offset; torch has no float64 kernel."""
    ends = offsets.tolist()
    products = [rows[start:end] @ weight for start, end, weight in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*products, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])  # [n, m]


def _keep_dtype(value: Any) -> Any:
    return DOUBLE.get(value, value) if isinstance(value, torch.dtype) else value


def in_float64(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Return the microbatch on ``device``, with floating-point tensors in float64."""
    return each_leaf(to_device(microbatch, device), _double)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel and torch.compile."""
    model = original_of(model)
    return original_of(model.module if isinstance(model, DistributedDataParallel) else model)


def float64_copy(model: nn.Module) -> nn.Module:
    """Copy the whole model in float64 and in training mode, without its wrapper. Collective for FSDP2.

    Raises:
        PlanError: For a model of FSDP1, one that is sharded and tensor parallel, a Pipeline, or experts on ranks of
            their own that transformers has not dealt out.
    """
    model = unwrapped(model)
    states, experts = fsdp_states(filter(is_fsdp2, model.modules())), set(_dispatched_experts(model))
    _check_copied(model, experts, is_sharded=bool(states))
    memo: dict[int, Any] = dict(zip(map(id, states), states, strict=True))
    for module in model.modules():
        for leaf in pytree.tree_leaves(list(vars(module).values())):
            # deepcopy refuses the weight of weight_norm, which is computed.
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                memo[id(leaf)] = leaf.detach().clone()
            elif isinstance(leaf, DTensor) and (states or leaf in experts):
                memo[id(leaf)] = nn.Parameter(cast(DTensor, leaf.detach()).full_tensor(), leaf.requires_grad)
    # FSDP2 has replaced the classes of modules by some that cannot be copied.
    kinds = {module: type(module) for module in filter(is_fsdp2, model.modules())}
    try:
        for module, kind in kinds.items():
            module.__class__ = kind.__bases__[1]
        copied = copy.deepcopy(model, memo)
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
    _gather_experts(copied, model)
    # double() leaves complex numbers as they are.
    apply_to_tensors(copied, _double)
    for module in copied.modules():
        if states:
            _remove_fsdp2(module)
        # Their dropout is inside of one operation.
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    # Modules that were frozen by eval() stay so in a model that trains.
    return copied if model.training else copied.train()


def stay_in_float64(model: nn.Module) -> None:
    """Open `Float64WithoutDropout` for modules that backward runs again (checkpointing), where no mode is open."""
    mode, entered = Float64WithoutDropout(), list[nn.Module]()

    def enter(module: nn.Module, *_: Any) -> None:
        if not has_function_mode():
            mode.__enter__()
            entered.append(module)

    def leave(module: nn.Module, *_: Any) -> None:
        if entered and entered[-1] is module:
            entered.pop()
            mode.__exit__(None, None, None)

    for module in model.modules():
        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)


def _check_copied(model: nn.Module, dispatched: set[nn.Parameter], *, is_sharded: bool) -> None:
    experts = {name: parameter for name, parameter in model.named_parameters() if is_expert(parameter)}
    name = next((name for name in experts if experts[name] not in dispatched), None)
    sharded: list[Any] = list(filter(is_dtensor, model.parameters()))
    axes: Iterator[str] = itertools.chain.from_iterable(
        parameter.device_mesh.mesh_dim_names or () for parameter in sharded
    )
    is_refused = {
        f"a model with experts on ranks of their own that transformers does not send tokens to ({name!r})": bool(name),
        "a model that is tensor parallel and sharded": is_sharded and "tp" in axes,
        "a model of FSDP1": any(map(is_fsdp1, model.modules())),
        "a Pipeline": isinstance(model, Pipeline),
    }
    for kind in filter(is_refused.get, is_refused):
        raise PlanError(
            f"verify was given {kind}, of which it cannot make a copy; verify the model before that is done"
        )


def _remove_fsdp2(module: nn.Module) -> None:
    """Remove FSDP2's attributes and hooks from the copy of a module."""
    for name in list(vars(module)):
        if name.startswith("__composable_api"):
            delattr(module, name)
    for hooks in (forward_pre_hooks(module), forward_hooks(module)):
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", None)).startswith("torch.distributed.fsdp"):
                del hooks[key]


def wrap_like(plain: nn.Module, model: nn.Module) -> nn.Module:
    """Copy ``plain`` into the wrapper of ``model``; return ``plain`` itself without a wrapper. Collective.

    It leaves out settings that only change precision: FSDP2's policies and DDP's communication hooks.
    """
    wrapper, inner = original_of(model), unwrapped(model)
    if isinstance(wrapper, DistributedDataParallel):
        settings = {name: getattr(wrapper, name) for name in DDP_SETTINGS}
        return DistributedDataParallel(
            copy.deepcopy(plain), wrapper.device_ids, wrapper.output_device,
            process_group=wrapper.process_group, **settings,
        )  # fmt: skip
    states = fsdp_states(filter(is_fsdp2, inner.modules()))
    if not states and not any(find_dispatches(inner)):
        return plain
    copied = copy.deepcopy(plain)
    _deal_experts(copied, inner)
    names = {module: name for name, module in inner.named_modules()}
    groups = list(itertools.chain.from_iterable(map(groups_of_state, states)))
    placements: dict[int, Any] = {}
    for group in groups:
        placements |= {id(parameter.sharded_param): parameter.fsdp_placement for parameter in group.fsdp_params}
    copies = dict(copied.named_parameters())
    # fully_shard refuses a parameter that another group holds.
    tied = _tied_over_groups(groups, names)
    for name in tied:
        _set_parameter(copied, name, copy.deepcopy(copied.get_parameter(name)))
    ignored = {copies[name] for name, parameter in inner.named_parameters() if id(parameter) not in placements}
    shards: dict[nn.Parameter, Shard] = {}
    for name, parameter in inner.named_parameters():
        if isinstance(placement := placements.get(id(parameter)), Shard):
            shards[copies[name]] = placement
    for state in reversed(states):
        group = next(iter(groups_of_state(state)), groups[0])
        modules: Any = [copied.get_submodule(names[module]) for module in modules_of_state(state)]
        if len(modules) == 1:
            modules = modules[0]
        if is_replicate_module(modules_of_state(state)[0]):
            replicate_fsdp2(modules, group.mesh_info.mesh, ignored)
            continue
        fully_shard(
            modules, mesh=group.mesh_info.mesh, ignored_params=ignored,
            reshard_after_forward=reshard_setting(state, group), shard_placement_fn=shards.get,
        )  # fmt: skip
    for name, first_name in tied.items():
        _set_parameter(copied, name, copied.get_parameter(first_name))
    return copied


def _tied_over_groups(groups: list[Any], names: dict[nn.Module, str]) -> dict[str, str]:
    """Return the names of parameters that another of FSDP2's groups holds too, with their names there."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for group in groups:
        for parameter in group.fsdp_params:
            module, attribute = home_of_parameter(parameter)
            name = f"{names[module]}.{attribute}".removeprefix(".")
            first_name = first_names.setdefault(id(parameter.sharded_param), name)
            if first_name != name:
                tied[name] = first_name
    return tied


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def _dispatched_experts(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the experts on ranks of their own to which transformers sends tokens."""
    for dispatch in find_dispatches(model):
        yield from map(model.get_submodule(dispatch.name).get_parameter, dispatch.parameters)


def _gather_experts(copied: nn.Module, model: nn.Module) -> None:
    """Let a copy with whole parameters run all experts on this rank."""
    for dispatch in find_dispatches(model):
        module: Any = copied.get_submodule(dispatch.name)
        del vars(module)["forward"]
        module.num_experts = len(getattr(module, dispatch.parameters[0]))
        module._is_expert_parallel = False


def _deal_experts(copied: nn.Module, model: nn.Module) -> None:
    """Deal the experts of a copy out over the ranks that have those of ``model``, with the same exchange of tokens."""
    for dispatch in find_dispatches(model):
        from transformers.distributed.expert_parallel import EPImplementationInterface
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

        module, (_, style, implementation, parameters) = copied.get_submodule(dispatch.name), dispatch
        for name in parameters:
            ALL_PARALLEL_STYLES["grouped_gemm"].shard_param(module, name, implementation.ep_mesh)
        names = {kind: name for name, kind in EPImplementationInterface().items()}
        style.install_forward(
            module, implementation.ep_mesh, tp_mesh=implementation.tp_mesh,
            ep_implementation=names[type(implementation)],
        )  # fmt: skip
