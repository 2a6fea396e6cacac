"""Tests that need a GPU: an update makes the host wait nowhere, and its gradient is that of the CPU."""

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, Update, losses
from megabatch.inspection.tree import to_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU, and torch's CPU never waits")
LENGTHS = (3, 9, 5, 12, 4, 7, 2)


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a beta feature
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def model_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 40)).to(dtype)


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(40, (length,), generator=generator) for length in LENGTHS]
    return [{"input_ids": each, "labels": each} for each in texts]


def gradients(model: nn.Module) -> list[Tensor]:
    gradient = GradientAccumulator(model, max_microbatch_tokens=24)
    gradient.forward_backward(samples()[:3], losses.next_token)
    gradient.forward_backward(samples()[3:], losses.next_token)
    gradient.finalize(max_norm=1.0)
    return [each.grad for each in model.parameters() if each.grad is not None]


def test_the_gradient_is_that_of_the_cpu() -> None:
    model = model_of(torch.float64)
    there = gradients(copy.deepcopy(model).cuda())
    for mine, expected in zip(there, gradients(model), strict=True):
        assert float((mine.cpu() - expected).norm() / expected.norm()) <= 1e-12


def test_the_bfloat16_hook_of_ddp_rounds_and_nothing_else() -> None:  # torch's CPU does not take it
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = model_of(torch.float64)
        ddp = DistributedDataParallel(copy.deepcopy(model).cuda())
        ddp.register_comm_hook(None, bf16_compress_hook)
        for mine, expected in zip(gradients(ddp), gradients(model), strict=True):
            assert float((mine.cpu() - expected).norm() / expected.norm()) <= 2.0**-7
    finally:
        dist.destroy_process_group()


def test_the_host_does_not_wait(request: pytest.FixtureRequest) -> None:
    model = model_of(torch.float32).cuda()
    gradients(model)  # what is made once may wait
    request.getfixturevalue("waiting_is_an_error")
    gradients(model)


def test_a_copy_does_not_wait(waiting_is_an_error: None) -> None:
    ids = torch.arange(1 << 20).view(1 << 10, -1)
    images = torch.rand(4, 3, 64, 64).to(memory_format=torch.channels_last)
    microbatch = {"turned": ids.T, "places": ids[:1].expand(1 << 10, -1), "some": ids[:, ::100], "images": images}
    moved = to_device(microbatch, torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("default")
    for name, value in microbatch.items():
        assert torch.equal(moved[name].cpu(), value)
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)


def run_loop(model: nn.Module, spoil: float = 1.0) -> Update:
    """Microbatches of a loop that is not megabatch's, with weights that only the device knows."""
    gradient = GradientAccumulator(model)
    for index, sample in enumerate(samples()):
        tokens = to_device(sample, torch.device("cuda"))["input_ids"]
        with gradient.microbatch(index, of=len(LENGTHS), mean_over=(tokens >= 0).sum() - 1) as part:
            (part.scale(cross_entropy(model(tokens[:-1]), tokens[1:])) * spoil).backward()
    return gradient.finalize(max_norm=1.0)


def test_the_host_does_not_wait_for_a_loop_of_the_users(request: pytest.FixtureRequest) -> None:
    model = model_of(torch.float64)
    there = copy.deepcopy(model).cuda()
    run_loop(there)
    request.getfixturevalue("waiting_is_an_error")
    update = run_loop(there)
    torch.cuda.set_sync_debug_mode("default")
    assert update.finite
    for mine, expected in zip(there.parameters(), gradients(model), strict=True):
        assert float((mine.grad.cpu() - expected).norm() / expected.norm()) <= 1e-12


def test_a_scaled_loss_that_is_changed_is_reported() -> None:
    update = run_loop(model_of(torch.float64).cuda(), spoil=0.5)
    assert not update.finite
    assert "multiplied after scale()" in str(update.problem())
