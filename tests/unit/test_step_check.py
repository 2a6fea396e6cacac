"""`verify_step` accepts steps that are those of one process, and names those that are not."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from megabatch.errors import PlanError
from megabatch.optim import LowBits, Muon, split_parameters, verify_step
from tests.exact.launch import of_ranks


class ByNorm(optim.SGD):
    """A step of length lr for each parameter, LARS-like."""

    is_of_shards = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    values = each.grad.to_local() if self.is_of_shards and hasattr(each, "to_local") else each.grad
                    norm: Any = values.norm()
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    each.add_(each.grad / float(norm), alpha=-group["lr"])


class ByNormOfShards(ByNorm):
    """The planted bug: each rank takes the norm of what it has."""

    is_of_shards = True


class ByRank(optim.SGD):
    """The planted bug: a rate that depends on the rank."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1 + dist.get_rank()
        super().step()


def muon(model: nn.Module) -> Muon:
    matrices, others = split_parameters(model)
    return Muon(matrices, optim.AdamW(others))


def scheduled(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    LambdaLR(optimizer, lambda step: 1 / (1 + step))  # wraps its step
    return optimizer


MAKE: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "AdamW": lambda model: optim.AdamW(model.parameters(), foreach=True),
    "AdamW fused": lambda model: optim.AdamW(model.parameters(), fused=True),
    "SGD": scheduled,
    "Adagrad": lambda model: optim.Adagrad(model.parameters()),
    "low bits": lambda model: LowBits(optim.AdamW(model.parameters())),
    "Muon": muon,
    "torch's Muon": lambda model: optim.Muon([each for each in model.parameters() if each.ndim == 2]),
    "by norm": lambda model: ByNorm(model.parameters(), 0.1),
    "by norm of shards": lambda model: ByNormOfShards(model.parameters(), 0.1),
    "by rank": lambda model: ByRank(model.parameters(), 0.1),
}
WRONG = {  # name → what a cause says
    "AdamW fused": "in their last digits: AdamW is elementwise, and rounds by the size of a shard; leave fused=",
    "torch's Muon": "Muon computes something over a parameter of which each rank has a shard",
    "by norm of shards": "ByNormOfShards computes something over a parameter of which each rank has a shard",
    "by rank": "ends with other bits on rank 1 than on rank 0",
}


def model_of(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(9, 37), nn.Linear(37, 11), nn.Linear(11, 5)).to(dtype)


def job(name: str) -> list[Any]:
    """``"fsdp2 AdamW"``: what is found, and whether model and optimizer are what they were."""
    kind, _, name = name.partition(" ")
    model = model_of(torch.bfloat16 if name == "low bits" else torch.float32)
    wrapped: Any = DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "fsdp2":
        fully_shard(model)
    optimizer = MAKE[name](model)
    for each in model.parameters():
        each.grad = torch.full_like(each, 0.1)
    optimizer.step()  # there are states
    before = [whole(each).clone() for each in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    drawn = torch.get_rng_state()
    found = verify_step(model if kind == "fsdp2" else wrapped.module, optimizer)
    unchanged = all(map(torch.equal, map(whole, model.parameters()), before))
    unchanged &= str(state) == str(optimizer.state_dict()) and torch.equal(drawn, torch.get_rng_state())
    return [found.ok, found.is_bit_equal, found.worst, list(found.causes), unchanged]


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()


FSDP2 = [f"fsdp2 {name}" for name in MAKE if name != "by rank"]
CELLS = {2: ["ddp AdamW fused", "ddp by rank", "fsdp2 AdamW", "fsdp2 by norm of shards"], 3: FSDP2}
found = of_ranks(f"{__name__}:job", CELLS)


@pytest.mark.full
@pytest.mark.parametrize(("world", "name"), [(world, name) for world, names in CELLS.items() for name in names])
def test_steps_on_shards_are_accepted_or_named(found: Any, world: int, name: str) -> None:
    wrapper, _, kind = name.partition(" ")
    for ok, is_bit_equal, worst, causes, unchanged in found(name, world):
        assert unchanged
        if kind in WRONG and not (wrapper == "ddp" and "fused" in kind):
            assert not ok
            assert WRONG[kind] in causes[0]
            assert worst <= 1e-12 if "fused" in kind or kind == "by rank" else worst > 1e-3
        else:
            assert ok, causes
            assert is_bit_equal or kind == "by norm"
            assert worst <= 1e-12


def test_a_plain_model_steps_as_itself() -> None:
    model = model_of(torch.float32)
    for name in ("AdamW fused", "SGD", "Muon", "by norm"):
        result = verify_step(model, MAKE[name](model))
        assert (result.ok, result.is_bit_equal) == (True, True)
    assert str(result) == "exact: 3 optimizer steps are bit-equal to one process"


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="AdamW has no parameter of the model; give the model that it steps"):
        verify_step(model_of(torch.float32), MAKE["AdamW"](model_of(torch.float32)))


def test_an_optimizer_that_cannot_be_copied_is_refused() -> None:
    model = model_of(torch.float32)
    optimizer: Any = MAKE["AdamW"](model)
    optimizer.lock = threading.Lock()
    with pytest.raises(PlanError, match=r"AdamW cannot be copied \(.*lock.*\); verify_step steps copies"):
        verify_step(model, optimizer)
