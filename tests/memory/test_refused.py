"""What cannot be simulated is refused in one line, and leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megabatch import JointLoss, LossContractError, PlanError
from megabatch.simulate import Simulated, simulate

DATA = (
    "what is run looks at the contents of a tensor ({}), and a simulation has none; give code whose shapes follow from "
    "shapes (experts by grouped_mm, no .item(), no nonzero)"
)


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


def detached(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return squares(model, batch)[0].detach(), 2


def hidden(mesh: Any) -> nn.Module:
    """DDP has been made of a real model, which the fake process group allows."""
    return nn.Sequential(DistributedDataParallel(nn.Linear(3, 3)))


FAILURES: dict[str, tuple[Callable[[], object], str]] = {
    "a joint loss": (
        lambda: small(loss_fn=JointLoss(lambda model, batch: batch, lambda batch: (batch.sum(), 1))),
        "a JointLoss needs the representations of other ranks, which are not there; simulate encode",
    ),
    "no model": (
        lambda: small(lambda mesh: None),
        "make_model returned a NoneType; expected a torch.nn.Module, or a list of them",
    ),
    "a compiled model": (
        lambda: small(lambda mesh: torch.compile(linear())),
        "the model is compiled, and what a compiler fuses cannot be simulated; leave compile out",
    ),
    "a layer that is compiled": (
        lambda: small(compiled),
        "the model is compiled, and what a compiler fuses cannot be simulated; leave compile out",
    ),
    "DDP": (
        lambda: small(hidden, axes={"dp": 2}),
        "DistributedDataParallel's reducer cannot run on fake tensors; wrap with megabatch.simulate.Replica, which "
        "takes its arguments",
    ),
    "FSDP1": (
        lambda: small(lambda mesh: FullyShardedDataParallel(linear(), device_id=torch.device("cpu")), axes={"dp": 2}),
        "FSDP1 cannot be simulated; shard with FSDP2's fully_shard",
    ),
    "code that looks at numbers": (
        lambda: small(loss_fn=looks), DATA.format("DataDependentOutputException: aten._local_scalar_dense.default"),
    ),
    "shapes that depend on numbers": (
        lambda: small(loss_fn=chooses), DATA.format("DynamicOutputShapeException: aten.nonzero.default"),
    ),
    "a device that is not known": (
        lambda: small(device="abacus"),
        "the device 'abacus' is not known; name one of a100-40g, a100-80g, h100-80g, h200, b200, l40s, rtx4090, cpu, "
        "a100, h100",
    ),
    "no ranks": (
        lambda: small(axes={"dp": 0}),
        "the size of mesh axis 'dp' is 0; it counts things and must be a whole number of at least 1",
    ),
    "an axis that is not known": (
        lambda: small(axes={"data": 2}),
        "unknown mesh axis 'data'; expected one of dp, dp_replicate, dp_shard, cp, tp, pp, ep",
    ),
    "a sync that is not known": (
        lambda: small(sync="sometimes"), "sync is 'sometimes'; expected one of auto, last, every, replica_last",
    ),
    "no microbatch": (
        lambda: small(num_microbatches=0),
        "num_microbatches is 0; it counts things and must be a whole number of at least 1",
    ),
    "a negative norm": (lambda: small(max_norm=-1.0), "max_norm is -1.0; expected a positive number"),
    "one microbatch, read as three": (
        lambda: small().at(3), "1 microbatches were run, which do not tell of 3; simulate with num_microbatches=3",
    ),
    "two microbatches, read as one": (
        lambda: small(num_microbatches=2).at(1),
        "2 microbatches were run, which do not tell of 1; simulate with num_microbatches=1",
    ),
}  # fmt: skip


def compiled(mesh: Any) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].compile()
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAILURES)
def test_refused_in_one_line(name: str) -> None:
    provoke, text = FAILURES[name]
    with pytest.raises(PlanError) as caught:
        provoke()
    assert str(caught.value) == text
    assert not dist.is_initialized()


def test_a_loss_without_a_gradient_is_told_as_ever() -> None:
    with pytest.raises(LossContractError, match="no total of the loss carries a gradient"):
        small(loss_fn=detached)
