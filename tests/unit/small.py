"""A model of integers and samples for it: every partial sum is exact in float64, so equal means equal bits."""

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import loss

IGNORED = -100


def unseen(hook: Any) -> Any:
    """A hook of a test that only looks, as if the code of FSDP had put it there, which is let pass."""

    def look(*given: Any) -> Any:
        return hook(*given)

    home = {"__name__": "torch.distributed.fsdp.tests"}
    return types.FunctionType(look.__code__, home, look.__name__, None, look.__closure__)


def model_of_integers() -> nn.Module:
    """Two numbers per token in, one out; its third parameter is never used."""
    model = nn.Linear(2, 1).double()
    model.register_parameter("spare", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[2.0, -3.0]]))
        model.bias.fill_(1.0)
    return model


def sample(length: int, num_targets: int, seed: int = 0) -> dict[str, Tensor]:
    """``length`` tokens of which the first ``num_targets`` have a label."""
    generator = torch.Generator().manual_seed(100 * seed + 10 * length + num_targets)
    labels = torch.randint(-4, 5, (length,), generator=generator)
    labels[num_targets:] = IGNORED
    return {"x": torch.randint(-4, 5, (length, 2), generator=generator).double(), "labels": labels}


def samples(targets: Iterable[int]) -> list[dict[str, Tensor]]:
    """A sample per number of targets, two tokens longer than that."""
    return [sample(number + 2, number, seed) for seed, number in enumerate(targets)]


def count(microbatch: Any) -> Tensor:
    return (microbatch["labels"] != IGNORED).sum()


def squares(model: nn.Module, microbatch: Any) -> tuple[Tensor, Tensor]:
    """Squared errors of the targets, and how many there are."""
    labels = microbatch["labels"]
    errors = (model(microbatch["x"]).squeeze(-1) - labels) ** 2
    return errors[labels != IGNORED].sum(), count(microbatch)


@loss(weigh=count)
def weighed(model: nn.Module, microbatch: Any) -> tuple[Tensor, Tensor]:
    return squares(model, microbatch)


def expected(model: nn.Module, batch: list[dict[str, Tensor]], divisor: float | None = None) -> list[Tensor | None]:
    """The gradient of the whole batch by plain torch, sample by sample: the sum is divided once, at the end."""
    names = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sums = [squares(model, {name: value[None] for name, value in each.items()}) for each in batch]
    total, weight = sum(total for total, _ in sums), sum(int(weight) for _, weight in sums)
    gradients = torch.autograd.grad(total, names, allow_unused=True)
    return [None if each is None else each / (divisor or weight) for each in gradients]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def same_bits(ones: list[Tensor | None], others: list[Tensor | None]) -> bool:
    pairs = list(zip(ones, others, strict=True))
    return all(one is other if one is None or other is None else torch.equal(one, other) for one, other in pairs)
