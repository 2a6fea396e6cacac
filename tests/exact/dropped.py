"""Joint losses with dropout: what the second forward drops is what the first has dropped.

The oracle draws as the ranks do: for each of them a seed, then its microbatches one after the other, all in one graph.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch import GradientAccumulator, JointLoss
from tests.exact import oracle
from tests.exact.wrappers import parameters_of, whole, wrap

WIDTH = 6
NUM_SAMPLES = (5, 3, 0)  # by rank
LENGTHS = (4, 1, 3, 2, 4)  # the plan puts long samples beside long ones
CAP_TOKENS = 8


class Tower(nn.Module):
    """Sums of dropped features."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.dropout = nn.Dropout(0.4)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            features = self.dropout(torch.tanh(block(features)))  # [B, T, C]
        return features.sum(1), self.dropout(features).sum(1)


def tower() -> nn.Module:
    torch.manual_seed(3)
    return Tower().double()


def encode(model: nn.Module, batch: oracle.Sample) -> dict[str, Tensor]:
    queries, documents = model(batch["features"])
    return {"queries": queries, "documents": documents}


def contrast(encoded: dict[str, Tensor]) -> tuple[Tensor, int]:
    scores = encoded["queries"] @ encoded["documents"].T  # [N, N]
    return -scores.log_softmax(1).diagonal().sum(), len(scores)


def share(rank: int) -> list[oracle.Sample]:
    numbers = torch.Generator().manual_seed(rank)
    lengths = LENGTHS[: NUM_SAMPLES[rank]]
    return [{"features": torch.randn(length, WIDTH, generator=numbers, dtype=torch.float64)} for length in lengths]


def expected(model: nn.Module, cuts: list[Any]) -> dict[str, Tensor | None]:
    encoded: list[dict[str, Tensor]] = []  # of every sample, by rank and in the order of its batch
    for rank, cut in enumerate(cuts):
        torch.manual_seed(100 + rank)
        of_sample: dict[int, dict[str, Tensor]] = {}
        for rows in cut:
            features = [share(rank)[row]["features"] for row in rows]
            found = encode(model, {"features": nn.utils.rnn.pad_sequence(features, batch_first=True)})
            of_sample |= {row: {name: each[place] for name, each in found.items()} for place, row in enumerate(rows)}
        encoded += [of_sample[row] for row in sorted(of_sample)]
    total, weight = contrast({name: torch.stack([each[name] for each in encoded]) for name in encoded[0]})
    (total / weight).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def run_job(wrapper: str) -> dict[str, Any]:
    """The job by its wrapper, on as many ranks as there are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about gloo and about one rank
        model, world, rank = wrap(tower(), wrapper), dist.get_world_size(), dist.get_rank()
        gradient = GradientAccumulator(model, max_microbatch_tokens=CAP_TOKENS)
        cuts = [gradient.plan(share(each)).microbatches for each in range(world)]
        torch.manual_seed(100 + rank)
        gradient.forward_backward(share(rank), JointLoss(encode, contrast))
        gradient.finalize()
        reference = tower()
        shapes = {name: each.shape for name, each in reference.named_parameters()}
        found = whole(model, {name: each.grad for name, each in parameters_of(model).items()}, shapes)
        error, parameter = oracle.worst_error(found, expected(reference, cuts))
        in_order = cuts[0] == tuple(sorted(cuts[0]))
        return {"gradient": error, "parameter": parameter, "wrong": ["the plan reorders nothing"] if in_order else []}
