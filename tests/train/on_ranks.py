"""A function on some ranks, each a real process with a process group on gloo, and what they return."""

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megabatch.train.runtime.ranks import Ranks
from tests.train.processes import CONTEXT

SECONDS = 100  # for all ranks; none here takes a fifth of it


def on_ranks(num_ranks: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(ranks, *arguments)`` returns on each rank; its module is imported there, so it is no closure."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        CONTEXT.Process(target=run_rank, args=(rank, num_ranks, store.port, folder, function, arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    failures = [path.read_text() for path in sorted(folder.glob("rank*.failure"))]
    assert not failures, "\n".join(failures)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def run_rank(
    rank: int, num_ranks: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """The whole life of a rank; it ends without closing, since gloo's threads can abort an interpreter that closes."""
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=SECONDS)
        )
        torch.save(function(Ranks(rank, num_ranks, torch.device("cpu")), *arguments), folder / f"rank{rank}.pt")
        dist.barrier()
    except BaseException:
        (folder / f"rank{rank}.failure").write_text(traceback.format_exc())
    os._exit(0)
