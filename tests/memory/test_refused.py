"""A refused simulation is one line, and leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megabatch import JointLoss, LossContractError, PlanError
from megabatch.pipeline import Pipeline
from megabatch.simulate import Simulated, simulate
from tests.unit.failures.table import names


def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return (model(batch) ** 2).sum(), len(batch)


def linear(mesh: Any = None) -> nn.Module:
    return nn.Linear(3, 3)


def small(make_model: Callable[[Any], Any] = linear, loss_fn: Any = squares, **options: Any) -> Simulated:
    return simulate(make_model, lambda model: torch.optim.SGD(model.parameters()), lambda: torch.zeros(2, 3), loss_fn,
                    **options)  # fmt: skip


def looks(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return squares(model, batch)[0], int(batch.sum().item())


def chooses(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return squares(model, batch[batch.sum(1).nonzero()[:, 0]])


def grouped(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    ends = torch.tensor([2], dtype=torch.int32)
    return squares(model, torch.nn.functional.grouped_mm(batch, torch.zeros(1, 3, 3), offs=ends))


def detached(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return squares(model, batch)[0].detach(), 2


def hidden(mesh: Any) -> nn.Module:
    """DDP has been made of a real model, which the fake process group allows."""
    return nn.Sequential(DistributedDataParallel(nn.Linear(3, 3)))


def piped(mesh: Any) -> nn.Module:
    def shape(batch: Tensor) -> Tensor:
        return torch.empty(len(batch), 3, device="meta")

    return Pipeline([linear()], mesh, boundary=shape, output=shape)


FAILURES: dict[str, tuple[Callable[[], object], str]] = {  # what is asked -> what the error names
    "a joint loss": (
        lambda: small(loss_fn=JointLoss(lambda model, batch: batch, lambda batch: (batch.sum(), 1))), "JointLoss",
    ),
    "experts in float32": (lambda: small(loss_fn=grouped), "another dtype than bfloat16 … --model.dtype=bfloat16"),
    "no model": (lambda: small(lambda mesh: None), "NoneType … expected a torch.nn.Module"),
    "a compiled model": (lambda: small(lambda mesh: torch.compile(linear())), "is compiled … leave compile out"),
    "a layer that is compiled": (lambda: small(compiled), "is compiled … leave compile out"),
    "DDP": (lambda: small(hidden, axes={"dp": 2}), "DistributedDataParallel … megabatch.simulate.Replica"),
    "FSDP1": (
        lambda: small(lambda mesh: FullyShardedDataParallel(linear(), device_id=torch.device("cpu")), axes={"dp": 2}),
        "FSDP1 … fully_shard",
    ),
    "code that looks at numbers": (lambda: small(loss_fn=looks), "aten._local_scalar_dense … give code"),
    "shapes that depend on numbers": (lambda: small(loss_fn=chooses), "aten.nonzero … give code"),
    "a device that is not known": (lambda: small(device="abacus"), "'abacus' … name one of a100-40g"),
    "a rank that is not there": (lambda: small(axes={"dp": 2}, rank=2), "rank is 2 … give one from 0 to 1"),
    "a pipeline beside another model": (
        lambda: small(lambda mesh: [piped(mesh), linear()], axes={"pp": 2}), "one of several models; simulate it alone",
    ),
    "a loss that does not call its pipeline": (
        lambda: small(piped, axes={"pp": 2}, loss_fn=lambda model, batch: (batch.sum(), 1)),
        "the loss returned without calling the model … call it once",
    ),
    "no ranks": (lambda: small(axes={"dp": 0}), "mesh axis 'dp' is 0 … must be a whole number"),
    "an axis that is not known": (lambda: small(axes={"data": 2}), "'data'; expected one of dp"),
    "a sync that is not known": (lambda: small(sync="sometimes"), "'sometimes'; expected one of auto"),
    "a sync of some microbatches": (lambda: small(sync="every:4"), "'every:4' … give 'last'"),
    "no microbatch": (lambda: small(num_microbatches=0), "num_microbatches is 0 … must be a whole number"),
    "a negative norm": (lambda: small(max_norm=-1.0), "max_norm is -1.0; expected a positive number"),
}  # fmt: skip


def compiled(mesh: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].compile()
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAILURES)
def test_refused_in_one_line(name: str) -> None:
    provoke, seen = FAILURES[name]
    with pytest.raises(PlanError) as caught:
        provoke()
    assert names(str(caught.value), seen), str(caught.value)
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()


def test_a_loss_without_a_gradient_is_told_as_ever() -> None:
    with pytest.raises(LossContractError, match="no total of the loss carries a gradient"):
        small(loss_fn=detached)
