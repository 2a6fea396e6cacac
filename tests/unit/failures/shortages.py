"""Models and losses that run out of memory, each in a way in which a microbatch cannot run in parts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megabatch import experts, loss
from megabatch.core.right_padding import pad_right
from tests.exact.spikes import Spikes
from tests.unit.failures.table import SAMPLES, accumulator, linear, squares


class Two(nn.Module):
    """Two layers; memory runs out in the backward of the first, when the second has its gradient."""

    def __init__(self, when: dict[int, tuple[str, int]]) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()
        Spikes(self, ("first", "second")).set(when)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Inside(torch.autograd.Function):
    """A layer whose backward runs a backward of its own, as checkpointing did before torch had hooks for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), gradients[0])
        return x.grad, None


class Nested(Two):
    """Its second layer, or both together, are run again in the backward."""

    def __init__(self, again: Callable[..., Tensor]) -> None:
        super().__init__({})
        self.again = again
        Spikes(self, ("first",)).set({1: ("backward", 0)})

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.first(x), self.second)


class Tied(nn.Module):
    """A weight used twice, then inside a checkpoint that runs a backward of its own; another may be unused."""

    def __init__(self, has_unused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
        self.middle = linear().requires_grad_(False)
        self.unused = linear() if has_unused else None
        Spikes(self, ("middle",)).set({1: ("backward", 0)})

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x @ self.weight, self.middle(x @ self.weight), use_reentrant=True)


def tied(has_unused: bool) -> None:
    model = Tied(has_unused)
    gradient = accumulator(model)
    if has_unused:  # it has a gradient, so that it does not lack one of this microbatch that it could get
        gradient.forward_backward(SAMPLES[:2], lambda model, batch: (model.unused(batch["x"]).sum(), 2))
    gradient.forward_backward(SAMPLES, squares)


class Beside(nn.Module):
    """A router beside the way to the layer of which memory runs out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = linear(), Router()
        Spikes(self, ("first",)).set({1: ("backward", 0)})

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.router(x)[0]


class Router(nn.Module):
    """Chooses one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(1, 2).double()
        self.register_buffer("e_score_correction_bias", torch.zeros(2))

    def forward(self, x: Tensor) -> Any:
        return self.scores(x).softmax(-1).topk(1)


def beside_experts() -> None:
    gradient = accumulator(Beside())
    experts.ExpertBias(gradient)
    gradient.forward_backward(SAMPLES, squares)


def update(loss_fn: Callable[..., Any] = squares, phase: str = "backward", **settings: Any) -> None:
    """Memory runs out in the second of two microbatches, once."""
    accumulator(Two({1: (phase, 0)}), **settings).forward_backward(SAMPLES, loss_fn)


def single_sample() -> None:
    accumulator(Two({2: ("backward", 0)}), micro_batch_size=1).forward_backward(SAMPLES, squares)


def half_of_it() -> None:
    accumulator(Two({1: ("backward", 0), 3: ("forward", 1)})).forward_backward(SAMPLES, squares)


def no_part() -> None:
    """The collate of the user runs out of memory when a part is made."""
    made: list[int] = []

    def collate(samples: Any) -> Any:
        made.append(len(samples))
        if len(made) == 5:  # two microbatches, two halves that are weighed
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return pad_right(samples)

    accumulator(Two({1: ("backward", 0)}), collate=collate).forward_backward(SAMPLES, squares)


def several_devices() -> None:
    model = Two({1: ("backward", 0)})
    model.elsewhere = nn.Linear(1, 1, device="meta")  # after the others: the model reads on the CPU
    accumulator(model).forward_backward(SAMPLES, squares)


def weighed_together() -> None:
    update(loss(weigh=lambda microbatch: len(microbatch["x"]) ** 2)(lambda *given: (squares(*given)[0], 4.0)))


def tensor_of_the_loss() -> None:
    scale = torch.ones(1, dtype=torch.float64, requires_grad=True)
    update(lambda model, microbatch: ((model(microbatch["x"]) * scale).sum(), 2))


def in_parts(again: Callable[..., Tensor]) -> None:
    accumulator(Nested(again)).forward_backward(SAMPLES, squares)


def reentrant(x: Tensor, layer: nn.Module) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def reducing() -> None:
    model = DistributedDataParallel(Two({1: ("backward", 0)}))
    accumulator(model).forward_backward(SAMPLES, squares)


def views_of_a_bucket() -> None:
    """From the second call on, DDP's gradients are such views."""
    model = Two({5: ("backward", 0)})
    gradient = accumulator(DistributedDataParallel(model, gradient_as_bucket_view=True))
    for _ in range(2):
        gradient.forward_backward(2 * SAMPLES, squares)
