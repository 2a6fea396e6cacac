"""A function on some ranks, each a process of the tests' server with a process group on gloo, and what they return."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.train.runtime.ranks import Ranks
from tests.exact.launch import launch, values

ROOT = Path(__file__).parents[2]


def on_ranks(num_ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(ranks, *arguments)`` on each rank; its module is imported there, so it is no closure."""
    job = Path(tempfile.mkdtemp(dir=folder)).resolve()
    torch.save((function, arguments), job / "call.pt")
    found = launch(num_ranks, f"{__name__}:run_rank", [str(job)], job / "ranks")
    assert list(values(found[str(job)])) == [None] * num_ranks
    return [torch.load(job / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def run_rank(job: str) -> None:
    """The job: the call that is in a folder."""
    os.chdir(ROOT)
    function, arguments = torch.load(Path(job) / "call.pt", weights_only=False)
    rank = dist.get_rank()
    torch.save(function(Ranks(rank, dist.get_world_size(), torch.device("cpu")), *arguments), f"{job}/rank{rank}.pt")
    dist.barrier()
