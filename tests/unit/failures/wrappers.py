"""Wrappers and meshes that the library cannot be exact with; in a process group of one rank."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import MegabatchError, PlanError, losses, verify
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares

AXES = "dp, dp_replicate, dp_shard, cp, tp, pp, ep"
UNKNOWN = (
    "unknown wrapper {}; expected a plain model, DistributedDataParallel, FSDP1, "
    "or a model that FSDP2's fully_shard or its replicate has wrapped"
)
CHANGED = (
    "parameters were frozen, unfrozen, added or replaced since the GradientAccumulator was made; make a new one "
    "(and wrap the model anew) after such a change"
)
UNKNOWN_HOOK = (
    "DDP has the communication hook 'powerSGD_hook', which is not known to average over its ranks; leave it out, or "
    "register allreduce_hook or bf16_compress_hook of torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
)
DDP_PASSED_BY = (
    "the loss did not call the DDP model with gradients on, so no gradient was reduced; call the model that it is "
    "given, not model.module"
)
UNSHARDED = (
    "parameter '{}' is not sharded, so FSDP2 would leave its gradient unreduced; call fully_shard on the root too, "
    "and reshard() after an evaluation"
)


def mesh(*axes: str) -> DeviceMesh:
    return init_device_mesh("cpu", (1,) * len(axes), mesh_dim_names=axes)


def layers() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FSDP1 is old, and has no accelerator here
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True, **options)


def fsdp1_that_ignores() -> nn.Module:
    model = layers()
    return fsdp1(model, ignored_modules=[model[1]])


def fsdp1_in_bfloat16() -> nn.Module:
    return fsdp1(linear(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))


def composed_ddp() -> nn.Module:
    return replicate(linear(), device_mesh=mesh("dp"))


def ddp_with_hook() -> nn.Module:
    ddp = DistributedDataParallel(linear())
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    return ddp


def ddp_with_mixed_precision() -> nn.Module:
    from torch.nn.parallel.distributed import _MixedPrecision

    return DistributedDataParallel(linear(), mixed_precision=_MixedPrecision(param_dtype=torch.bfloat16))


def ddp_inside() -> nn.Module:
    return nn.Sequential(linear(), DistributedDataParallel(linear()))


def root_left_out() -> nn.Module:
    model = layers()
    fully_shard(model[0], mesh=mesh("dp"))
    return model


def unsharded() -> nn.Module:
    model = fully_shard(linear(), mesh=mesh("dp"))
    model.unshard()
    return model


def sharded_over_two_meshes() -> nn.Module:
    model = layers()
    fully_shard(model[0], mesh=mesh("dp"))
    fully_shard(model[1], mesh=mesh("dp_replicate", "dp_shard"))
    return model


def hsdp_and_fsdp2() -> list[nn.Module]:
    return [
        fully_shard(linear(), mesh=mesh("dp_replicate", "dp_shard")),
        fully_shard(linear(), mesh=mesh("dp")),
    ]


def sharded_by_hand() -> nn.Module:
    model = linear()
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh("dp")))
    return model


def hook_registered_later() -> None:
    ddp = DistributedDataParallel(linear())
    gradient = accumulator(ddp)
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    gradient.forward_backward(SAMPLES, squares)


def unfrozen_after_ddp() -> nn.Module:
    model = layers()
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    return ddp


def exchanged_after_ddp() -> nn.Module:
    """As many parameters are trained as were, and others."""
    model = layers()
    model[1].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)
    return ddp


def unfrozen_later(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = layers()
    model[0].requires_grad_(False)
    gradient = accumulator(wrap(model))
    gradient.forward_backward(SAMPLES, squares)
    gradient.finalize()
    model[0].requires_grad_(True)
    gradient.forward_backward(SAMPLES, squares)


def joined() -> None:
    ddp = DistributedDataParallel(linear())
    gradient = accumulator(ddp)
    with ddp.join():
        gradient.forward_backward(SAMPLES, squares)


def ddp_passed_by(num_models: int = 1, *, teacher: bool = False) -> None:
    """The gradient goes past the last model's wrapper; a teacher's forward without gradients goes through it."""
    models = [DistributedDataParallel(linear()) for _ in range(num_models)]

    def loss_fn(_: Any, microbatch: Any) -> Any:
        if teacher:
            with torch.no_grad():
                models[-1](microbatch["x"])
        called = [*models[:-1], models[-1].module]
        return sum(squares(each, microbatch)[0] for each in called), len(microbatch["x"])

    accumulator(models if num_models > 1 else models[0]).forward_backward(SAMPLES, loss_fn)


def reduced_in_bfloat16() -> nn.Module:
    return fully_shard(linear(), mesh=mesh("dp"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def language_model() -> Any:
    config = AutoConfig.for_model(
        "llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def tensor_parallel_ends(*, tied_again: bool = False) -> nn.Module:
    """Each end is replaced by a parameter of its own."""
    model, plan = language_model(), {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    parallelize_module(model, mesh("dp", "tp")["tp"], plan)
    if tied_again:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def sharded_ends(*, together: bool) -> nn.Module:
    model = language_model()
    ends = [model.model.embed_tokens, model.lm_head]
    for each in [ends] if together else ends[:1]:
        fully_shard(each, mesh=mesh("dp"))
    return fully_shard(model, mesh=mesh("dp"))


def torchscript() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is old
        return torch.jit.script(linear())


def unnamed() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


UNTIED = (
    "the config says tie_word_embeddings, but sharding has made two parameters of the input and the output embeddings, "
    "each with a part of the gradient; set config.tie_word_embeddings = False before the model is made, or shard it so "
    "that both stay one parameter"
)
TORCHSCRIPT = (
    "the model is a TorchScript module, which takes no hooks to watch its forward; give the "
    "torch.nn.Module that it was made of, under torch.compile if you like"
)
FAILURES = {
    "tied embeddings that tensor parallelism unties": Failure(
        PlanError, UNTIED, lambda: accumulator(tensor_parallel_ends(), mesh=mesh("dp", "tp"))
    ),
    "tied embeddings that FSDP2 unties": Failure(
        PlanError, UNTIED, lambda: accumulator(sharded_ends(together=False))
    ),
    "TorchScript": Failure(PlanError, TORCHSCRIPT, lambda: accumulator(torchscript())),
    "TorchScript in DDP": Failure(
        PlanError, TORCHSCRIPT, lambda: accumulator(DistributedDataParallel(torchscript()))
    ),
    "DataParallel": Failure(
        PlanError, UNKNOWN.format("DataParallel"), lambda: accumulator(nn.DataParallel(linear()))
    ),
    "FSDP1 that ignores a layer": Failure(
        PlanError,
        "parameter '1.weight' is ignored by FSDP1, which would leave its gradient unreduced; freeze it, or take it "
        "out of ignored_modules",
        lambda: accumulator(fsdp1_that_ignores()),
    ),
    "FSDP1 that reduces in bfloat16": Failure(
        PlanError,
        "FSDP1 would accumulate and reduce gradients in torch.bfloat16, coarser than the parameters; leave "
        "MixedPrecision out, or shard with fully_shard and MixedPrecisionPolicy(reduce_dtype=torch.float32)",
        lambda: accumulator(fsdp1_in_bfloat16()),
    ),
    "the replicate that is built on DDP": Failure(
        PlanError,
        "the model was given to torch.distributed._composable.replicate, which is built on DDP; wrap with "
        "DistributedDataParallel(model), or with replicate of torch.distributed._composable.replicate_with_fsdp",
        lambda: accumulator(composed_ddp()),
    ),
    "HSDP beside FSDP2": Failure(
        PlanError,
        "the models need different sync policies, replica_last and every; wrap all alike",
        lambda: accumulator(hsdp_and_fsdp2()),
    ),
    "an unknown mesh axis": Failure(
        PlanError, f"unknown mesh axis 'data'; expected one of {AXES}", lambda: accumulator(mesh=mesh("data"))
    ),
    "a mesh without names": Failure(
        PlanError, f"the mesh has no axis names; name its axes, from {AXES}", lambda: accumulator(mesh=unnamed())
    ),
    "DDP with a communication hook": Failure(
        PlanError,
        UNKNOWN_HOOK,
        lambda: accumulator(ddp_with_hook()),
    ),
    "DDP with mixed_precision": Failure(
        PlanError,
        "DDP's mixed_precision is not supported; use torch.autocast in the loss, or bfloat16 parameters",
        lambda: accumulator(ddp_with_mixed_precision()),
    ),
    "DDP with a hook registered later": Failure(
        PlanError,
        UNKNOWN_HOOK,
        hook_registered_later,
    ),
    "DDP before unfreezing": Failure(
        PlanError,
        "4 parameters require a gradient but DDP reduces 2; freeze and unfreeze before "
        "DistributedDataParallel(model), and let it ignore none that is trained",
        lambda: accumulator(unfrozen_after_ddp()),
    ),
    "exchanged after DDP": Failure(
        PlanError,
        "a parameter that requires a gradient did not when the model was wrapped, and DDP does not reduce it; freeze "
        "and unfreeze before DistributedDataParallel(model), and let it ignore none that is trained",
        lambda: accumulator(exchanged_after_ddp()),
    ),
    "DDP.join": Failure(
        PlanError,
        "DDP.join() is open, in which ranks that are out of data add zeros for what they had accumulated; leave it "
        "out: ranks may have any number of samples, none too",
        joined,
    ),
    "DDP passed by": Failure(
        MegabatchError,
        DDP_PASSED_BY,
        ddp_passed_by,
    ),
    "DDP passed by, a teacher through it": Failure(MegabatchError, DDP_PASSED_BY, lambda: ddp_passed_by(teacher=True)),
    "DDP passed by, two models": Failure(
        MegabatchError, DDP_PASSED_BY, lambda: ddp_passed_by(num_models=2, teacher=True)
    ),
    "unfrozen later": Failure(PlanError, CHANGED, lambda: unfrozen_later(lambda model: model)),
    "unfrozen later, FSDP2": Failure(
        PlanError, CHANGED, lambda: unfrozen_later(lambda model: fully_shard(model, mesh=mesh("dp")))
    ),
    "FSDP2 that reduces in bfloat16": Failure(
        PlanError,
        "FSDP2 would accumulate and reduce gradients in torch.bfloat16, coarser than the parameters; "
        "give MixedPrecisionPolicy(reduce_dtype=torch.float32)",
        lambda: accumulator(reduced_in_bfloat16()),
    ),
    "DDP inside the model": Failure(
        PlanError,
        "'1' inside the model is wrapped with DistributedDataParallel; give that wrapper itself, or wrap the whole "
        "model",
        lambda: accumulator(ddp_inside()),
    ),
    "FSDP2 without the root": Failure(
        PlanError, UNSHARDED.format("1.weight"), lambda: accumulator(root_left_out())
    ),
    "FSDP2 left unsharded": Failure(PlanError, UNSHARDED.format("weight"), lambda: accumulator(unsharded())),
    "FSDP2 over two meshes": Failure(
        PlanError,
        "the model's parameters are sharded over different meshes; use one mesh for all",
        lambda: accumulator(sharded_over_two_meshes()),
    ),
    "a parameter sharded by hand": Failure(
        PlanError,
        "parameter 'weight' is a DTensor over the mesh axes ('dp',) that no wrapper manages; name the axis of tensor "
        "parallelism 'tp', and shard over data axes with fully_shard",
        lambda: accumulator(sharded_by_hand()),
    ),
    "verify a model of FSDP1": Failure(
        PlanError,
        "verify was given a model of FSDP1, of which it cannot make a copy; verify the model before that is done",
        lambda: verify(fsdp1(linear()), losses.mse, SAMPLES),
    ),
}  # fmt: skip
