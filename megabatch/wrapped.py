"""What a wrapped model must be for its gradients to be summed exactly; everything else is refused, with the reason."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import PlanError

AVERAGING_HOOKS = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)


def refuse_unknown(model: nn.Module) -> None:
    """Refuse a wrapper that is not known, or one that hides inside the model."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, DistributedDataParallel):
            raise PlanError(
                f"{name!r} inside the model is a DDP wrapper; give that wrapper itself, or wrap the whole model"
            )
        if isinstance(module, nn.DataParallel) or hasattr(module, "no_sync"):
            raise PlanError(
                f"unknown wrapper {kind}; expected a plain model, DistributedDataParallel, "
                "or a model that FSDP2's fully_shard has wrapped"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise PlanError(
                f"parameter {name!r} is a DTensor that FSDP2 does not manage; shard the model with fully_shard"
            )


def check_hooks(ddp: DistributedDataParallel) -> None:
    """Refuse what makes DDP do something else than average in the parameter's dtype."""
    if cast(Any, ddp).mixed_precision is not None:
        raise PlanError(
            "DDP's mixed_precision is not supported; use torch.autocast in the loss, or bfloat16 parameters"
        )
    for hook, _ in cast(Any, ddp)._comm_hooks:
        if hook not in AVERAGING_HOOKS:
            known = ", ".join(each.__name__ for each in AVERAGING_HOOKS)
            raise PlanError(
                f"DDP has the communication hook {hook.__name__!r}; only hooks known to average are exact: {known}"
            )


def check_buckets(ddp: DistributedDataParallel, num_trainable: int) -> None:
    """Refuse where DDP reduces other parameters than those that are trained."""
    num_reduced = cast(Any, ddp)._get_ddp_logging_data()["num_parameter_tensors"]
    if num_reduced != num_trainable:
        raise PlanError(
            f"{num_trainable} parameters require a gradient but DDP reduces {num_reduced}; freeze and unfreeze before "
            "DistributedDataParallel(model), and let it ignore none that is trained"
        )


def check_precision(modules: list[FSDPModule], trainable: dict[str, nn.Parameter]) -> None:
    """Refuse where FSDP2 would accumulate gradients in a coarser dtype than the parameters'."""
    own = {parameter.dtype for parameter in trainable.values()}
    for module in modules:
        policy = cast(Any, module)._get_fsdp_state()._mp_policy
        used = policy.reduce_dtype or policy.param_dtype
        if used is not None and any(torch.finfo(used).eps > torch.finfo(dtype).eps for dtype in own):
            raise PlanError(
                f"FSDP2 would accumulate and reduce gradients in {used}, coarser than the parameters; "
                "give MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )


def fsdp_mesh(trainable: dict[str, nn.Parameter]) -> DeviceMesh:
    """The one mesh over which FSDP2 reduces every trainable parameter: (shard) or (replicate, shard)."""
    meshes: list[DeviceMesh] = []
    for name, parameter in trainable.items():
        if not isinstance(parameter.data, DTensor):
            raise PlanError(
                f"parameter {name!r} is not sharded, so FSDP2 would leave its gradient unreduced; call fully_shard on "
                "the root too, and reshard() after an evaluation"
            )
        replicas_then_shards = all(isinstance(each, Replicate) for each in parameter.data.placements[:-1])
        if not (replicas_then_shards and isinstance(parameter.data.placements[-1], Shard)):
            raise PlanError(
                f"parameter {name!r} is placed as {parameter.data.placements}; only FSDP2's own sharding is supported"
            )
        meshes.append(parameter.data.device_mesh)
    if any(mesh != meshes[0] for mesh in meshes):
        raise PlanError("the model's parameters are sharded over different meshes; use one mesh for all")
    return meshes[0]
