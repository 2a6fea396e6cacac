"""Samples of very different lengths, as the data sets of other libraries have them."""

from typing import Any

import torch
from torch import Tensor

from tests.exact import models, oracle

NUM_SAMPLES = 22
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def samples() -> list[dict[str, Any]]:
    """As lists of numbers, of 4 to 29 tokens; a prompt is no target, and one sample has no target at all."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for index in range(NUM_SAMPLES):
        ids = torch.randint(models.VOCABULARY, (4 + (index * 7) % 26,), generator=generator).tolist()
        prompt = len(ids) if index == 5 else index % 4
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


def tensors(chosen: list[dict[str, Any]]) -> list[oracle.Sample]:
    return [{name: torch.tensor(value) for name, value in sample.items()} for sample in chosen]


def collate(chosen: list[dict[str, Any]]) -> dict[str, Tensor]:
    return oracle.collate(tensors(chosen))
