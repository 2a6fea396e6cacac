"""A model in DDP can be copied and verified beside its accumulator, on ranks whose process group cannot be copied."""

import copy
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator, losses, verify
from megabatch.train.runtime.ranks import Ranks
from tests.train.on_ranks import on_ranks


def verified(ranks: Ranks) -> tuple[bool, list[float]]:
    """The gradient of the model, and that of its copy after an update of its own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2).double())
    gradient = GradientAccumulator(model, micro_batch_size=1)
    samples = [{"x": torch.full((3,), float(2 * ranks.rank + k)).double(), "labels": torch.tensor(k)} for k in (0, 1)]
    averaged = copy.deepcopy(model.module)
    gradient.forward_backward(samples, losses.classification)
    gradient.finalize()
    averaged(torch.ones(3).double()).sum().backward()
    assert model.module.weight.grad is not averaged.weight.grad
    assert averaged.weight.grad is not None
    return verify(model, losses.classification, samples).ok, averaged.weight.grad.flatten().tolist()


def test_a_copy_knows_nothing_of_the_accumulator(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, verified) == [(True, [1.0] * 6)] * 2
