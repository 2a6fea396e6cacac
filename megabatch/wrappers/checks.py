"""Checks that a wrapped model's gradients can be summed exactly; everything else is refused, with the reason.

There are checks of this rank's model, of what another library has done to it, and of whether ranks hold one model.

Models that Accelerate has prepared are not refused: each is a plain model, DDP, FSDP1 or FSDP2, with a forward that
casts. Accelerate's own accumulation is in ``accelerator.backward``, which is not called. Its DataLoader deals batches
to ranks once more and repeats samples to fill the last: give it none that `UpdateSampler` serves.
"""

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from megabatch.batching.padding import with_config
from megabatch.errors import PlanError
from megabatch.torch_private.autograd import hooks_after_grad
from megabatch.torch_private.classes import is_dtensor, is_fsdp1, is_fsdp2
from megabatch.torch_private.fsdp2_groups import fsdp_policy
from megabatch.torch_private.module_members import forward_pre_hooks, is_given_to_replicate
from megabatch.torch_private.operations import is_traceable_wrapper_subclass
from megabatch.wrappers.base import Wrapper, local
from megabatch.wrappers.gradients import WideGradients, check_reduction, refuse_float16
from megabatch.wrappers.mesh import is_expert

# Packages that put hooks of their own on a model, which reduce or divide its gradients.
REDUCING = {
    "deepspeed": "DeepSpeed reduces gradients and divides them by its own gradient_accumulation_steps; give a model "
    "that deepspeed.initialize has not seen, wrapped with fully_shard or DistributedDataParallel",
    "apex": "apex reduces gradients in every backward; give the model that it wraps, in torch's "
    "DistributedDataParallel",
}
DISPATCHING = "transformers.distributed.expert_parallel"  # module of the closures of `Dispatch`
Facts = list[tuple[str, str]]  # what a fact is about, and what it says, as shown in an error
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
TRANSPARENT = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # what wrappers add to names
CHUNK = 2**20  # elements; bounds the memory of a checksum


def refuse_unknown(model: nn.Module) -> None:
    """Refuse a wrapper that is not known, or one that hides inside the model."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel) or is_fsdp1(module):
            raise PlanError(
                f"{name!r} inside the model is wrapped with {kind}; give that wrapper itself, or wrap the whole model"
            )
        if isinstance(module, nn.DataParallel) or hasattr(module, "no_sync"):
            raise PlanError(
                f"unknown wrapper {kind}; expected a plain model, DistributedDataParallel, FSDP1, "
                "or a model that FSDP2's fully_shard or its replicate has wrapped"
            )
        if is_given_to_replicate(module) and not is_fsdp2(module):
            raise PlanError(
                "the model was given to torch.distributed._composable.replicate, which is built on DDP; wrap with "
                "DistributedDataParallel(model), or with replicate of torch.distributed._composable.replicate_with_fsdp"
            )


def refuse_torchscript(model: nn.Module) -> None:
    """Refuse a model that takes no hooks."""
    for module in (model, getattr(model, "module", None)):  # DDP's own
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                "the model is a TorchScript module, which takes no hooks to watch its forward; give the "
                "torch.nn.Module that it was made of, under torch.compile if you like"
            )


def check_tied(model: nn.Module) -> None:
    """Refuse embeddings of a transformers model that are to be one parameter and were sharded as two."""
    inner = with_config(model)
    config = getattr(inner, "config", None)
    text = getattr(config, "get_text_config", None)
    configs = [config, text() if callable(text) else None]
    if not any(getattr(each, "tie_word_embeddings", False) is True for each in configs):
        return
    try:
        ends = inner.get_input_embeddings(), inner.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # not of transformers, or of images and the like
        return
    first, last = (getattr(end, "weight", None) for end in ends)
    are_two = first is not last and first is not None and last is not None
    if are_two and any(is_dtensor(each) and each.requires_grad for each in (first, last)):
        raise PlanError(
            "the config says tie_word_embeddings, but sharding has made two parameters of the input and the output "
            "embeddings, each with a part of the gradient; set config.tie_word_embeddings = False before the model is "
            "made, or shard it so that both stay one parameter"
        )


def check_dtensors(model: nn.Module) -> None:
    """Refuse DTensors that are spread over other axes than tp, whose gradients somebody else would have to sum."""
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter) and tuple(parameter.device_mesh.mesh_dim_names or ()) != ("tp",):
            raise PlanError(
                f"parameter {name!r} is a DTensor over the mesh axes {parameter.device_mesh.mesh_dim_names} that no "
                "wrapper manages; name the axis 'ep' if it deals out experts to ranks that see different samples, and "
                "'tp' if its ranks share samples, and shard over data axes with fully_shard"
            )


class Dispatch(NamedTuple):
    """The closure by which transformers brings tokens to the experts of a module, in the place of its forward.

    `copy.deepcopy` does not copy closures, so that a copy would run the experts of the original.
    """

    name: str  # of the module in its model
    style: Any  # `EpDispatchExpertsParallel`
    implementation: Any  # `EPImplementation`
    parameters: list[str]  # those of experts


def find_dispatches(model: nn.Module) -> Iterator[Dispatch]:
    """Yield transformers' closures around the modules of experts that ranks have dealt out."""
    for name, module in model.named_modules():
        variables = _variables_of_dispatch(vars(module).get("forward"))
        experts = [key for key, parameter in module.named_parameters(recurse=False) if is_dtensor(parameter)]
        if experts and "implementation" in variables:
            yield Dispatch(name, variables["self"], variables["implementation"], experts)


