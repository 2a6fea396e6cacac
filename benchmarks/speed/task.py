"""Task: what a contestant is given, and the meter that watches it from outside."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from benchmarks.speed.model import Sample
from benchmarks.speed.setting import Setting


@dataclass(frozen=True)
class Mark:
    """What had been used when an update ended, on this rank."""

    seconds: float
    cpu_seconds: float
    num_forwards: int
    num_tokens: int  # that went through the model, padding included
    num_collectives: int


@dataclass
class Meter:
    """Notes a mark at each step of the optimizer; contestants do not know of it."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    seen: list[Any] = field(default_factory=list)  # collectives, where somebody counts them
    keep_gradients: bool = False
    marks: list[Mark] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)  # of each update, as the optimizer saw them
    sizes: list[int] = field(default_factory=list)  # tokens of each forward

    def __post_init__(self) -> None:
        self.model.get_input_embeddings().register_forward_pre_hook(self._forward)
        self.optimizer.register_step_post_hook(self._step)

    def begin(self) -> None:
        """The first update begins now; called again, the next one does."""
        self.marks[-1:] = [self._now()]

    def _forward(self, module: nn.Module, inputs: tuple[Tensor]) -> None:
        self.sizes.append(inputs[0].numel())

    def _step(self, *_: Any) -> None:
        self.marks.append(self._now())
        if self.keep_gradients:
            self.gradients.append([cast_out(parameter.grad) for parameter in self.model.parameters()])

    def _now(self) -> Mark:
        return Mark(time.perf_counter(), time.process_time(), len(self.sizes), sum(self.sizes), len(self.seen))

    def collectives(self) -> dict[str, int]:
        """Of the last update, by kind."""
        start, stop = (mark.num_collectives for mark in self.marks[-2:])
        return dict(Counter(kind for kind, _ in self.seen[start:stop]))


def cast_out(gradient: Tensor | None) -> Tensor:
    """A copy; an update without a gradient is no update here."""
    assert gradient is not None
    return gradient.detach().clone()


@dataclass
class Task:
    """Train on the samples in their order, `update_size` an update over all ranks, with this model and optimizer."""

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    samples: list[Sample]
    setting: Setting
    meter: Meter
    rank: int = 0
    world: int = 1

    def updates(self) -> Iterator[list[Sample]]:
        size = self.setting.update_size
        for start in range(0, len(self.samples), size):
            yield self.samples[start : start + size]

    def wrapped(self) -> nn.Module:
        """The model, in DistributedDataParallel where there are several ranks."""
        return DistributedDataParallel(self.model) if self.world > 1 else self.model


Train = Callable[[Task], None]
