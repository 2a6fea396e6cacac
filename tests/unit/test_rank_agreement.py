"""Ranks that hold different models or settings are all told so, in the same words, when they make their accumulator."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megabatch import GradientAccumulator, PlanError
from megabatch.pipeline.stages import Pipeline
from tests.exact.launch import of_ranks
from tests.tiers import full_unless

ALIKE = "nothing"


def is_odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def layers(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)).to(dtype)


def frozen(number: int, model: nn.Sequential | None = None) -> nn.Sequential:
    model = model or layers()
    model[number].requires_grad_(False)
    return model


def changed(parameter: nn.Parameter, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    if is_odd():
        parameter.data = make(parameter.data)


def permuted() -> nn.Module:
    """The same numbers, in other places."""
    model = layers()
    changed(model[1].weight, lambda data: data.flip(0))
    return model


def one_bit(dtype: torch.dtype) -> nn.Module:
    model = layers(dtype=dtype)
    changed(model[2].bias, lambda data: data * (1 + 2 * torch.finfo(dtype).eps))
    return model


def in_other_memory() -> nn.Module:
    """The same weights behind other strides."""
    model = layers()
    changed(model[1].weight, lambda data: data.T.contiguous().T)
    return model


def complex_layers() -> nn.Module:
    return layers(seed=int(is_odd()), dtype=torch.complex128)


def empty() -> nn.Module:
    model = layers()
    model.register_parameter("empty", nn.Parameter(torch.empty(0, dtype=torch.float64)))
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))
    return model


class Checkpointed(nn.Module):
    """Its first layer runs again in the backward, where memory is short."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.layers[0]
        return self.layers[1:](checkpoint(first, x, use_reentrant=False) if is_odd() else first(x))


def mesh(*axes: str) -> Any:
    return init_device_mesh("cpu", (1,) * (len(axes) - 1) + (dist.get_world_size(),), mesh_dim_names=axes)


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh("dp"))


