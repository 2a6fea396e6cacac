"""Wrappers and meshes that the library cannot be exact with; in a process group of one rank."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from megabatch import MegabatchError, losses, verify
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares

UNKNOWN = "unknown wrapper {}"
CHANGED = "GradientAccumulator"
UNKNOWN_HOOK = "DDP … 'powerSGD_hook'"
DDP_PASSED_BY = "DDP"
UNSHARDED = "'{}' … FSDP2"


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
    return [fully_shard(linear(), mesh=mesh("dp_replicate", "dp_shard")), fully_shard(linear(), mesh=mesh("dp"))]


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


UNTIED = "tie_word_embeddings"
TORCHSCRIPT = "TorchScript"
FAILURES = {
    "tied embeddings that tensor parallelism unties": Failure(
        UNTIED, lambda: accumulator(tensor_parallel_ends(), mesh=mesh("dp", "tp"))
    ),
    "tied embeddings that FSDP2 unties": Failure(UNTIED, lambda: accumulator(sharded_ends(together=False))),
    "TorchScript": Failure(TORCHSCRIPT, lambda: accumulator(torchscript())),
    "TorchScript in DDP": Failure(TORCHSCRIPT, lambda: accumulator(DistributedDataParallel(torchscript()))),
    "DataParallel": Failure(UNKNOWN.format("DataParallel"), lambda: accumulator(nn.DataParallel(linear()))),
    "FSDP1 that ignores a layer": Failure("'1.weight' … FSDP1", lambda: accumulator(fsdp1_that_ignores())),
    "FSDP1 that reduces in bfloat16": Failure("FSDP1 … torch.bfloat16", lambda: accumulator(fsdp1_in_bfloat16())),
    "the replicate that is built on DDP": Failure(
        "torch.distributed._composable.replicate … DDP", lambda: accumulator(composed_ddp())
    ),
    "HSDP beside FSDP2": Failure("replica_last", lambda: accumulator(hsdp_and_fsdp2())),
    "an unknown mesh axis": Failure("'data'", lambda: accumulator(mesh=mesh("data"))),
    "a mesh without names": Failure("no axis names", lambda: accumulator(mesh=unnamed())),
    "DDP with a communication hook": Failure(UNKNOWN_HOOK, lambda: accumulator(ddp_with_hook())),
    "DDP with mixed_precision": Failure("DDP … mixed_precision", lambda: accumulator(ddp_with_mixed_precision())),
    "DDP with a hook registered later": Failure(UNKNOWN_HOOK, hook_registered_later),
    "DDP before unfreezing": Failure("4 parameters … DDP … reduces 2", lambda: accumulator(unfrozen_after_ddp())),
    "exchanged after DDP": Failure("DDP", lambda: accumulator(exchanged_after_ddp())),
    "DDP.join": Failure("DDP … join()", joined),
    "DDP passed by": Failure(DDP_PASSED_BY, ddp_passed_by, MegabatchError),
    "DDP passed by, a teacher through it": Failure(DDP_PASSED_BY, lambda: ddp_passed_by(teacher=True), MegabatchError),
    "DDP passed by, two models": Failure(
        DDP_PASSED_BY, lambda: ddp_passed_by(num_models=2, teacher=True), MegabatchError
    ),
    "unfrozen later": Failure(CHANGED, lambda: unfrozen_later(lambda model: model)),
    "unfrozen later, FSDP2": Failure(
        CHANGED, lambda: unfrozen_later(lambda model: fully_shard(model, mesh=mesh("dp")))
    ),
    "FSDP2 that reduces in bfloat16": Failure("FSDP2 … torch.bfloat16", lambda: accumulator(reduced_in_bfloat16())),
    "DDP inside the model": Failure("'1' … DistributedDataParallel", lambda: accumulator(ddp_inside())),
    "FSDP2 without the root": Failure(UNSHARDED.format("1.weight"), lambda: accumulator(root_left_out())),
    "FSDP2 left unsharded": Failure(UNSHARDED.format("weight"), lambda: accumulator(unsharded())),
    "FSDP2 over two meshes": Failure("over different meshes", lambda: accumulator(sharded_over_two_meshes())),
    "a parameter sharded by hand": Failure("'weight' … 'dp'", lambda: accumulator(sharded_by_hand())),
    "verify a model of FSDP1": Failure("FSDP1", lambda: verify(fsdp1(linear()), losses.mse, SAMPLES)),
}
