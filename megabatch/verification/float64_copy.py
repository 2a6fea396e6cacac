"""Float64 copies of models, so that two runs differ by more than rounding only if they are wrong."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from megabatch.core.samples import Microbatch
from megabatch.errors import PlanError
from megabatch.inspection.mesh_axes import is_expert
from megabatch.inspection.tree import each_leaf, to_device
from megabatch.pipeline.stages import Pipeline
from megabatch.torch_private.classes import is_replicate_module
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
from megabatch.wrappers.checks import Dispatch, find_dispatches

DOUBLE = {
    **dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.float64),
    **dict.fromkeys((torch.complex64, torch.complex32), torch.complex128),
}
IN_PLACE = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__")
AS_THEY_ARE = ("__get__", "__set__", "backward", "grad")  # they concern the tensor objects


class Float64WithoutDropout(TorchFunctionMode):
    """A mode without dropout and without casts from float64 to a lower precision.

    A tensor of lower precision, such as a class weight, is widened in operations with float64 tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and "attention" not in name and args:
            return args[0] if name != "native_dropout" else (args[0], torch.ones_like(args[0], dtype=torch.bool))
        if name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
        if name not in AS_THEY_ARE and any(map(_is_double, [*args, *kwargs.values()])):
            args, kwargs = _widen(name, args, kwargs)
        if args and _is_double(args[0]):
            if name in ("float", "half", "bfloat16", "cfloat"):
                return args[0]
            if name == "_grouped_mm" and args[0].ndim == 2 and kwargs.get("offs") is not None:
                return _grouped_mm(args[0], args[1], kwargs["offs"])
            args = tuple(_keep_dtype(value) for value in args)
            kwargs = {key: _keep_dtype(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _widen(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments in float64, except one that the operation writes to."""
    is_in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    if is_in_place and args and not _is_double(args[0]):
        return args, kwargs
    first, widened = (args[:1], args[1:]) if is_in_place else ((), args)
    named = {key: argument if key == "out" else _double(argument) for key, argument in kwargs.items()}
    return (*first, *map(_double, widened)), named


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
    states = _states(model)
    _check_copied(model, is_sharded=bool(states))
    memo: dict[int, Any] = {id(state): state for state in states}
    experts = {id(expert) for dispatch in find_dispatches(model) for expert in _experts_of(model, dispatch)}
    for module in model.modules():
        for leaf in pytree.tree_leaves(list(vars(module).values())):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:  # the weight of weight_norm: deepcopy refuses it
                memo[id(leaf)] = leaf.detach().clone()
            elif isinstance(leaf, DTensor) and (states or id(leaf) in experts):
                memo[id(leaf)] = nn.Parameter(cast(DTensor, leaf.detach()).full_tensor(), leaf.requires_grad)
    sharded = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    try:
        for module, kind in sharded:  # FSDP2 has replaced the module's class by one that cannot be copied
            cast(Any, module).__class__ = kind.__bases__[1]
        copied = copy.deepcopy(model, memo)
    finally:
        for module, kind in sharded:
            cast(Any, module).__class__ = kind
    for module in copied.modules() if states else ():
        _remove_fsdp2(module)
    _gather_experts(copied, model)
    apply_to_tensors(copied, _double)  # double() leaves complex numbers as they are
    for module in copied.modules():
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention):  # their dropout is inside of one operation
            module.dropout = 0.0
    return copied if model.training else copied.train()  # modules frozen by eval() stay so in a training model


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


def _check_copied(model: nn.Module, *, is_sharded: bool) -> None:
    kind = "a Pipeline" if isinstance(model, Pipeline) else None
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        kind = "a model of FSDP1"
    if is_sharded and any(
        isinstance(parameter, DTensor) and _has_tensor_axis(parameter) for parameter in model.parameters()
    ):
        kind = "a model that is tensor parallel and sharded"
    if (name := _find_undispatched(model)) is not None:
        kind = f"a model with experts on ranks of their own that transformers does not send tokens to ({name!r})"
    if kind is not None:
        raise PlanError(
            f"verify was given {kind}, of which it cannot make a copy; verify the model before that is done"
        )


def _has_tensor_axis(parameter: DTensor) -> bool:
    return "tp" in (parameter.device_mesh.mesh_dim_names or ())


def _states(model: nn.Module) -> list[Any]:
    """Return FSDP2's state of each call of fully_shard, the outermost first."""
    return fsdp_states(module for module in model.modules() if isinstance(module, FSDPModule))


def _remove_fsdp2(module: nn.Module) -> None:
    """Remove FSDP2's attributes and hooks from the copy of a module."""
    for name in [name for name in vars(module) if name.startswith("__composable_api")]:
        del vars(module)[name]
    for hooks in (forward_pre_hooks(module), forward_hooks(module)):
        for key, hook in list(hooks.items()):
            if str(getattr(hook, "__module__", None)).startswith("torch.distributed.fsdp"):
                del hooks[key]


def wrap_like(plain: nn.Module, model: nn.Module) -> nn.Module:
    """Copy ``plain`` into the wrapper of ``model``; return ``plain`` itself without a wrapper. Collective.

    It leaves out settings that only change precision: FSDP2's policies and DDP's communication hooks.
    """
    wrapper = original_of(model)
    if isinstance(wrapper, DistributedDataParallel):
        return DistributedDataParallel(
            copy.deepcopy(plain), wrapper.device_ids, wrapper.output_device, process_group=wrapper.process_group,
            **{name: getattr(wrapper, name) for name in
               ("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")},
        )  # fmt: skip
    states = _states(unwrapped(model))
    if not states and not any(find_dispatches(unwrapped(model))):
        return plain
    copied = copy.deepcopy(plain)
    _deal_experts(copied, unwrapped(model))
    if not states:
        return copied
    names = {module: name for name, module in unwrapped(model).named_modules()}
    groups = [group for state in states for group in groups_of_state(state)]
    sharded = [parameter for group in groups for parameter in group.fsdp_params]
    managed = {id(parameter.sharded_param) for parameter in sharded}
    copies = dict(copied.named_parameters())
    named = list(unwrapped(model).named_parameters())
    ignored = {copies[name] for name, parameter in named if id(parameter) not in managed}
    placed = {id(parameter.sharded_param): parameter.fsdp_placement for parameter in sharded}
    tied = _tied_over_groups(sharded, names)
    for name in tied:  # fully_shard refuses a parameter that another group holds
        _set_parameter(copied, name, copy.deepcopy(copied.get_parameter(name)))
    places = {id(copies[name]): placed[id(parameter)] for name, parameter in named if id(parameter) in placed}
    for state in reversed(states):
        group = next(iter(groups_of_state(state)), groups[0])
        modules = [copied.get_submodule(names[module]) for module in modules_of_state(state)]
        together: Any = modules if len(modules) > 1 else modules[0]
        if is_replicate_module(modules_of_state(state)[0]):
            replicate_fsdp2(together, group.mesh_info.mesh, ignored)
            continue
        fully_shard(
            together, mesh=group.mesh_info.mesh, ignored_params=ignored,
            reshard_after_forward=reshard_setting(state, group),
            shard_placement_fn=lambda param: place if isinstance(place := places.get(id(param)), Shard) else None,
        )  # fmt: skip
    for name, first_name in tied.items():
        _set_parameter(copied, name, copied.get_parameter(first_name))
    return copied


def _tied_over_groups(sharded: list[Any], names: dict[nn.Module, str]) -> dict[str, str]:
    """Return the names of parameters that another of FSDP2's groups holds too, with their names there."""
    first_names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for parameter in sharded:
        module, attribute = home_of_parameter(parameter)
        name = f"{names[module]}.{attribute}".removeprefix(".")
        first_name = first_names.setdefault(id(parameter.sharded_param), name)
        if first_name != name:
            tied[name] = first_name
    return tied


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)


def _find_undispatched(model: nn.Module) -> str | None:
    """Return the name of an expert on ranks of their own to which transformers sends no tokens; None without one."""
    dispatched = {f"{dispatch.name}.{name}" for dispatch in find_dispatches(model) for name in dispatch.parameters}
    names = (name for name, parameter in model.named_parameters() if is_expert(parameter))
    return next((name for name in names if name not in dispatched), None)


def _experts_of(model: nn.Module, dispatch: Dispatch) -> list[nn.Parameter]:
    return [model.get_submodule(dispatch.name).get_parameter(name) for name in dispatch.parameters]


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
