"""Access to torch internals without a stability promise: one function for each, with its source.

The source is torch 2.13. `check_torch` runs when this file is imported, and names the internals that a later version
lacks.
"""

import operator
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as of_every_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

pytree = _pytree  # nested containers of tensors

NEEDED: tuple[tuple[object, str, str], ...] = (  # what has it, its name, and what is read there
    (Tensor, "_version", "writes to a gradient"),
    (Tensor, "_backward_hooks", "hooks on parameters"),
    (Tensor, "_post_accumulate_grad_hooks", "hooks on parameters"),
    (torch, "_foreach_mul_", "clipping"),
    (of_every_module, "_global_forward_hooks", "hooks on modules"),
    (nn.Module(), "_forward_hooks", "hooks on modules"),
    (nn.Module(), "_forward_pre_hooks", "hooks on modules"),
    (nn.Module(), "_compiled_call_impl", "compiled modules"),
    (nn.Module(), "_non_persistent_buffers_set", "buffers"),
    (DistributedDataParallel, "_get_ddp_logging_data", "DDP"),
    (DistributedDataParallel, "_check_reducer_finalized", "DDP"),
    (DeviceMesh, "_get_root_mesh", "device meshes"),
    (dist.distributed_c10d, "_world", "process groups"),
    (dist.ProcessGroup, "_get_backend", "process groups"),
)


def check_torch() -> None:
    """Raise `ImportError` where this version of torch lacks something that the library reads."""
    for owner, name, what in NEEDED:
        if not hasattr(owner, name):
            raise ImportError(
                f"torch {torch.__version__} has no {name}, by which megabatch reads {what}; install torch 2.13"
            )


# Importing DTensor or FSDP takes 0.7 s, so a check for one of their classes does not: where nobody has imported the
# module of a class, nothing is an instance of it.
def _is_of(value: object, module: str, *names: str) -> bool:
    loaded = sys.modules.get(module)
    return loaded is not None and any(isinstance(value, getattr(loaded, name, ())) for name in names)


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Return True for a DTensor."""
    return _is_of(value, "torch.distributed.tensor", "DTensor")


def is_partial(placement: object) -> bool:
    """Return True for the placement Partial, under which each rank has a part of a sum."""
    return _is_of(placement, "torch.distributed.tensor", "Partial")


def is_fsdp1(module: object) -> TypeGuard[Any]:
    """Return True for a module that FSDP1 has wrapped."""
    return _is_of(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def is_fsdp2(module: object) -> TypeGuard[Any]:
    """Return True for a module that was given to fully_shard, or to the replicate built on it."""
    return _is_of(module, "torch.distributed.fsdp", "FSDPModule")


def is_flat_parameter(value: object) -> bool:
    """Return True for a flat parameter of FSDP1, which holds the parameters of several modules."""
    return _is_of(value, "torch.distributed.fsdp._flat_param", "FlatParameter")


# Tensors and autograd


count_writes: Callable[[Tensor], int] = operator.attrgetter("_version")  # in place; called for every gradient


def multiply_all(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """``torch._foreach_mul_``: multiply tensors of one kind in place, in one pass."""
    cast(Any, torch)._foreach_mul_(tensors, factor)


# Hooks on a parameter's gradient, and its own attributes; asked of every parameter in every call.
own_of_parameter = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "__dict__")


def hooks_before_grad(parameter: Any) -> list[Callable[..., Any]]:
    """``Tensor._backward_hooks``: hooks that see a gradient before it is added."""
    return list((parameter._backward_hooks or {}).values())


def hooks_after_grad(parameter: Any) -> list[Callable[..., Any]]:
    """``Tensor._post_accumulate_grad_hooks``: hooks that run when a gradient was added."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


def optimizers_in_backward(parameter: Any) -> list[Any]:
    """``_in_backward_optimizers``, an attribute that torch's _apply_optimizer_in_backward sets."""
    return getattr(parameter, "_in_backward_optimizers", [])


def is_transformed() -> bool:
    """``torch._C._are_functorch_transforms_active``: whether torch.func is at work."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def keeps_graph() -> bool:
    """Return True if the running backward keeps its graph, in which case it may run again."""
    return cast(Any, torch)._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportPrivateUsage]


def inputs_of_node(node: Any) -> Sequence[Any]:
    """``Node._input_metadata``: shape, dtype and device of the gradients that a node of autograd is given."""
    return node._input_metadata


def class_of_function(node: torch.autograd.function.BackwardCFunction) -> type:
    """``_forward_cls``: the autograd.Function whose backward a node runs."""
    return cast(Any, type(node))._forward_cls


# Modules


def original_of(module: nn.Module) -> Any:
    """``_orig_mod``: what torch.compile(module) was made of; the module itself where it is not compiled."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: Any) -> bool:
    """``Module._compiled_call_impl``, set by ``module.compile()``."""
    return module._compiled_call_impl is not None


