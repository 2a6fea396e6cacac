"""Access to torch internals without a stability promise: one function for each, with its source.

The source is torch 2.13. Where torch 2.11 to 2.15 differ, the function says how. `check_torch` runs when this file is
imported, and `check_feature` where a feature is used: they name what another version lacks.
"""

import importlib
import operator
import sys
import types
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from types import FunctionType
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules import module as of_every_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils.data import dataloader

from megabatch.errors import MegabatchError

pytree = _pytree  # nested containers of tensors
NEEDS_DATA = (  # what a fake tensor raises where its contents are read
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
FRAMES_OF_SAMPLERS = 16  # between a DataLoader and the sampler that it asks: samplers may wrap each other
WAIT = torch.ops._c10d_functional.wait_tensor.default  # returns its argument; on fake tensors, a tensor of its own

NEEDED: tuple[tuple[object, str, str], ...] = (  # what has it, its name, and what is read there
    (Tensor, "_version", "writes to a gradient"),
    (Tensor, "_backward_hooks", "hooks on parameters"),
    (Tensor, "_post_accumulate_grad_hooks", "hooks on parameters"),
    (torch, "_foreach_mul_", "clipping"),
    (of_every_module, "_global_forward_hooks", "hooks on modules"),
    (nn.Module(), "_forward_hooks", "hooks on modules"),
    (nn.Module(), "_forward_pre_hooks", "hooks on modules"),
    (nn.Module(), "_compiled_call_impl", "compiled modules"),
    (nn.Module(), "_parameters", "the members of a module"),
    (nn.Module(), "_modules", "the members of a module"),
    (nn.Module(), "_non_persistent_buffers_set", "buffers"),
    (DistributedDataParallel, "_get_ddp_logging_data", "DDP"),
    (DistributedDataParallel, "_check_reducer_finalized", "DDP"),
    (DistributedDataParallel, "_sync_buffers", "DDP"),
    (cast(Any, dist).Reducer, "_set_forward_pass_work_handle", "DDP"),
    (DeviceMesh, "_get_root_mesh", "device meshes"),
    (dist.distributed_c10d, "_world", "process groups"),
    (dist.ProcessGroup, "_get_backend", "process groups"),
)


TESTED = "2.11 to 2.15"  # versions of torch, in docs/versions.md
NEEDED_BY: dict[str, dict[str, str]] = {  # of a feature: "module:class" → names, of which | divides alternatives
    "FSDP2": {
        "torch.distributed.fsdp:FSDPModule": "_get_fsdp_state set_gradient_divide_factor set_is_last_backward "
        "set_force_sum_reduction_for_comms set_requires_all_reduce set_requires_gradient_sync",
        "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": "_auto_reshard_after_forward _comm_ctx _is_root "
        "_fsdp_param_groups|_fsdp_param_group _lazy_init _modules _mp_policy _root_post_backward_final_callback "
        "_state_ctx _training_state",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": "_all_gather_result _module_fqn "
        "_partial_reduce_output _to_sharded _training_state _wait_for_post_backward fsdp_params is_sharded "
        "is_sharded_post_forward is_unsharded mesh_info post_backward post_forward_mesh_info reduce_grads "
        "reshard_after_backward unshard_in_backward",
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": "_unsharded_param reduce_dtype sharded_param",
    },
    "pipelines": {
        "torch.distributed.pipelining.schedules:_PipelineSchedule": "_has_backward _step_microbatches",
    },
    "plan": {
        "torch.utils.flop_counter": "flop_registry sdpa_backward_flop_count sdpa_flop_count",
        "torch.distributed.tensor._sharding_prop:ShardingPropagator": "_propagate_tensor_meta_non_cached",
        "torch.distributed.tensor._redistribute": "_gen_transform_infos clear_redistribute_planner_cache",
        "torch.distributed.tensor.debug": "_clear_sharding_prop_cache",
        "torch.testing._internal.distributed.fake_pg": "FakeStore",
        "torch.distributed.pipelining.schedules": "_batch_p2p",
    },
}


def check_torch() -> None:
    """Raise `ImportError` where this version of torch lacks something that the library reads."""
    for owner, name, what in NEEDED:
        if not hasattr(owner, name):
            raise ImportError(
                f"torch {torch.__version__} has no {name}, by which megabatch reads {what}; install torch {TESTED}"
            )


@cache
def check_feature(feature: str) -> None:
    """Raise `MegabatchError` where this version of torch lacks something that a feature of `NEEDED_BY` reads."""
    for place, names in NEEDED_BY[feature].items():
        module, _, owner_name = place.partition(":")
        try:
            owner = importlib.import_module(module)
        except ImportError:
            raise _lacking(feature, module) from None
        if owner_name:
            owner = getattr(owner, owner_name, None)
        for alternatives in names.split():
            if not any(_has_name(owner, name) for name in alternatives.split("|")):
                raise _lacking(feature, f"{place.replace(':', '.')}.{alternatives}")


def _has_name(owner: Any, name: str) -> bool:
    """Return True for a member of a module or class, and for an attribute that a method of the class reads or sets."""
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", ()):
        return True
    methods = [member for member in vars(owner).values() if isinstance(member, FunctionType)] if owner else []
    return any(name in method.__code__.co_names for method in methods)


def _lacking(feature: str, name: str) -> MegabatchError:
    return MegabatchError(
        f"{feature} does not work under torch {torch.__version__}, which has no {name}; install torch {TESTED}"
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
    """``torch._foreach_mul_``: multiply tensors of one kind in place, in one pass. Of DTensors, the local ones."""
    # DTensor would find out anew how each list of other tensors is sharded.
    cast(Any, torch)._foreach_mul_([local_tensor(each) if is_dtensor(each) else each for each in tensors], factor)


# Hooks on a parameter's gradient, and its own attributes; asked of every parameter in every call.
own_of_parameter = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "__dict__")


# A module's dicts of its own parameters and children. torch changes these dicts and never replaces them.
members_of_module = operator.attrgetter("_parameters", "_modules")


def hooks_before_grad(parameter: Any) -> list[Callable[..., Any]]:
    """``Tensor._backward_hooks``: hooks that see a gradient before it is added."""
    return list((parameter._backward_hooks or {}).values())


def hooks_after_grad(parameter: Any) -> list[Callable[..., Any]]:
    """``Tensor._post_accumulate_grad_hooks``: hooks that run when a gradient was added."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


# Where torch defines the hooks that its wrappers and its memory tracker put on parameters, and megabatch's own. torch's
# other functions are no hooks of torch: a user may register any of them.
HOMES_OF_HOOKS = (
    "megabatch.", "torch.distributed._composable.", "torch.distributed._tools.",
    "torch.distributed.fsdp.", "torch.nn.parallel.distributed.",
)  # fmt: skip


def home_of_hook(hook: Any) -> str:
    """Return the module in which a hook's code is defined; "" for an object that is called, and for code in C."""
    while True:
        if isinstance(hook, partial):
            hook = hook.func
        elif isinstance(hook, types.MethodType):
            hook = hook.__func__
        elif not isinstance(hook, types.FunctionType):
            return ""
        elif hook.__globals__.get("__name__") == "torch.utils._contextlib" and hasattr(hook, "__wrapped__"):
            hook = vars(hook)["__wrapped__"]  # torch.no_grad() as a decorator
        else:
            return str(hook.__globals__.get("__name__"))


def optimizers_in_backward(parameter: Any) -> list[Any]:
    """``_in_backward_optimizers``, an attribute that torch's _apply_optimizer_in_backward sets."""
    return getattr(parameter, "_in_backward_optimizers", [])


def is_transformed() -> bool:
    """``torch._C._are_functorch_transforms_active``: whether torch.func is at work."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def keeps_graph() -> bool:
    """Return True if the running backward keeps its graph, in which case it may run again."""
    return cast(Any, torch)._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportPrivateUsage]


def call_after_backward(function: Callable[[], None]) -> None:
    """``_execution_engine.queue_callback``: call a function at the end of the backward that runs."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(function)


def cross_entropy_weight(loss: Tensor) -> Tensor | None:
    """``NllLossBackward._saved_total_weight``: what torch's cross-entropy divided by, if ``loss`` is its mean.

    None for every other loss, and in a half type, which cannot hold a count.
    """
    node = _mean_cross_entropy(loss)
    weight = None if node is None else node._saved_total_weight
    return weight if weight is not None and weight.dtype in (torch.float32, torch.float64) else None


def is_mean_cross_entropy(loss: Tensor) -> bool:
    """Return True for the mean of torch's cross-entropy without class weights.

    Its backward writes the gradient of targets that count and no other, so without targets the gradient is 0.
    """
    node = _mean_cross_entropy(loss)
    return node is not None and node._saved_weight is None


def _mean_cross_entropy(loss: Tensor) -> Any:
    node = _before_views(loss)
    if node is None or node.name() not in ("NllLossBackward0", "NllLoss2DBackward0") or node._saved_reduction != 1:
        return None
    return node


MEANS = ("MeanBackward0", "MeanBackward1")  # names of the nodes of Tensor.mean
TORCH_LOSSES = (  # names of the nodes of torch's losses that say what they reduce to
    "BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0", "HuberLossBackward0", "MseLossBackward0",
    "NllLossBackward0", "NllLoss2DBackward0", "SmoothL1LossBackward0", "SoftMarginLossBackward0",
)  # fmt: skip
reduction_of = operator.attrgetter("_saved_reduction")  # of such a node: 0 for none, 1 for the mean, 2 for the sum


CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
DIFFERENCES = ("HuberLossBackward0", "MseLossBackward0", "SmoothL1LossBackward0")  # losses of predictions and numbers


def targets_of(node: Any) -> tuple[Tensor, Tensor, int | None]:
    """``_saved_target``, ``_saved_self`` and ``_saved_ignore_index`` of the node of a loss of torch.

    Returns:
        The targets, which of them count, and the value that the loss leaves out. A loss of differences leaves none out
        (None). Where its prediction is its target, it counts nothing.
    """
    targets: Tensor = node._saved_target
    if node.name() not in CROSS_ENTROPIES:
        return targets, node._saved_self.detach() != targets, None
    ignored = node._saved_ignore_index
    ignored = ignored - 2**64 if ignored >= 2**63 else ignored  # saved without a sign
    return targets, targets != ignored, ignored


def is_mean_reduction(loss: Tensor) -> bool:
    """Return True if the last operation of ``loss``, before views and casts, is a mean."""
    node = _before_views(loss)
    return node is not None and (node.name() in MEANS or (node.name() in TORCH_LOSSES and reduction_of(node) == 1))


def last_divisor(loss: Tensor) -> float | None:
    """``DivBackward0._saved_other``: the number by which the last operation divides. None for other operations."""
    node = _before_views(loss)
    other = getattr(node, "_saved_other", None) if node is not None and node.name() == "DivBackward0" else None
    if not isinstance(other, Tensor) or other.numel() > 1 or other.device.type != "cpu":
        return None
    return float(other.detach())


def scaler_state(scaler: torch.amp.GradScaler) -> tuple[Any, ...]:
    """``GradScaler._scale`` and ``_per_optimizer_states``, to compare: `unscale_`, `step` and `update` change them."""
    scale: Tensor | None = getattr(scaler, "_scale", None)
    stages = {key: each["stage"] for key, each in getattr(scaler, "_per_optimizer_states", {}).items()}
    return (None if scale is None else (id(scale), count_writes(scale)), stages)


def _before_views(loss: Tensor) -> Any:
    node: Any = loss.grad_fn
    while node is not None and node.name() in ("ToCopyBackward0", "ViewBackward0"):
        node = node.next_functions[0][0]
    return node


def inputs_of_node(node: Any) -> Sequence[Any]:
    """``Node._input_metadata``: shape, dtype and device of the gradients that a node of autograd is given."""
    return node._input_metadata


def class_of_function(node: torch.autograd.function.BackwardCFunction) -> type:
    """``_forward_cls``: the autograd.Function whose backward a node runs."""
    return cast(Any, type(node))._forward_cls


def is_asked_by_workers() -> bool:
    """``_MultiProcessingDataLoaderIter._try_put_index``: True in a sampler that is read for workers, ahead of use."""
    code = dataloader._MultiProcessingDataLoaderIter._try_put_index.__code__  # pyright: ignore[reportPrivateUsage]
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    for _ in range(FRAMES_OF_SAMPLERS):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


# Operations and the modes that see them


# Called for every operation.
packet_of: Callable[[Any], Any] = operator.attrgetter("_overloadpacket")  # an operation with all its overloads
name_of_operation: Callable[[Any], str] = operator.attrgetter("_opname")  # without its namespace
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
address_of: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")  # of the storage in C++
local_tensor: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")  # of a DTensor, outside of autograd


class UncompiledMode:
    """A base of dispatch modes that no compiler meets: ``TorchDispatchMode._should_skip_dynamo``.

    Torch keeps a compiler out of each operation, which takes longer than the operation on fake tensors.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def without_modes() -> AbstractContextManager[object]:
    """``_disable_current_modes``: without the dispatch modes that are open."""
    from torch.utils import _python_dispatch

    modes: Any = _python_dispatch
    return modes._disable_current_modes()


def partitioned(
    call: Callable[..., Any], of_forward: Callable[..., Any], of_backward: Callable[..., Any]
) -> Callable[..., Any]:
    """``aot_function`` with the partitioner and the decompositions of torch.compile; the first call traces."""
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    partition = partial(min_cut_rematerialization_partition, compiler="inductor")
    make: Any = aot_function
    return make(call, of_forward, of_backward, partition, decompositions=select_decomp_table())


def has_function_mode() -> bool:
    """``torch._C._is_torch_function_mode_enabled``: whether a TorchFunctionMode is open."""
    return cast(Any, torch)._C._is_torch_function_mode_enabled()


# Modules


def original_of(module: nn.Module) -> Any:
    """``_orig_mod``: what torch.compile(module) was made of; the module itself where it is not compiled."""
    return getattr(module, "_orig_mod", module)


def is_compiled(module: Any) -> bool:
    """``Module._compiled_call_impl``, set by ``module.compile()``."""
    return module._compiled_call_impl is not None


def has_compiled(model: nn.Module) -> bool:
    """True if the model or a module of it is compiled."""
    return any(is_compiled(module) or original_of(module) is not module for module in model.modules())


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """``Module._forward_hooks``."""
    return module._forward_hooks  # pyright: ignore[reportPrivateUsage]


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """``Module._forward_pre_hooks``."""
    return module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]


def has_backward_hooks(module: Any) -> bool:
    """``Module._backward_hooks`` and ``_backward_pre_hooks``."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_global_forward_hooks() -> bool:
    """``_global_forward_hooks`` of torch.nn.modules.module."""
    return bool(cast(Any, of_every_module)._global_forward_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """``Module._parameters``, without those of submodules and with those that are None."""
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def apply_to_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """``Module._apply``: replace each parameter and buffer by what ``change`` returns for it."""
    module._apply(change)  # pyright: ignore[reportPrivateUsage]


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


def step_hooks(optimizer: Any) -> list[Callable[..., Any]]:
    """``Optimizer._optimizer_step_pre_hooks`` and ``_optimizer_step_post_hooks``: hooks of one optimizer's step."""
    found = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    return [hook for hooks in found for hook in hooks.values()]


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step.__wrapped__``: a class's step without the hooks of every optimizer, which run in the outer one's step."""
    return cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step


def is_in_backward() -> bool:
    """``torch._C._current_graph_task_id``: whether this thread runs a backward."""
    return cast(Any, torch)._C._current_graph_task_id() != -1


def backward_id() -> int:
    """``torch._C._current_graph_task_id``: the number of the backward that this thread runs."""
    return cast(Any, torch)._C._current_graph_task_id()


def is_in_function_backward() -> bool:
    """Return True inside the backward of a Python autograd function, where reentrant checkpointing begins another."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def without_subclasses() -> AbstractContextManager[object]:
    """``torch._C.DisableTorchFunctionSubclass``: calls inside of ``__torch_function__`` are plain ones."""
    return cast(Any, torch)._C.DisableTorchFunctionSubclass()


def call_before_clip(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function before ``clip_grad._clip_grads_with_norm_``, the half of clip_grad_norm_ that scales gradients.

    It is a global of its module, so clip_grad_norm_ finds the replacement under every name by which it was imported.
    Returns a function that undoes the replacement.
    """
    from torch.nn.utils import clip_grad

    module = cast(Any, clip_grad)
    own = module._clip_grads_with_norm_

    def clip(*args: Any, **kwargs: Any) -> Any:
        function()
        return own(*args, **kwargs)

    module._clip_grads_with_norm_ = clip
    return lambda: setattr(module, "_clip_grads_with_norm_", own)


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


def group_named(name: str) -> dist.ProcessGroup:
    """``distributed_c10d._resolve_process_group``: the group that a functional collective names."""
    return cast(Any, dist).distributed_c10d._resolve_process_group(name)


def is_boxed_group(value: object) -> bool:
    """``ScriptObject._type``: whether an argument of an operation is a process group in a box."""
    return isinstance(value, torch.ScriptObject) and "ProcessGroup" in cast(Any, value)._type().qualified_name()


def make_fake_store() -> Any:
    """Return the store of the backend "fake", whose collectives do nothing. The import registers the backend."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def num_begun(group: Any) -> int:
    """``Backend._get_sequence_number_for_group``: collectives begun. Raises RuntimeError where none is counted."""
    backends = [group._get_backend(device) for device in group._device_types]
    return sum(backend._get_sequence_number_for_group() for backend in backends)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """``DeviceMesh._get_root_mesh``: the mesh that this one was taken from."""
    return mesh._get_root_mesh()  # pyright: ignore[reportPrivateUsage]


# DTensor


def trial_of_dtensor() -> tuple[type, str]:
    """Return the class and the method with which DTensor tries an operation on tensors of the global shape."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def clear_mesh_caches() -> None:
    """Clear DTensor's caches, which hold meshes whose process groups are gone."""
    from torch.distributed.tensor import _redistribute, debug

    cast(Any, debug)._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    cast(Any, _redistribute)._gen_transform_infos.cache_clear()


def first_of_shard(tensor: Any) -> int | None:
    """Return the flat index of a shard's first number in the whole DTensor; None where a shard is not one range."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as offset_of

    kinds = [each for each in tensor.placements if not isinstance(each, Replicate)]
    if any(type(each) is not Shard or each.dim != 0 for each in kinds):
        return None
    _, offset = offset_of(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0] * (tensor.numel() // max(1, tensor.shape[0])) if offset else 0


def num_replicas(tensor: Any) -> int:
    """Return how many ranks of a DTensor's mesh hold the same shard."""
    from torch.distributed.tensor import Replicate

    sizes = [size for size, each in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
             if isinstance(each, Replicate)]  # fmt: skip
    return int(torch.tensor(sizes).prod()) if sizes else 1


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


def broadcast_buffers(ddp: Any) -> None:
    """``DDP._sync_buffers``, which DDP calls before a forward that it reduces after, where it has buffers to sync."""
    if ddp.broadcast_buffers and ddp.modules_buffers:
        ddp._sync_buffers()


class _OneRank(dist.Work):
    """A finished message in which one rank took part."""

    def __init__(self) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result([torch.ones((), dtype=torch.int64, device="cpu")])

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


@cache
def _one_rank() -> _OneRank:
    return _OneRank()  # one for the process: the reducer in C++ does not keep it alive


@contextmanager
def summing(ddp: Any) -> Generator[None]:
    """While it is open, DDP divides by 1 and not by its ranks: ``Reducer._set_forward_pass_work_handle``.

    DDP's ``join()`` tells the reducer in the same way how many ranks still take part.
    """
    ddp.reducer._set_forward_pass_work_handle(_one_rank(), False)
    try:
        yield
    finally:
        ddp.reducer._set_forward_pass_work_handle(_one_rank(), True)  # True: divide by all ranks


def settle_buckets(ddp: Any, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    """Reduce these gradients, in the order in which they are to lie in the buckets, and rebuild the buckets by it.

    `Reducer.prepare_for_backward` and `Reducer._rebuild_buckets`, as DDP calls them.
    """
    if ddp.reducer._rebuild_buckets():  # by a backward before, which DDP's next forward would have done
        return
    ddp.reducer.prepare_for_backward([])
    for parameter, gradient in gradients:
        torch.autograd.backward(parameter, gradient)
    ddp.reducer._rebuild_buckets()


# FSDP1


def hybrid_strategies() -> tuple[Any, ...]:
    """Return the members of ShardingStrategy that shard within a node and replicate between nodes."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2  # pyright: ignore[reportPrivateUsage]


def has_comm_hook(module: Any) -> bool:
    """``_comm_hook`` of a module of FSDP1, which reduces in FSDP1's place."""
    return module._comm_hook is not None


@contextmanager
def summing_flat(modules: Sequence[Any]) -> Generator[None]:
    """While it is open, FSDP1 sums: ``_gradient_predivide_factor`` and ``_gradient_postdivide_factor`` are 1."""
    factors = [(module._gradient_predivide_factor, module._gradient_postdivide_factor) for module in modules]
    try:
        for module in modules:
            module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0
        yield
    finally:
        for module, before in zip(modules, factors, strict=True):
            module._gradient_predivide_factor, module._gradient_postdivide_factor = before


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
    """While it is open, call ``note`` with a number before each gather and each reduction that FSDP1 begins."""
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
    return [group for module in modules for group in groups_of_state(module._get_fsdp_state())]


def fsdp_policy(module: Any) -> Any:
    """``_get_fsdp_state()._mp_policy``: the MixedPrecisionPolicy that fully_shard was given."""
    return module._get_fsdp_state()._mp_policy


def unsharded_parameter(parameter: Any) -> nn.Parameter | None:
    """``_unsharded_param`` of a parameter of a group; None before the first forward."""
    return getattr(parameter, "_unsharded_param", None)


def unsharded_parameters(group: Any) -> list[nn.Parameter]:
    """Return the unsharded parameters of a group; none before the first forward."""
    return [own for each in group.fsdp_params if (own := unsharded_parameter(each)) is not None]


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


def is_replicate_module(module: object) -> bool:
    """Return True for a module that was given to the replicate built on FSDP2, which has no public name."""
    return _is_of(module, "torch.distributed._composable.replicate_with_fsdp", "ReplicateModule")


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
        or any(accumulated_gradient(each) is not None for each in group.fsdp_params)
        or any(each.grad is not None for each in unsharded_parameters(group))
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
        for (place, name), own in zip(places, before, strict=True):
            setattr(place, name, own)
        for group in groups:
            vars(group).pop("post_backward", None)


def _places_of_dtype(group: Any) -> list[tuple[Any, str]]:
    """``_orig_dtype`` of a group; from torch 2.15 on ``sharded_grad_dtype`` of each parameter."""
    if hasattr(group, "_orig_dtype"):
        return [(group, "_orig_dtype")]
    return [(parameter, "sharded_grad_dtype") for parameter in group.fsdp_params]


def _reduce_in_one_dtype(group: Any, *given: Any) -> None:
    """Widen what the last microbatch alone has used, and what none has: FSDP2 reduces gradients of one dtype."""
    parameters = [each for each in group.fsdp_params if unsharded_parameter(each) is not None]
    if not parameters:  # no microbatch has used the group yet, which torch 2.13 does not expect where it casts
        return
    if group.reduce_grads and any(accumulated_gradient(each) is not None for each in parameters):
        for each in [each for each in parameters if accumulated_gradient(each) is None]:
            each.to_accumulated_grad_if_needed()
            if accumulated_gradient(each) is None and each._unsharded_param.requires_grad:
                zeros = torch.zeros_like(each._unsharded_param, dtype=each.reduce_dtype, requires_grad=False)
                each.unsharded_accumulated_grad = zeros
    type(group).post_backward(group, *given)


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
    own = [(group.post_forward_mesh_info, group.reshard_after_backward) for group in groups]
    try:
        for group in groups:
            group.post_forward_mesh_info, group.reshard_after_backward = None, frees
        yield
    finally:
        for group, before in zip(groups, own, strict=True):
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


def _unshard(group: Any, note: Callable[[], None], *given: Any, **named: Any) -> None:
    is_there = group._all_gather_result is not None or group.is_unsharded
    is_left_out = not group.unshard_in_backward and group._training_state.name == "PRE_BACKWARD"
    if not is_there and not is_left_out and getattr(group.mesh_info, "shard_mesh_size", 1) > 1:
        note()
    type(group).unshard(group, *given, **named)


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


# Pipelines


def run_schedule(schedule: Any, args: list[Any], kwargs: list[Any], *, backward: bool) -> None:
    """``_step_microbatches`` of a schedule, which gives the loss each microbatch's number for a target."""
    schedule._has_backward = backward
    schedule._step_microbatches(args, kwargs, list(range(len(args))), None, False)


def agreement_of_stages() -> tuple[type, str, Callable[..., Any]]:
    """Return the class and the method with which stages tell each other that they know all shapes, and a silent one."""
    from torch.distributed.pipelining import schedules, stage

    schedule: Any = cast(Any, schedules)._PipelineSchedule
    for name in ("_warmup_p2p", "_initialize_pipeline_distributed_state"):  # the second since torch 2.15
        if hasattr(schedule, name):
            return schedule, name, _know_shapes
    base: Any = cast(Any, stage)._PipelineStageBase
    if not hasattr(base, "_get_init_p2p_neighbors_ops"):
        raise _lacking("a plan of a pipeline", "_PipelineSchedule._warmup_p2p")
    return base, "_get_init_p2p_neighbors_ops", _send_nothing  # torch 2.11


def _know_shapes(schedule: object, stages: Iterable[Any], *unused: object) -> None:
    from torch.distributed.pipelining import stage

    for each in stages:
        each._inference_mode = cast(Any, stage).InferenceMode.STATIC


def _send_nothing(stage: object) -> list[Any]:
    return []


def messages_of_stages() -> tuple[Any, str]:
    """Return the module and the function that send and receive between stages: a list of operations → of works."""
    from torch.distributed.pipelining import schedules

    return schedules, "_batch_p2p"


check_torch()
