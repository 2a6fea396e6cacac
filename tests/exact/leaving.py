"""Processes of which one cannot go on where the others wait for it, and what each of them says when it ends."""

import json
import os
import socket
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megabatch import GradientAccumulator
from megabatch.pipeline.run import Pipeline
from tests.exact.cells import Cell
from tests.exact.launch import _fork
from tests.exact.memory import SpikedRun
from tests.exact.spikes import Spikes

DEADLINE_SECONDS = 40.0  # for the starting and ending of processes on a busy machine too
GROUP_TIMEOUT = timedelta(minutes=30)  # torch's own: nobody is freed by it


class Job:
    """The job "wrapper:world:sync:samples:phase:index:rank": in which microbatch which rank runs out of memory."""

    def __init__(self, name: str) -> None:
        self.wrapper, world, self.sync, size, self.phase, index, culprit = name.split(":")
        self.world, self.size, self.index, self.culprit = int(world), int(size), int(index), int(culprit)

    def run(self) -> None:
        """One update on this rank."""
        when = {self.index: (self.phase, 1)} if dist.get_rank() == self.culprit else {}
        if self.wrapper == "pp":
            self._pipelined(when)
            return
        if self.wrapper.startswith("pp-"):
            self._stage_fails()
            return
        if self.wrapper in ("unused", "passed-by"):
            self._unreduced()
            return
        if self.wrapper.startswith("body"):
            self._looped()
            return
        wrapper = "plain" if self.wrapper.startswith("messages") else self.wrapper
        values = ("bits", wrapper, str(self.world), self.sync, "C1", "list", "weigh", "two-samples")
        this = SpikedRun(Cell.parse(":".join((*values, "forward_backward", "no-clip"))))
        this.spikes.set(when)
        if self.wrapper != wrapper:
            place = "embedding" if self.wrapper == "messages-before" else "head"
            this.model.get_submodule(place).register_forward_hook(lambda *_: dist.barrier())
        bound = {"micro_batch_size": self.size} if self.size else {}  # none: it is chosen by measuring
        gradient = GradientAccumulator(this.model, mesh=this.mesh, sync=self.sync, **bound)
        gradient.forward_backward(this.batch(this.updates()[0][0]), this.loss_fn())
        gradient.finalize()

    def _unreduced(self) -> None:
        """DDP waits for a gradient that the last microbatch of one rank does not give."""
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]), bucket_cap_mb=1e-5)
        model.module.forward = lambda x, both: model.module[0](x) + (model.module[1](x) if both else 0.0)
        is_culprit, numbers = dist.get_rank() == self.culprit, iter(range(4))

        def loss_fn(given: nn.Module, microbatch: Any) -> Any:
            at_fault = is_culprit and next(numbers) == 3
            called = given.module if at_fault and self.wrapper == "passed-by" else given
            return called(microbatch["x"], not at_fault).sum(), len(microbatch["x"])

        gradient = GradientAccumulator(model, micro_batch_size=1, sync=self.sync)
        gradient.forward_backward({"x": torch.ones(4, 3)}, loss_fn)
        gradient.finalize()

    def _looped(self) -> None:
        """The body of a microbatch fails on one rank, and the others wait in DDP's reduction or FSDP2's gather."""
        torch.manual_seed(0)
        wrap = {"body": DistributedDataParallel, "body-fsdp2": fully_shard}[self.wrapper]
        gradient = GradientAccumulator(wrap(nn.Linear(3, 3)), sync=self.sync)
        for index in range(2):
            with gradient.microbatch(index, of=2, sum_over=1) as part:
                if (index, dist.get_rank()) == (self.index, self.culprit):
                    raise ValueError("a bad row")
                part.scale(gradient.model(torch.ones(1, 3)).sum()).backward()
        gradient.finalize()

    def _stage_fails(self) -> None:
        """A stage fails on one data rank, and the other waits in FSDP2's gather or in DDP's reduction."""
        torch.manual_seed(0)
        mesh, numbers = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "pp")), count()
        stage = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if self.wrapper == "pp-fsdp2":
            for each in (*stage, stage):
                fully_shard(each, mesh=mesh["dp"])
        else:
            stage = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))

        def fail(*_: Any) -> None:
            if (next(numbers), dist.get_rank()) == (self.index, self.culprit):
                raise ValueError("a bad row")

        stage.get_submodule("0" if self.wrapper == "pp-fsdp2" else "module.0").register_forward_hook(fail)
        self._run_pipeline(stage, mesh)

    def _pipelined(self, when: Any) -> None:
        stage = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        Spikes(stage, ("0", "1")).set(when)
        self._run_pipeline(stage, init_device_mesh("cpu", (self.world,), mesh_dim_names=("pp",)))

    def _run_pipeline(self, stage: nn.Module, mesh: DeviceMesh) -> None:
        def shape(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(len(tensor), 3)

        gradient = GradientAccumulator(Pipeline([stage], mesh, boundary=shape, output=shape), micro_batch_size=2)
        gradient.forward_backward(
            {"x": torch.ones(8, 3)}, lambda model, microbatch: (model(microbatch["x"]).sum(), len(microbatch["x"]))
        )
        gradient.finalize()


def _rank(name: str, rank: int, port: int, file: Path) -> None:
    """A process of a job; what it fails with is its last word."""
    job = Job(name)
    store = dist.TCPStore("127.0.0.1", port, job.world, is_master=rank == 0, timeout=GROUP_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=GROUP_TIMEOUT)
    try:
        job.run()
        told = ["nothing", "", None]
    except Exception as error:
        told = [type(error).__name__, str(error), getattr(error, "shortage", None)]
    file.write_text(json.dumps(told))
    os._exit(1)


def _ended(children: set[int]) -> bool:
    """Return True if all processes have ended by themselves; kill those that have not."""
    deadline, left = time.monotonic() + DEADLINE_SECONDS, set(children)
    while left and time.monotonic() < deadline:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.02)
    for child in left:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return not left


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def main(folder: Path) -> None:
    """Run the jobs that a file names, one after the other; what each rank said of each is another file."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for number, name in enumerate(json.loads((folder / "jobs.json").read_text())):
        files = [folder / f"{number}-{rank}.json" for rank in range(Job(name).world)]
        port = _free_port()
        ended = _ended({_fork(partial(_rank, name, rank, port, file)) for rank, file in enumerate(files)})
        results[name] = {"ended": ended, "told": [json.loads(f.read_text()) if f.exists() else None for f in files]}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