def forward_hooks(module: nn.Module) -> Mapping[int, Callable[..., Any]]:
    """``Module._forward_hooks``."""
    return module._forward_hooks  # pyright: ignore[reportPrivateUsage]


def forward_pre_hooks(module: nn.Module) -> Mapping[int, Callable[..., Any]]:
    """``Module._forward_pre_hooks``."""
    return module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]


def has_backward_hooks(module: Any) -> bool:
    """``Module._backward_hooks`` and ``_backward_pre_hooks``."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_global_forward_hooks() -> bool:
    """``_global_forward_hooks`` of torch.nn.modules.module."""
    return bool(cast(Any, of_every_module)._global_forward_hooks)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """``Module._buffers``, with those that are None."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def transient_buffers(module: nn.Module) -> set[str]:
    """``Module._non_persistent_buffers_set``: names of the buffers that a state_dict leaves out."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]


def is_given_to_replicate(module: nn.Module) -> bool:
    """Return True if ``replicate`` was called on a module, by the registry of torch.distributed._composable."""
    from torch.distributed._composable.contract import _get_registry  # pyright: ignore[reportPrivateUsage]

    return "replicate" in (_get_registry(module) or {})


def global_step_hooks() -> tuple[Mapping[int, Callable[..., Any]], ...]:
    """``_global_optimizer_pre_hooks`` and ``_post_hooks``: those of every optimizer's step."""
    hooks = cast(Any, sys.modules[torch.optim.Optimizer.__module__])
    return hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks


def start_profiler() -> None:
    """``_enable_profiler_legacy``, with memory. Raises RuntimeError where another profiler runs."""
    profiler: Any = cast(Any, torch)._C._profiler
    experimental = profiler._ExperimentalConfig()
    config = profiler.ProfilerConfig(profiler.ProfilerState.CPU, False, True, False, False, False, experimental)
    cast(Any, torch)._C._autograd._enable_profiler_legacy(config)


def stop_profiler() -> list[list[Any]]:
    """``_disable_profiler_legacy``: the events of each thread."""
    return cast(Any, torch)._C._autograd._disable_profiler_legacy()


# Process groups and meshes


def groups_of_process() -> list[dist.ProcessGroup]:
    """``distributed_c10d._world.pg_map``: every process group that this process is in."""
    return list(cast(Any, dist).distributed_c10d._world.pg_map)


def default_store() -> Any:
    """``distributed_c10d._get_default_store``: the store that init_process_group has made."""
    return cast(Any, dist).distributed_c10d._get_default_store()


