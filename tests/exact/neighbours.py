"""Processes of which one is frozen, or runs out of memory beside others that are no concern of it."""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator
from tests.exact.launch import _fork
from tests.exact.leaving import DEADLINE_SECONDS, _free_port

SHORT = timedelta(seconds=8)
LONG = timedelta(minutes=5)
WORLDS = {"frozen": 2, "frozen-in-finalize": 2, "beside": 4}


def frozen(rank: int, where: str) -> None:
    """Rank 0, in whose process the store is, stops for good."""
    gradient = GradientAccumulator(nn.Linear(3, 3), micro_batch_size=2)

    def loss_fn(model: nn.Module, microbatch: Any) -> Any:
        if rank == 0 and where == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)
        return model(microbatch["x"]).sum(), 2.0

    gradient.forward_backward({"x": torch.ones(2, 3)}, loss_fn)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    gradient.finalize()


def beside(rank: int) -> None:
    """Two groups of two, each with a model of its own; in the second one memory runs out."""
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    gradient = GradientAccumulator(DistributedDataParallel(nn.Linear(3, 3), process_group=group), micro_batch_size=1)

    def loss_fn(model: nn.Module, microbatch: Any) -> Any:
        if rank == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if rank < 2:  # until the others have left
            dist.distributed_c10d._get_default_store().wait(["left 2", "left 3"])
            time.sleep(2 * 0.5)  # as long as two looks into the store
        return model(microbatch["x"]).sum(), 1.0

    gradient.forward_backward({"x": torch.ones(1, 3)}, loss_fn)
    gradient.finalize()


def _rank(name: str, rank: int, port: int, file: Path) -> None:
    timeout = LONG if name == "beside" else SHORT
    store = dist.TCPStore("127.0.0.1", port, WORLDS[name], is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLDS[name], timeout=timeout)
    try:
        beside(rank) if name == "beside" else frozen(rank, name)
        told = "fine"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    file.write_text(json.dumps(told))
    if name == "beside":
        words = dist.distributed_c10d._get_default_store()
        words.set(f"left {rank}", "")
        if rank == 0:  # in whose process the store is
            words.wait(["left 1"])
    os._exit(0)


def main(folder: Path) -> None:
    """The output of each rank of each job; None if it was still there after the deadline."""
    torch.set_num_threads(1)
    results: dict[str, list[str | None]] = {}
    for name, world in WORLDS.items():
        port, files = _free_port(), [folder / f"{name}-{rank}.json" for rank in range(world)]
        children = [_fork(partial(_rank, name, rank, port, file)) for rank, file in enumerate(files)]
        left, deadline = set(children if name == "beside" else children[1:]), time.monotonic() + DEADLINE_SECONDS
        while left and time.monotonic() < deadline:
            left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.02)
        for child in left | (set() if name == "beside" else {children[0]}):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        results[name] = [
            json.loads(file.read_text()) if file.exists() and child not in left else None
            for child, file in zip(children, files, strict=True)
        ]
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
