"""Sparse gradients are summed exactly, whichever ranks have one, and clipped as dense ones are."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megabatch import GradientAccumulator, loss
from tests.exact.launch import of_ranks

USES = {  # how each rank reads the embedding: sparse, dense or not at all; the last goes for all further ranks
    "all sparse": ("sparse",),
    "one sparse": ("sparse", "none"),
    "all but the first": ("none", "sparse"),
    "none": ("none",),
    "one dense": ("dense", "sparse"),
    "one dense, the others none": ("dense", "none"),
    "none, dense, sparse": ("none", "dense", "sparse"),
}
SETTINGS = ("exact", "clipped", "wide")
JOBS = [f"{name}:{setting}" for name in USES for setting in SETTINGS]
SAMPLES = 4  # of each rank


class Embedded(nn.Module):
    """Sums rows of a table, and has a second one that all ranks use."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.arange(14, dtype=dtype)
        self.table = nn.Parameter((numbers % 5 - 2).reshape(7, 2))
        self.linear = nn.Parameter((numbers[:2] % 3 + 1)[None])

    def forward(self, ids: Tensor, use: str) -> Tensor:
        rows = torch.ones(len(ids), 2, dtype=self.table.dtype)
        if use != "none":
            rows = functional.embedding(ids, self.table, sparse=use == "sparse")
        return (rows * self.linear).sum(1)


def batch_of(rank: int) -> dict[str, Tensor]:
    ids = torch.tensor([0, 1, 1, 3]) + rank
    return {"ids": ids, "labels": ids * 2 - 3}


def use_of(rank: int, uses: tuple[str, ...]) -> str:
    return uses[min(rank, len(uses) - 1)]


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return ((output - labels) ** 2).sum()


def run_job(name: str) -> dict[str, object]:
    """The error of each gradient against that of the uncut update with dense tables, and layouts on this rank."""
    case, setting = name.split(":")
    dtype = torch.bfloat16 if setting == "wide" else torch.float64
    max_norm = 0.125 if setting == "clipped" else None
    world, rank = dist.get_world_size(), dist.get_rank()
    model, reference = Embedded(dtype), Embedded(torch.float64)

    @loss(weigh=lambda microbatch: len(microbatch["ids"]))
    def objective(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        output = model(microbatch["ids"], use_of(rank, USES[case]))
        return squares(output, microbatch["labels"]), len(microbatch["ids"])

    accumulate_dtype = torch.float32 if setting == "wide" else None
    gradient = GradientAccumulator(model, micro_batch_size=2, accumulate_dtype=accumulate_dtype)
    for _ in range(2):  # what an update leaves is not in the way of the next
        gradient.forward_backward(batch_of(rank), objective)
        update = gradient.finalize(max_norm=max_norm)
    for each in range(world):
        batch = batch_of(each)
        use = use_of(each, USES[case]).replace("sparse", "dense")
        (squares(reference(batch["ids"], use), batch["labels"]) / (world * SAMPLES)).backward()
    if max_norm is not None:
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        torch.testing.assert_close(update.grad_norm, expected, rtol=1e-14, atol=0)
    found = {}
    for (each, mine), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (whole.grad is None), each
        if mine.grad is not None and whole.grad is not None:
            assert mine.grad.dtype == dtype
            difference = mine.grad.to_dense().double() - whole.grad.to(dtype).double()
            found[each] = float(difference.abs().max() / whole.grad.abs().max())
    layout = "none" if model.table.grad is None else str(model.table.grad.layout).removeprefix("torch.")
    return {"errors": found, "layout": layout}


pytestmark = pytest.mark.slow


results = of_ranks(f"{__name__}:run_job", dict.fromkeys((1, 2, 3), JOBS))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_sums_over_ranks_are_exact(results, name: str, world: int) -> None:
    case, setting = name.split(":")
    found = results(name, world)
    uses = {use_of(rank, USES[case]) for rank in range(world)}
    layout = "strided" if "dense" in uses else "sparse_coo" if "sparse" in uses else "none"
    bound = {"exact": 0.0 if world < 3 else 1e-15, "clipped": 1e-14, "wide": 2.0**-7}[setting]
    for result in found:
        assert result["layout"] == layout
        assert result["errors"].keys() == ({"linear"} if layout == "none" else {"linear", "table"})
        assert max(result["errors"].values()) <= bound
