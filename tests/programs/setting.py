"""Where a program runs, its share of the data, and how far its gradient is from that of plain autograd."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.exact import oracle

Errors = dict[str, float]  # by what was compared
Program = Callable[["Setting"], Errors]


@dataclass(frozen=True)
class Setting:
    """``way`` is "plain", "ddp", or one of these and the data of a rank, such as "ddp, a rank without samples"."""

    way: str = "plain"
    rank: int = 0
    world: int = 1

    def wrap(self, model: nn.Module, **options: Any) -> nn.Module:
        """Return the model as the program trains it."""
        return DistributedDataParallel(model, **options) if self.way.startswith("ddp") else model

    def share(self, data: Any) -> Any:
        """Return this rank's samples of a list, a tensor, or a mapping of tensors."""
        if isinstance(data, Mapping):
            return {name: values[self.rank :: self.world] for name, values in data.items()}
        return data[self.rank :: self.world]


def inner(model: Any) -> Any:
    """Return the model inside of DDP, for its parameters."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def gradients(model: nn.Module, part: str = "") -> dict[str, Tensor | None]:
    """Return the gradients of the parameters with ``part`` in their name, dense."""
    named = {name: each.grad for name, each in model.named_parameters() if part in name}
    return {name: each.to_dense() if each is not None and each.is_sparse else each for name, each in named.items()}


def worst_error(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """Return the largest relative error of a parameter's gradient.

    The gradient of some parameters is zero but for rounding, as that of a key's bias: their error is relative to the
    gradient of all parameters.
    """
    size = float(torch.stack([each.norm() for each in expected.values() if each is not None]).norm())
    errors: list[float] = []
    for name, gradient in expected.items():
        other = found[name]
        if gradient is not None and other is not None and float(gradient.norm()) <= 1e-12 * size:
            errors.append(float(other.norm()) / size)
        else:
            errors.append(oracle.relative_error(other, gradient))
    return max(errors)


def gradient_error(model: nn.Module, plain: nn.Module) -> float:
    """Return the largest relative error of the gradient of a parameter."""
    return worst_error(gradients(model), gradients(plain))


def weight_error(model: nn.Module, plain: nn.Module) -> float:
    """Return the largest difference of a weight."""
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((one - other).detach().abs().max()) for one, other in pairs)


def refusal(action: Callable[[], Any], kind: type[Exception]) -> str:
    """Return the message of the error that an action must raise."""
    try:
        action()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def setting_of(way: str) -> Setting:
    """Return the setting of this process."""
    if not dist.is_initialized():
        return Setting(way)
    return Setting(way, dist.get_rank(), dist.get_world_size())


def run(program: Program, way: str) -> Errors:
    """Run a program in float64, from a seed."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    try:
        return program(setting_of(way))
    finally:
        torch.set_default_dtype(torch.float32)


def stacked(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return samples of one shape as one batch."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
