"""Checks that a wrapped model's gradients can be summed exactly; everything else is refused, with the reason.

There are checks of this rank's model, of what another library has done to it, and of whether ranks hold one model.

Models that Accelerate has prepared are not refused: each is a plain model, DDP, FSDP1 or FSDP2, with a forward that
casts. Accelerate's own accumulation is in ``accelerator.backward``, which is not called. Its DataLoader deals batches
to ranks once more and repeats samples to fill the last: give it none that `UpdateSampler` serves.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import PlanError
from megabatch.inspection.mesh_axes import is_expert
from megabatch.inspection.model_facts import input_embeddings, output_embeddings, text_config_of, with_config
from megabatch.torch_private.autograd import hooks_after_grad
from megabatch.torch_private.classes import is_dtensor, is_fsdp1, is_fsdp2
from megabatch.torch_private.module_members import forward_pre_hooks, is_given_to_replicate

# Packages that put hooks of their own on a model, which reduce or divide its gradients.
REDUCING = {
    "deepspeed": "DeepSpeed reduces gradients and divides them by its own gradient_accumulation_steps; give a model "
    "that deepspeed.initialize has not seen, wrapped with fully_shard or DistributedDataParallel",
    "apex": "apex reduces gradients in every backward; give the model that it wraps, in torch's "
    "DistributedDataParallel",
}
# Module of the closures of `Dispatch`.
DISPATCHING = "transformers.distributed.expert_parallel"


def refuse_unknown(model: nn.Module) -> None:
    """Refuse a wrapper that is not known, or one that hides inside the model."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if is_outer_wrapper(module):
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


def is_outer_wrapper(module: nn.Module) -> bool:
    """Return True for DDP and FSDP1, which are modules around the model."""
    return isinstance(module, DistributedDataParallel) or is_fsdp1(module)


def refuse_torchscript(model: nn.Module) -> None:
    """Refuse a model that takes no hooks."""
    for module in (model, getattr(model, "module", None)):
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                "the model is a TorchScript module, which takes no hooks to watch its forward; give the "
                "torch.nn.Module that it was made of, under torch.compile if you like"
            )


def check_tied(model: nn.Module) -> None:
    """Refuse embeddings of a transformers model that are to be one parameter and were sharded as two."""
    inner = with_config(model)
    config = getattr(inner, "config", None)
    configs = config, text_config_of(config)
    if not any(getattr(candidate, "tie_word_embeddings", False) is True for candidate in configs):
        return
    first = getattr(input_embeddings(inner), "weight", None)
    last = getattr(output_embeddings(inner), "weight", None)
    if first is last or first is None or last is None:
        return
    if any(weight.requires_grad for weight in filter(is_dtensor, (first, last))):
        raise PlanError(
            "the config says tie_word_embeddings, but sharding has made two parameters of the input and the output "
            "embeddings, each with a part of the gradient; set config.tie_word_embeddings = False before the model is "
            "made, or shard it so that both stay one parameter"
        )


def check_dtensors(model: nn.Module) -> None:
    """Refuse DTensors that are spread over other axes than tp, whose gradients somebody else would have to sum."""
    for name, parameter in model.named_parameters():
        if is_beyond_tp(parameter):
            raise PlanError(
                f"parameter {name!r} is a DTensor over the mesh axes {parameter.device_mesh.mesh_dim_names} that no "
                "wrapper manages; name the axis 'ep' if it deals out experts to ranks that see different samples, and "
                "'tp' if its ranks share samples, and shard over data axes with fully_shard"
            )


def is_beyond_tp(tensor: Tensor) -> TypeGuard[Any]:
    """Return True for a DTensor over other axes than tp."""
    return is_dtensor(tensor) and tuple(tensor.device_mesh.mesh_dim_names or ()) != ("tp",)


class Dispatch(NamedTuple):
    """The closure by which transformers brings tokens to the experts of a module, in the place of its forward.

    `copy.deepcopy` does not copy closures, so that a copy would run the experts of the original.
    ``name`` is that of the module, and ``parameters`` are the names of its experts.
    """

    name: str
    style: Any
    implementation: Any
    parameters: list[str]


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


def refuse_foreign(model: nn.Module) -> None:
    """Raise `PlanError` for a model, or a part of one, on whose gradients another library works. Imports none."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        for kind in type(module).__mro__:
            if (package := _package_of(kind)) in REDUCING and _wraps(module):
                raise PlanError(f"{where} is a {kind.__name__} of {package}; {REDUCING[package]}")
        for hook in _hooks(module):
            if (package := _package_of(hook)) in REDUCING:
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


def _package_of(definition: object) -> str:
    """Return the package that a class or a function is of."""
    return str(getattr(definition, "__module__", None)).partition(".")[0]


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks before a module's forward, and the hooks after the gradients of its own parameters."""
    yield from forward_pre_hooks(module).values()
    for parameter in module.parameters(recurse=False):
        yield from hooks_after_grad(parameter)