def _variables_of_dispatch(forward: Any) -> Mapping[str, Any]:
    """Return the variables of transformers' closure around a forward; none if it is another forward."""
    closure: Any = inspect.unwrap(forward)
    is_dispatch = getattr(closure, "__module__", None) == DISPATCHING
    return inspect.getclosurevars(closure).nonlocals if is_dispatch else {}


def check_ddp_precision(ddp: DistributedDataParallel) -> None:
    """Refuse what makes DDP reduce in another dtype than the parameter's."""
    if cast(Any, ddp).mixed_precision is not None:
        raise PlanError(
            "DDP's mixed_precision is not supported; use torch.autocast in the loss, or bfloat16 parameters"
        )


def check_precision(modules: Sequence[Any], trainable: list[nn.Parameter]) -> None:
    """Refuse where FSDP2 would accumulate gradients in a coarser dtype than the parameters'."""
    own = {parameter.dtype for parameter in trainable}
    for module in modules:
        policy = fsdp_policy(module)
        refuse_float16((f"FSDP2's {name}", getattr(policy, name)) for name in ("param_dtype", "reduce_dtype"))
        used = policy.reduce_dtype or policy.param_dtype
        if used is not None and any(torch.finfo(used).eps > torch.finfo(dtype).eps for dtype in own):
            raise PlanError(
                f"FSDP2 would accumulate and reduce gradients in {used}, coarser than the parameters; "
                "give MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )


def check_wide(modules: Sequence[Any], wide: WideGradients, trainable: list[nn.Parameter]) -> None:
    """Refuse where FSDP2 would reduce in a coarser dtype than gradients are to be added in."""
    policies = map(fsdp_policy, modules)
    check_reduction(wide, trainable, [policy.reduce_dtype or policy.param_dtype for policy in policies])


def refuse_foreign(model: nn.Module) -> None:
    """Raise `PlanError` for a model, or a part of one, on whose gradients another library works. Imports none."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        for kind in type(module).__mro__:
            if (package := kind.__module__.partition(".")[0]) in REDUCING and _wraps(module):
                raise PlanError(f"{where} is a {kind.__name__} of {package}; {REDUCING[package]}")
        for hook in _hooks(module):
            package = str(getattr(hook, "__module__", None)).partition(".")[0]
            if package in REDUCING:
                raise PlanError(f"{where} has hooks of {package}; {REDUCING[package]}")
    for dispatch in find_dispatches(model):
        _refuse_dispatch(model, dispatch)


def _refuse_dispatch(model: nn.Module, dispatch: Dispatch) -> None:
    """Refuse tokens that are sent twice to an expert, or from ranks that are not known to see different samples."""
    if _variables_of_dispatch(dispatch.implementation.experts_forward):
        raise PlanError(
            f"tokens are sent twice to the experts of {dispatch.name!r}, which gives wrong outputs; call "
            "apply_expert_parallelism once on a model, and not at all after distributed_config="
        )
    expert: Any = model.get_submodule(dispatch.name).get_parameter(dispatch.parameters[0])
    if not is_expert(expert) and not dispatch.implementation.shares_batch:
        raise PlanError(
            f"the experts of {dispatch.name!r} take tokens of different samples along "
            f"{expert.device_mesh.mesh_dim_names}; name the axis of their ranks 'ep', or give apply_expert_parallelism "
            "their mesh as tp_mesh= too if these ranks share samples"
        )


def _wraps(module: nn.Module) -> bool:
    """Return True for a wrapper, and False for a layer of the same library."""
    return isinstance(getattr(module, "module", None), nn.Module)


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks before a module's forward, and the hooks after the gradients of its own parameters."""
    yield from forward_pre_hooks(module).values()
    for parameter in module.parameters(recurse=False):
        yield from hooks_after_grad(parameter)


def check_rank_agreement(wrapper: Wrapper, policy: str, accumulate_dtype: torch.dtype | None, planner: str) -> None:
    """Raise `PlanError` on all ranks where ranks that sum one gradient differ in model or settings. Collective.

    Ranks along tp and pp hold other parts of the model, so each is compared with those of the same coordinates there.
    The weights of DDP, which broadcasts them, and of sharded models are not looked at.
    """
    ranks = wrapper.ranks
    if ranks.num_weighing == 1:
        return
    settings: Facts = [("sync", repr(policy)), ("accumulate_dtype", str(accumulate_dtype)), ("planner", planner)]
    facts = settings + _structure(wrapper.models)
    weights = _checksums(wrapper.models)
    seen = ranks.exchange_numbers([_digest(facts), _digest(weights)])
    starts = range(0, ranks.num_all, ranks.num_weighing)  # the first row of each tp and pp coordinate
    if all(seen[i] == seen[start] for start in starts for i in range(start, start + ranks.num_weighing)):
        return
    told: list[tuple[int, Facts, Facts]] = ranks.exchange_objects((dist.get_rank(), facts, weights))
    for start in starts:
        first, *others = told[start : start + ranks.num_weighing]
        for other in others:
            _compare(first, other)


def _compare(one: tuple[int, Facts, Facts], other: tuple[int, Facts, Facts]) -> None:
    """Raise `PlanError` for the first fact in which two ranks differ."""
    missing = ("a further parameter", "missing")
    for a, b in zip_longest(one[1], other[1], fillvalue=missing):
        if a != b:
            raise PlanError(
                f"ranks sum the gradients of different models or settings: {a[0]} is {a[1]} on rank {one[0]}, and "
                f"{b[0]} is {b[1]} on rank {other[0]}; make the model, freeze it and choose sync, accumulate_dtype and "
                "planner alike on all ranks"
            )
    for a, b in zip(one[2], other[2], strict=True):  # of the same parameters
        if a != b:
            raise PlanError(
                f"{a[0]} has other weights on rank {one[0]} than on rank {other[0]}, and no wrapper broadcasts them; "
                "seed all ranks alike before the model is made, load one checkpoint on all, or wrap the model with "
                "DistributedDataParallel"
            )


def _structure(models: Sequence[nn.Module]) -> Facts:
    return [
        (name, f"{_shape(parameter, model)} {parameter.dtype} {'trained' if parameter.requires_grad else 'frozen'}")
        for name, parameter, model in _parameters(models)
    ]


def _shape(parameter: Tensor, model: nn.Module) -> str:
    """Return the whole shape. It is unknown for FSDP1, whose parameters are pieces of a flat one."""
    is_piece = any(map(is_fsdp1, model.modules()))
    is_lazy = isinstance(parameter, UninitializedParameter)  # whose shape comes with the first forward
    return "sharded" if is_piece else "lazy" if is_lazy else str(tuple(parameter.shape))


def _checksums(models: Sequence[nn.Module]) -> Facts:
    """Compute a checksum of each parameter that every rank holds itself. Wait once for each device."""
    whole = [model for model in models if not any(map(_is_wrapper, model.modules()))]
    sums: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter, _ in _parameters(whole):
            pieces = [checksum(each) for each in _local_tensors(parameter)]
            if pieces:
                sums[name] = torch.stack([piece.to(pieces[0].device) for piece in pieces]).sum()
        by_device: dict[torch.device, list[str]] = {}
        for name, each in sums.items():
            by_device.setdefault(each.device, []).append(name)
        numbers = {
            name: number
            for names in by_device.values()
            for name, number in zip(names, torch.stack([sums[each] for each in names]).tolist(), strict=True)
        }
    return [(name, str(numbers[name])) for name in sums]


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) or is_fsdp1(module) or is_fsdp2(module)