def fsdp1(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FSDP1 is old, and has no accelerator here
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def tensor_parallel(*axes: str, seed: int = 0) -> dict[str, Any]:
    model = parallelize_module(layers(seed=seed), mesh(*axes)["tp"], {"0": ColwiseParallel()})
    return {"model": model, "mesh": mesh(*axes)}


def stages() -> nn.Module:
    """Every rank holds another stage, of other weights and another size."""
    along = mesh("dp", "pp")
    model = nn.Linear(4, 4 + along.get_local_rank("pp"))
    return Pipeline([model], along, boundary=lambda x: x, output=lambda x: x)


MODELS: dict[str, Callable[[], Any]] = {
    "other seeds": lambda: layers(seed=int(is_odd())),
    "other seeds, bfloat16": lambda: layers(seed=int(is_odd()), dtype=torch.bfloat16),
    "other seeds, complex": complex_layers,
    "permuted": permuted,
    "one bit, float64": lambda: one_bit(torch.float64),
    "one bit, bfloat16": lambda: one_bit(torch.bfloat16),
    "other layers frozen": lambda: frozen(int(is_odd())),
    "frozen parts of other size": lambda: frozen(2 * is_odd()),
    "another dtype": lambda: layers(dtype=torch.float32 if is_odd() else torch.float64),
    "another shape": lambda: nn.Linear(4, 3 if is_odd() else 2),
    "a layer more": lambda: layers().append(nn.Linear(1, 1)) if is_odd() else layers(),
    "another name": lambda: nn.ModuleDict({"odd" if is_odd() else "even": nn.Linear(4, 1)}),
    "a frozen part of other weights": lambda: frozen(0, layers(seed=int(is_odd()))),
    "a frozen model of other weights": lambda: [layers(), layers(seed=int(is_odd())).requires_grad_(False)],
    "the second model of other weights": lambda: [layers(), layers(seed=int(is_odd()))],
    "tensor parallel, other seeds": lambda: tensor_parallel("tp", "dp", seed=int(is_odd())),
    "DDP, other layers frozen": lambda: DistributedDataParallel(frozen(int(is_odd()))),
    "FSDP2, other layers frozen": lambda: fsdp2(frozen(int(is_odd()))),
    "FSDP1, other layers frozen": lambda: fsdp1(frozen(int(is_odd()))),
    "sync": lambda: {"model": DistributedDataParallel(layers()), "sync": "every" if is_odd() else "last"},
    "sync, FSDP2": lambda: {"model": fsdp2(layers()), "sync": "every" if is_odd() else "last"},
    "accumulate_dtype": lambda: {
        "model": layers(dtype=torch.bfloat16), "accumulate_dtype": torch.float32 if is_odd() else None,
    },
    "alike": layers,
    "alike, empty and without dimensions": empty,
    "alike, other strides": in_other_memory,
    "alike, checkpointed": Checkpointed,
    "alike, compiled on one rank": lambda: torch.compile(layers()) if is_odd() else layers(),
    "alike, several": lambda: [layers(), layers(seed=1), layers(seed=2).requires_grad_(False)],
    "alike, other names of one policy": lambda: {
        "model": DistributedDataParallel(layers()), "sync": "auto" if is_odd() else "last",
    },
    "alike, other sizes of microbatches": lambda: {"model": layers(), "micro_batch_size": 1 + is_odd()},
    "alike, DDP broadcasts": lambda: DistributedDataParallel(layers(seed=int(is_odd()))),
    "alike, FSDP2": lambda: fsdp2(layers()),
    "alike, FSDP1": lambda: fsdp1(layers()),
    "alike, a frozen model that is sharded": lambda: [fsdp2(layers()), fsdp2(layers(seed=1)).requires_grad_(False)],
    "alike, tensor parallel over all": lambda: tensor_parallel("dp", "tp"),
    "alike, tensor parallel": lambda: tensor_parallel("tp", "dp"),
    "alike, stages": stages,
}  # fmt: skip


def run_job(name: str) -> str:
    """The error of this rank when it makes its accumulator."""
    made = MODELS[name]()
    settings = made if isinstance(made, dict) else {"model": made}
    try:
        GradientAccumulator(**{"micro_batch_size": 2, **settings})
    except PlanError as error:
        return str(error)
    return ALIKE


pytestmark = pytest.mark.slow
SEEN = {  # in the error on every rank, beside the numbers of the ranks
    "other seeds": "parameter '0.weight' has other weights on rank 0",
    "other seeds, bfloat16": "parameter '0.weight' has other weights on rank 0",
    "other seeds, complex": "parameter '0.weight' has other weights on rank 0",
    "permuted": "parameter '1.weight' has other weights on rank 0",
    "one bit, float64": "parameter '2.bias' has other weights on rank 0",
    "one bit, bfloat16": "parameter '2.bias' has other weights on rank 0",
    "other layers frozen": "parameter '0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "frozen parts of other size": "parameter '0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "another dtype": "parameter '0.weight' is (4, 4) torch.float64 trained on rank 0, and ",
    "another shape": "parameter 'weight' is (2, 4) torch.float32 trained on rank 0, and ",
    "a layer more": "a further parameter is missing on rank 0, and parameter '3.weight' is (1, 1) torch.float32",
    "another name": "parameter 'even.weight' is (1, 4) torch.float32 trained on rank 0, and parameter 'odd.weight' is",
    "a frozen part of other weights": "parameter '0.weight' has other weights on rank 0",
    "a frozen model of other weights": "model 1's parameter '0.weight' has other weights on rank 0",
    "the second model of other weights": "model 1's parameter '0.weight' has other weights on rank 0",
    "tensor parallel, other seeds": "parameter '0.weight' has other weights on rank 0",
    "DDP, other layers frozen": "parameter 'module.0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "FSDP2, other layers frozen": "parameter '0.weight' is (4, 4) torch.float64 frozen on rank 0, and ",
    "FSDP1, other layers frozen": "parameter '0.weight' is sharded torch.float64 frozen on rank 0",
    "sync": "sync is 'last' on rank 0, and sync is 'every' on rank",
    "sync, FSDP2": "sync is 'last' on rank 0, and sync is 'every' on rank",
    "accumulate_dtype": "accumulate_dtype is None on rank 0, and accumulate_dtype is torch.float32 on rank",
}


told = of_ranks(f"{__name__}:run_job", dict.fromkeys((2, 3), MODELS))


@pytest.mark.parametrize("world", full_unless([2, 3], lambda _, world: world == 2))
@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_are_told_the_same(told, name: str, world: int) -> None:
    found = told(name, world)
    assert found == found[:1] * world
    if name.startswith("alike"):
        assert found[0] == ALIKE
    else:
        assert SEEN[name] in found[0]
        assert f"on rank {world - 1}" in found[0]
