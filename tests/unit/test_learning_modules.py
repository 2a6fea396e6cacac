"""One warning about modules that learn in their forward, and none about those that do not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, JointLoss, loss, verify

BATCH = {"x": torch.randn(6, 4, generator=torch.Generator().manual_seed(0))}


class Around(nn.Module):
    """A module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


class Codebook(nn.Module):
    """Codes that follow their inputs by a moving average, written in one of three ways."""

    def __init__(self, write: Callable[["Codebook", Tensor], None]) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("codes", torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        index = torch.cdist(x.detach(), self.codes).argmin(1)
        codes = self.codes[index]
        if self.training:
            self.write(self, x.detach().mean(0))
        return x + (codes - x).detach()


def in_place(module: Codebook, mean: Tensor) -> None:
    module.codes.mul_(0.9).add_(mean, alpha=0.1)


def past_autograd(module: Codebook, mean: Tensor) -> None:
    module.codes.data.lerp_(mean.expand(4, 4), 0.1)


def anew(module: Codebook, mean: Tensor) -> None:
    module.codes = module.codes * 0.9 + mean * 0.1


class Queue(nn.Module):
    """Negatives of earlier forwards, and the place of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("negatives", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.negatives[:2] = x.detach()[:2]
        self.place += 2
        return x + self.negatives.mean()


class Teacher(nn.Module):
    """A frozen copy that follows the trained layer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)
        return self.student(x) - self.teacher(x)


class Counting(nn.Module):
    """A count of forwards, and a cache that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("cache", torch.zeros(6), persistent=False)
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.cache[: len(x)] = 1.0
        return x * self.mask


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def squares(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return model(microbatch["x"]).square().sum(), len(microbatch["x"])


def other(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return squares(model, microbatch)


JOINT = JointLoss(lambda model, microbatch: model(microbatch["x"]), lambda output: (output.square().sum(), len(output)))


def texts_of(model: nn.Module, *losses: Any) -> list[str]:
    """Warnings of an update for each loss."""
    gradient = GradientAccumulator(model, micro_batch_size=3)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for loss_fn in losses:
            gradient.forward_backward(BATCH, loss_fn)
            gradient.finalize()
    return [str(each.message) for each in seen]


LEARNING: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(4),
    "batch norm without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "frozen weights, running statistics": lambda: nn.BatchNorm1d(4).requires_grad_(False),
    "codebook in place": lambda: Codebook(in_place),
    "codebook by data": lambda: Codebook(past_autograd),
    "codebook anew": lambda: Codebook(anew),
    "queue": Queue,
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", LEARNING)
def test_one_warning_names_the_module_and_the_remedies(name: str) -> None:
    model = Around(LEARNING[name]())
    texts = texts_of(model, squares, squares, other)
    assert len(texts) == 1
    assert "'inner' (" in texts[0]
    for remedy in ("eval()", "GroupNorm", "after finalize()"):
        assert remedy in texts[0]


def test_a_frozen_parameter_that_a_forward_writes() -> None:
    (text,) = texts_of(Around(Teacher()), squares, squares)
    assert "'inner.teacher' (Linear)" in text


def test_a_loss_that_couples_samples() -> None:
    (text,) = texts_of(Around(nn.BatchNorm1d(4)), JOINT, squares)
    assert "'inner' (BatchNorm1d)" in text


def test_many_modules_are_counted() -> None:
    (text,) = texts_of(Around(nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(7)))), squares)
    assert "'inner.3' (BatchNorm1d) and 3 more" in text


SILENT: dict[str, Callable[[], nn.Module]] = {
    "frozen batch norm": lambda: nn.BatchNorm1d(4).eval(),
    "frozen codebook": lambda: Codebook(in_place).eval(),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "counts and caches": Counting,
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    ),
    "dropout": lambda: nn.Dropout(0.1),
}


@pytest.mark.parametrize("name", SILENT)
def test_nothing_is_said_of_others(name: str) -> None:
    assert texts_of(Around(SILENT[name]()), squares, other, JOINT) == []


def test_in_a_loop_of_ones_own() -> None:
    gradient, texts = GradientAccumulator(Around(nn.BatchNorm1d(4))), []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for index in range(2):
                with gradient.microbatch(index, of=2, sum_over=6) as part:
                    part.scale(squares(gradient.model, BATCH)[0]).backward()
            gradient.finalize()
        texts.append(len(seen))
    assert texts == [1, 0]


def test_under_ddp_which_writes_the_buffers_of_one_rank_to_the_others(group_of_one) -> None:
    assert texts_of(DistributedDataParallel(Around(Counting())), squares) == []
    (text,) = texts_of(DistributedDataParallel(Around(nn.BatchNorm1d(4))), squares)
    assert "'inner' (BatchNorm1d)" in text


def test_verify_says_it_in_its_verdict() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "'inner'" in str(verify(Around(nn.BatchNorm1d(4)).double(), squares, {"x": BATCH["x"].double()}))