def _parameters(models: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for number, model in enumerate(models):
        prefix = f"model {number}'s " if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            parts = [part for part in name.split(".") if part not in TRANSPARENT]
            yield f"{prefix}parameter {'.'.join(parts)!r}", parameter, model


def _local_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield this rank's plain tensors that must be equal on data ranks. Yield nothing for a meta tensor."""
    if is_dtensor(tensor) and tuple(tensor.device_mesh.mesh_dim_names or ()) != ("tp",):
        return  # a frozen model that is sharded over ranks which see different samples
    tensor = local(tensor.detach())
    if is_traceable_wrapper_subclass(tensor):  # a quantized tensor, say, of several plain ones
        for name in cast(Any, tensor).__tensor_flatten__()[0]:
            if isinstance(inner := getattr(tensor, name), Tensor):
                yield from _local_tensors(inner)
    elif tensor.layout == torch.strided and not tensor.is_meta:
        yield tensor


def checksum(tensor: Tensor) -> Tensor:
    """Sum the bits as integers, each times an odd number by position, in int64: no order of adding rounds."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().reshape(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    odd = torch.arange(
        1, 2 * CHUNK if len(bits) > CHUNK else 2 * len(bits) + 1, 2, dtype=torch.int64, device=bits.device
    )
    for number, chunk in enumerate(bits.split(CHUNK)):
        total += (chunk * odd[: len(chunk)]).sum() * (2 * number + 1)
    return total


def _digest(facts: Facts) -> float:
    """48 bits of a hash, which float64 holds exactly."""
    return float(int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=6).digest(), "big"))
