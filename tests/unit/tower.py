"""A small model, its loss and its data, for tests of single processes."""

import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, loss


class Tower(nn.Module):
    """Some layers, the last of which only rows with a negative first number use."""

    def __init__(self, num_layers: int = 6, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(num_layers)])
        self.rare = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        negative = x[:, :1] < 0
        return x + negative * self.rare(x) if negative.any() else x


def new_tower() -> Tower:
    torch.manual_seed(0)
    return Tower()


@loss(weigh=lambda microbatch: len(microbatch["x"]))
def square(model, microbatch):
    return model(microbatch["x"]).square().sum(), float(len(microbatch["x"]))


def rows(num_samples: int, seed: int = 0) -> dict[str, Tensor]:
    return {"x": torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(seed))}


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batch_size: int = 2) -> GradientAccumulator:
    gradient = GradientAccumulator(model, micro_batch_size=micro_batch_size)
    gradient.step_in_backward(optimizer)
    return gradient


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def moved(model: nn.Module, before: list[Tensor]) -> bool:
    return any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
