"""What a wrapped model must be for its gradients to be summed exactly; everything else is refused, with the reason."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry  # pyright: ignore[reportPrivateUsage]
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.batching.padding import with_config
from megabatch.errors import PlanError
from megabatch.wrappers.precision import WideGradients, check_reduction, refuse_float16


def refuse_unknown(model: nn.Module) -> None:
    """Refuse a wrapper that is not known, or one that hides inside the model."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise PlanError(
                f"{name!r} inside the model is wrapped with {kind}; give that wrapper itself, or wrap the whole model"
            )
        if isinstance(module, nn.DataParallel) or hasattr(module, "no_sync"):
            raise PlanError(
                f"unknown wrapper {kind}; expected a plain model, DistributedDataParallel, FSDP1, "
                "or a model that FSDP2's fully_shard or its replicate has wrapped"
            )
        if "replicate" in (_get_registry(module) or {}) and not isinstance(module, FSDPModule):
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
    except (AttributeError, NotImplementedError):  # a model without them
        return
    first, last = (getattr(each, "weight", None) for each in ends)
    are_two = first is not last and first is not None and last is not None
    if are_two and any(isinstance(each, DTensor) and each.requires_grad for each in (first, last)):
        raise PlanError(
            "the config says tie_word_embeddings, but sharding has made two parameters of the input and the output "
            "embeddings, each with a part of the gradient; set config.tie_word_embeddings = False before the model is "
            "made, or shard it so that both stay one parameter"
        )


def check_dtensors(model: nn.Module) -> None:
    """Refuse DTensors that are spread over other axes than tp, whose gradients somebody else would have to sum."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and tuple(parameter.device_mesh.mesh_dim_names or ()) != ("tp",):
            raise PlanError(
                f"parameter {name!r} is a DTensor over the mesh axes {parameter.device_mesh.mesh_dim_names} that no "
                "wrapper manages; name the axis of tensor parallelism 'tp', and shard over data axes with fully_shard"
            )


def check_ddp_precision(ddp: DistributedDataParallel) -> None:
    """Refuse what makes DDP reduce in another dtype than the parameter's."""
    if cast(Any, ddp).mixed_precision is not None:
        raise PlanError(
            "DDP's mixed_precision is not supported; use torch.autocast in the loss, or bfloat16 parameters"
        )


def check_precision(modules: list[FSDPModule], trainable: list[nn.Parameter]) -> None:
    """Refuse where FSDP2 would accumulate gradients in a coarser dtype than the parameters'."""
    own = {parameter.dtype for parameter in trainable}
    for module in modules:
        policy = _policy(module)
        refuse_float16((f"FSDP2's {name}", getattr(policy, name)) for name in ("param_dtype", "reduce_dtype"))
        used = policy.reduce_dtype or policy.param_dtype
        if used is not None and any(torch.finfo(used).eps > torch.finfo(dtype).eps for dtype in own):
            raise PlanError(
                f"FSDP2 would accumulate and reduce gradients in {used}, coarser than the parameters; "
                "give MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )


def check_wide(modules: list[FSDPModule], wide: WideGradients, trainable: list[nn.Parameter]) -> None:
    """Refuse where FSDP2 would reduce in a coarser dtype than gradients are to be added in."""
    policies = map(_policy, modules)
    check_reduction(wide, trainable, [policy.reduce_dtype or policy.param_dtype for policy in policies])


def _policy(module: FSDPModule) -> MixedPrecisionPolicy:
    return cast(Any, module)._get_fsdp_state()._mp_policy
