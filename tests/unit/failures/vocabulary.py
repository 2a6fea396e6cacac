"""Errors of the summed loss of a head."""

from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megabatch import MegabatchError, losses
from megabatch.losses import chunked_cross_entropy, token_loss
from tests.unit.failures.table import Failure

BATCH = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, 8, dtype=torch.long)}


class Model(nn.Module):
    """In a family, and its logits are scaled after all."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.embedding, self.lm_head, self.scale = nn.Embedding(5, 4), nn.Linear(4, 5), scale

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        logits = self.lm_head(self.embedding(input_ids))
        return SimpleNamespace(logits=logits if self.scale == 1 else logits * self.scale)


def total(scale: float) -> Tensor:
    """The loss of a model that is in a family."""
    family = patch.object(chunked_cross_entropy, "FAMILIES", {f"{Model.__module__}.{Model.__qualname__}"})
    with family, patch.object(token_loss, "MIN_CHUNK_LOGITS", 5):
        return losses.next_token(Model(scale), BATCH).total


def second_derivative() -> None:
    total(1.0).backward(create_graph=True)


FAILURES = {
    "logits that are not those of the head": Failure(
        "Model … lm_head … next_token", lambda: total(2.0), MegabatchError
    ),
    "a second derivative": Failure("create_graph=True … next_token", second_derivative, MegabatchError),
}
