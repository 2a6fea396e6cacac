"""Two encoders with a contrastive loss, and their gradient in one graph, for tests of single processes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megabatch import GradientAccumulator, JointLoss
from tests.exact import oracle

WIDTH, SIZE = 4, 7


class Towers(nn.Module):
    """Two encoders and a temperature."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, query: Tensor, document: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, documents = self.dropout(torch.tanh(self.query(query))), self.document(document)
        return queries, documents, self.temperature.expand(len(queries))


def towers(dropout: float = 0.0) -> Towers:
    torch.manual_seed(0)
    return Towers(dropout).double()


def rows(size: int = SIZE, seed: int = 1) -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    query, document = torch.randn(2, size, WIDTH, generator=numbers, dtype=torch.float64)
    return {"query": query, "document": document}


def encode(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return model(batch["query"], batch["document"])


def contrast(queries: Tensor, documents: Tensor, temperature: Tensor) -> tuple[Tensor, int]:
    """InfoNCE both ways."""
    scores = queries @ documents.T * temperature.mean().exp()  # [N, N]
    place = torch.arange(len(scores))
    both = [F.cross_entropy(each, place, reduction="sum") for each in (scores, scores.T)]
    return torch.stack(both).sum() / 2, len(scores)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def run(joint: JointLoss, *batches: Any, model: nn.Module | None = None, **settings: Any) -> dict[str, Tensor | None]:
    """The gradient of an update of some calls."""
    model = towers() if model is None else model
    gradient = GradientAccumulator(model, **({"micro_batch_size": 2} | settings))
    for batch in batches:
        gradient.forward_backward(batch, joint)
    gradient.finalize()
    return gradients(model)


def uncut(make: Callable[[nn.Module], tuple[Tensor, Any]], model: nn.Module | None = None) -> dict[str, Tensor | None]:
    """The gradient of a total over its weight, in one graph."""
    model = towers() if model is None else model
    total, weight = make(model)
    (total / weight).backward()
    return gradients(model)


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    error, parameter = oracle.worst_error(found, expected)
    assert error <= 1e-14, f"{parameter}: {error:.1e}"
