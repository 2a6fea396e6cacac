"""The README is true: its five minutes run as they stand, and its before and after give the same gradient."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megabatch
from megabatch import GradientAccumulator, losses
from megabatch.batching.samples import pad_right

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BEFORE, AFTER, FIVE_MINUTES, OWN_LOSS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def process_group():
    """A group of this process alone, for the all_reduce of the hand-written loop."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build() -> torch.nn.Module:
    """A model in float64, the same each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)).double()


def make_batch() -> list[dict[str, torch.Tensor]]:
    """Samples of uneven lengths, some labels masked."""
    torch.manual_seed(1)
    samples: list[dict[str, torch.Tensor]] = []
    for length in range(3, 30):
        ids = torch.randint(64, (length,))
        samples.append({"input_ids": ids, "labels": torch.where(torch.arange(length) < length // 3, -100, ids)})
    return samples


def gradients_of(code: str, **names: Any) -> list[torch.Tensor]:
    """Run a snippet of the README for one update and keep the gradients that the optimizer saw."""
    model = build()
    seen: list[torch.Tensor] = []

    class Recorder(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            seen.extend(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)

    optimizer = Recorder(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    exec(code, {"model": model, "optimizer": optimizer, "scheduler": schedule, "torch": torch, **names})
    return seen


def cross_entropy_sum(model: torch.nn.Module, microbatch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What the hand-written loop takes for granted."""
    logits = model(microbatch["input_ids"])[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), microbatch["labels"][:, 1:].flatten(), reduction="sum")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")  # the recorder does not step
def test_before_and_after_give_the_same_gradient(process_group: None) -> None:
    hand_written = {"world_size": 1, "cross_entropy_sum": cross_entropy_sum, "collate": pad_right}
    before = gradients_of(
        BEFORE.replace("model.no_sync()", "contextlib.nullcontext()"),
        **hand_written, batch=make_batch(), contextlib=contextlib, dist=dist,
    )  # fmt: skip
    after = gradients_of(AFTER, GradientAccumulator=GradientAccumulator, losses=losses, loader=[make_batch()])
    assert len(before) == len(after) == 3
    for one, other in zip(before, after, strict=True):
        assert torch.linalg.vector_norm(one - other) <= 1e-14 * torch.linalg.vector_norm(one)


def test_five_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    exec(FIVE_MINUTES, {})
    printed = capsys.readouterr().out
    assert printed.startswith("exact: worst relative error of a gradient")
    fallen = [float(value) for value in re.findall(r"^loss (\d+\.\d+)", printed, re.MULTILINE)]
    assert len(fallen) > 5
    assert fallen[-1] < fallen[0] - 0.5
    assert "padding" in printed


def test_a_loss_of_your_own() -> None:
    names: dict[str, Any] = {"megabatch": megabatch}
    exec(OWN_LOSS, names)
    model = torch.nn.Linear(3, 2).double()
    batch = {"inputs": torch.randn(5, 3).double(), "labels": torch.randn(5, 2).double()}
    assert megabatch.verify(model, names["absolute_error"], batch).ok
