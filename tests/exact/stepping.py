"""The optimizer's step in the last backward beside the step afterwards: jobs that train one model in both ways."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, Learner, PlanError, losses
from tests.exact import models

NUM_UPDATES = 2
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=True),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
    ]


def new_model(dtype: str) -> nn.Module:
    """A language model in a dtype; "wide" is bfloat16, whose gradients are to be added in float32."""
    return models.gpt2(torch.bfloat16 if dtype == "wide" else getattr(torch, dtype))


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "plain":
        return model
    shape = (2, 2) if wrapper == "hsdp" else (dist.get_world_size(),)
    names = ("dp_replicate", "dp_shard") if wrapper == "hsdp" else ("dp",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    shard: Callable[..., nn.Module] = replicate if wrapper == "replicate" else fully_shard
    is_double = next(model.parameters()).dtype == torch.float64
    policy = MixedPrecisionPolicy(reduce_dtype=None if is_double else torch.float32)
    for block in models.blocks(model):
        shard(block, mesh=mesh, mp_policy=policy)
    return shard(model, mesh=mesh, mp_policy=policy)


def samples(rank: int, update: int) -> list[dict[str, Tensor]]:
    """Uneven lengths and, over ranks, numbers: some run dummy microbatches."""
    generator = torch.Generator().manual_seed(100 * update + rank)
    lengths = [int(each) for each in torch.randint(3, 12, (5 + rank,), generator=generator)]
    ids = [torch.randint(0, models.VOCABULARY, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


class Trained:
    """A model that has been trained, and what was seen on the way."""

    def __init__(self, model: nn.Module, optimizer: str, sync: str, wide: bool, in_backward: bool, rank: int) -> None:
        self.model = model
        self.optimizer = OPTIMIZERS[optimizer](two_groups(model))
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + step))
        gradient = GradientAccumulator(
            model, micro_batch_size=2, sync=sync, accumulate_dtype=torch.float32 if wide else None
        )
        if in_backward:
            gradient.step_in_backward(self.optimizer)
        learner = Learner(model, self.optimizer, gradient, scheduler=scheduler)
        for update in range(NUM_UPDATES):
            learner.forward_backward(samples(rank, update), losses.next_token)
            self.is_free = all(parameter.grad is None for parameter in model.parameters())
            assert learner.optim_step().finite
        self.state = learner.state_dict()

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and what the optimizer keeps, whole."""
        kept = {
            f"{name}.{what}": value
            for name, values in self.state["optimizer"]["state"].items()
            for what, value in values.items()
            if isinstance(value, Tensor)
        }
        found = dict(self.model.named_parameters()) | kept
        return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in found.items()}


def run_job(name: str) -> dict[str, Any]:
    """The job "wrapper:sync:optimizer:dtype", or "refused:wrapper"."""
    if name.startswith("refused:"):
        return {"said": refused(name.removeprefix("refused:"))}
    wrapper, sync, optimizer, dtype = name.split(":")
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo
        made = new_model(dtype)
        trained = [
            Trained(wrap(copy.deepcopy(made), wrapper), optimizer, sync, dtype == "wide", in_backward, rank)
            for in_backward in (False, True)
        ]
    after, inside = (each.tensors() for each in trained)
    assert after.keys() == inside.keys()
    assert len(after) > len(list(made.parameters()))
    return {
        "different": [each for each in after if not torch.equal(after[each], inside[each])],
        "moved": any(not torch.equal(each, inside[name]) for name, each in made.named_parameters()),
        "free": [each.is_free for each in trained],
    }


def refused(wrapper: str) -> str:
    """The error of a model whose gradient is whole only after the backward."""
    model = models.integer_model("tokens")
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    try:
        GradientAccumulator(model, micro_batch_size=1).step_in_backward(torch.optim.SGD(model.parameters()))
    except PlanError as error:
        return str(error)
    return "nothing"