def num_begun(group: Any) -> int:
    """``Backend._get_sequence_number_for_group``: collectives begun. Raises RuntimeError where none is counted."""
    backends = [group._get_backend(device) for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``DeviceMesh._get_root_mesh``: the mesh that this one was taken from."""
    return mesh._get_root_mesh()  # pyright: ignore[reportPrivateUsage]


# DistributedDataParallel


def comm_hooks(ddp: Any) -> list[tuple[Callable[..., Any], object]]:
    """``DDP._comm_hooks``: the communication hooks that were registered, with their states."""
    return [(hook, state) for hook, state in ddp._comm_hooks]


def is_joining(ddp: Any) -> bool:
    """``DDP._join_config``: whether ``join()`` is open."""
    return ddp._join_config.enable


def num_reduced(ddp: Any) -> int:
    """``DDP._get_ddp_logging_data``: how many parameters DDP reduces."""
    return ddp._get_ddp_logging_data()["num_parameter_tensors"]


def rebuild_buckets(ddp: Any) -> None:
    """``Reducer._rebuild_buckets``, which else the next forward does. Raises RuntimeError where one is not reduced."""
    ddp.reducer._rebuild_buckets()


def check_reduced(ddp: Any) -> None:
    """``DDP._check_reducer_finalized``. Raises RuntimeError where a bucket was not reduced."""
    ddp._check_reducer_finalized()


# FSDP1


def hybrid_strategies() -> tuple[Any, ...]:
    """Return the members of ShardingStrategy that shard within a node and replicate between nodes."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2  # pyright: ignore[reportPrivateUsage]


def replica_group(fsdp: Any) -> dist.ProcessGroup:
    """``_inter_node_pg``: the ranks that hold the same shard."""
    return fsdp._inter_node_pg


def flat_parameters(module: Any) -> list[nn.Parameter]:
    """``_handle.flat_param`` of a module of FSDP1's, and the parameters that are views of it."""
    if module._handle is None:
        return []
    flat = module._handle.flat_param
    return [flat, *(flat._params or ())]


def is_gathered(module: Any) -> bool:
    """Return True if a module of FSDP1 has its whole parameters gathered."""
    return module._handle is not None and not module._handle.is_sharded(module._handle.flat_param)


def reshard_flat(module: Any) -> None:
    """Let go of gathered parameters, which SHARD_GRAD_OP keeps between forward and backward."""
    if (handle := module._handle) is not None and handle.uses_sharded_strategy:
        handle.reshard(True)
        handle.post_reshard()
        handle._prefetched = False


def drop_flat_gradient(module: Any) -> None:
    """Drop what a backward of FSDP1's has left: ``flat_param.grad`` and ``_saved_grad_shard``."""
    if (handle := module._handle) is not None:
        handle.flat_param.grad = None
        if hasattr(handle.flat_param, "_saved_grad_shard"):
            del handle.flat_param._saved_grad_shard


@contextmanager
def noting_flat_collectives(modules: Sequence[Any], note: Callable[[int], None], *, reduces: bool) -> Generator[None]:
    """While it is open, call ``note`` with a number for each gather and each reduction that FSDP1 begins."""
    handles = [module._handle for module in modules if module._handle is not None]
    hooks: list[Any] = []
    for number, handle in enumerate(handles):
        handle.unshard = partial(_unshard_flat, handle, partial(note, 2 * number))
        if reduces and handle.flat_param.requires_grad:  # FSDP1 reduces in a hook that runs right after this one
            hook = partial(_note_flat_gradient, partial(note, 2 * number + 1))
            hooks.append(handle.flat_param.register_post_accumulate_grad_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            vars(handle).pop("unshard", None)
        for hook in hooks:
            hook.remove()


def _unshard_flat(handle: Any, note: Callable[[], None]) -> None:
    if handle.needs_unshard():
        note()
    type(handle).unshard(handle)


def _note_flat_gradient(note: Callable[[], None], _: Tensor) -> None:
    note()


# FSDP2


def param_groups(modules: Iterable[Any]) -> list[Any]:
    """``_get_fsdp_state()._fsdp_param_groups``: parameters that are gathered and reduced together."""
    return [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]


def fsdp_policy(module: Any) -> Any:
    """``_get_fsdp_state()._mp_policy``: the MixedPrecisionPolicy that fully_shard was given."""
    return module._get_fsdp_state()._mp_policy


def unsharded_parameters(group: Any) -> list[nn.Parameter]:
    """``_unsharded_param`` of a group's parameters; none before the first forward."""
    return [each._unsharded_param for each in group.fsdp_params if hasattr(each, "_unsharded_param")]


def drop_fsdp_gradients(modules: Sequence[Any]) -> None:
    """Drop what a backward of FSDP2's has left beside the shards' ``grad``."""
    # zero_grad does not reach what was accumulated unsharded, and reset_iter_state of torch 2.13 leaves it too.
    for module in modules:
        if module._get_fsdp_state()._is_root:  # None before the first forward
            module.reset_iter_state()
    for group in param_groups(modules):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
        for parameter in unsharded_parameters(group):
            parameter.grad = None


@contextmanager
def reducing_to(modules: Sequence[Any], dtype: torch.dtype | None) -> Generator[None]:
    """While it is open, FSDP2 hands over what it has reduced in ``dtype``, in place of ``_orig_dtype``."""
    for module in modules:  # else the first forward does this, and sets the dtype again
        module._get_fsdp_state()._lazy_init()
    groups = param_groups(modules)
    own = [group._orig_dtype for group in groups]
    try:
        for group in groups:
            group._orig_dtype = dtype
        yield
    finally:
        for group, before in zip(groups, own, strict=True):
            group._orig_dtype = before


@contextmanager
def noting_collectives(groups: Sequence[Any], note: Callable[[int], None]) -> Generator[None]:
    """While it is open, call ``note`` with a number for each gather and each reduction that FSDP2 begins.

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


def _unshard(group: Any, note: Callable[[], None], *given: Any, **named: Any) -> None:
    was_begun = group._all_gather_result is not None
    type(group).unshard(group, *given, **named)
    is_sent = getattr(group.mesh_info, "shard_mesh_size", 1) > 1
    if is_sent and not was_begun and group._all_gather_result is not None:
        note()


def _wait_to_reduce(group: Any, note: Callable[[], None]) -> None:
    note()
    type(group)._wait_for_post_backward(group)


# Pipelines


def run_schedule(schedule: Any, args: list[Any], kwargs: list[Any], *, backward: bool) -> None:
    """``_step_microbatches`` of a schedule, which gives the loss each microbatch's number for a target."""
    schedule._has_backward = backward
    schedule._step_microbatches(args, kwargs, list(range(len(args))), None, False)


check_torch()
