"""Messages and norms say where their tensors are, whatever torch.set_default_device says."""

import pytest
import torch
from torch import nn

from megabatch.wrappers import gradients
from tests.exact.launch import of_ranks


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
found = of_ranks("tests.unit.default_device:run_job", dict.fromkeys((1, 2), JOBS))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("job", JOBS)
def test_messages_and_sums_over_ranks(found, job: str, world: int) -> None:
    assert found(job, world) == ["right"] * world
