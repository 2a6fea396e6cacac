"""Messages and norms say where their tensors are, whatever torch.set_default_device says."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, PlanError, loss
from megabatch.core import gradients
from tests.exact.launch import of_ranks


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def squares(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
    return (model(microbatch["x"]) ** 2).sum(), len(microbatch["x"])


class Table(nn.Module):
    """A sparse table that the first rank alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.ones(4, 1).double()), nn.Parameter(torch.ones(1).double())

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == 0:
            x = x + functional.embedding(x[:, 0].long(), self.table, sparse=True)
        return x * self.scale


def run_job(name: str) -> str:
    torch.manual_seed(dist.get_rank() if name == "differ" else 0)
    model: nn.Module = Table() if name == "sparse" else nn.Linear(1, 1).double()
    if name == "ddp":
        model = DistributedDataParallel(model)
    batch = {"x": torch.arange(3).double()[:, None]}
    with torch.device("meta"):
        try:
            gradient = GradientAccumulator(model, micro_batch_size=2)
        except PlanError as error:
            return "right" if "has other weights on rank 0 than on rank 1" in str(error) else str(error)
        gradient.forward_backward(batch, squares)
        update = gradient.finalize(max_norm=1.0)
    assert update.grad_norm is not None
    clipped = torch.stack([each.grad.to_dense().norm() for each in model.parameters() if each.grad is not None]).norm()
    torch.testing.assert_close(clipped, torch.minimum(update.grad_norm, clipped.new_ones(())), rtol=1e-5, atol=0)
    return "right"


@pytest.fixture
def _meta():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@pytest.mark.usefixtures("_meta")
def test_norm_and_clip_on_a_cpu() -> None:
    parameter = nn.Parameter(torch.ones(4, device="cpu"))
    assert gradients.total_norm([parameter]).device.type == "cpu"  # there is no gradient
    parameter.grad = torch.ones(4, device="cpu")
    assert float(gradients.clip_gradients([parameter], 1.0)) == 2.0
    assert float(gradients.total_norm([parameter])) == pytest.approx(1.0)


JOBS = ["plain", "ddp", "sparse", "differ"]
found = of_ranks(f"{__name__}:run_job", dict.fromkeys((1, 2), JOBS))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("job", JOBS)
def test_messages_and_sums_over_ranks(found, job: str, world: int) -> None:
    assert found(job, world) == ["right"] * world
