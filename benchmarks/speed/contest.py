"""A contestant in processes of its own: `torchrun -m benchmarks.speed.contest FOLDER`.

The folder's job.json says who, and on what. Each rank writes beside it what it measured. A contestant that counts
samples runs once for each micro batch size. Then, if asked, comes the proof: the same updates, small and in float64,
beside uncut ones.
"""

import ctypes
import gc
import importlib
import json
import os
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it; here it is no contestant's memory
import torch.distributed as dist

from benchmarks.speed.contestants import EVERYBODY
from benchmarks.speed.model import Sample, build, causal_loss, collate, optimizer_of, sample_of
from benchmarks.speed.setting import LEAST_TOKENS, SLOWER, Setting
from benchmarks.speed.task import Meter, Task, Train
from tests.comm.counting import Collectives
from tests.memory.runs import memory_bytes


def function_of(name: str) -> Train:
    module, _, function = EVERYBODY[name].function.partition(":")
    return getattr(importlib.import_module(f"benchmarks.speed.{module}"), function)


def warmed(drawn: list[list[int]], setting: Setting) -> list[Sample]:
    """The first update at a quarter of its lengths, then the drawn ones."""
    kept = [ids[: setting.length(len(ids))] for ids in drawn]
    warm_up = [ids[: max(LEAST_TOKENS, len(ids) // 4)] for ids in kept[: setting.update_size]]
    return list(map(sample_of, warm_up + kept))


def task_of(drawn: list[list[int]], setting: Setting, rank: int, world: int) -> Task:
    model = build(setting)
    optimizer = optimizer_of(model, setting)
    return Task(model, optimizer, warmed(drawn, setting), setting, Meter(model, optimizer), rank, world)


def search(
    train: Train, drawn: list[list[int]], setting: Setting, rank: int, world: int, sizes: list[int]
) -> dict[str, dict[str, Any]]:
    """Return the measurements by micro batch size, until a size is clearly slower than the best before it."""
    found: dict[str, dict[str, Any]] = {}
    best = float("inf")
    for size in sizes:
        if size * world > setting.update_size:
            break
        found[str(size)] = timed(train, drawn, replace(setting, micro_batch_size=size), rank, world)
        took = torch.tensor([sum(each["cpu_seconds"] for each in found[str(size)]["updates"])])
        if world > 1:
            dist.all_reduce(took)  # so that all ranks stop at the same size
        if took.item() > SLOWER * best:
            break
        best = min(best, took.item())
    return found


def timed(train: Train, drawn: list[list[int]], setting: Setting, rank: int, world: int) -> dict[str, Any]:
    """Each measured update's time and tokens on this rank, and the most memory above what was there before."""
    train(task_of(drawn, setting.dry(), rank, world))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the dry run took is given back
    Path("/proc/self/clear_refs").write_text("5")
    start_bytes = memory_bytes("VmRSS")
    task = task_of(drawn, setting, rank, world)
    task.meter.begin()
    train(task)
    marks = [asdict(mark) for mark in task.meter.marks[1:]]  # the first update is the warm-up
    return {
        "updates": [{key: after[key] - before[key] for key in after} for before, after in pairwise(marks)],
        "start_bytes": start_bytes,
        "peak_bytes": memory_bytes("VmHWM") - start_bytes,
        "weights": sum(parameter.detach().double().abs().sum().item() for parameter in task.model.parameters()),
    }


def alone(
    train: Train, drawn: list[list[int]], setting: Setting, rank: int, world: int, sizes: list[int]
) -> dict[str, dict[str, Any]]:
    """Return the measurement of a contestant that counts tokens."""
    return {"tokens": timed(train, drawn, setting, rank, world)}


def proof(train: Train, drawn: list[list[int]], setting: Setting, rank: int, world: int) -> dict[str, Any]:
    """How far the first gradient and the last weights are from those of uncut updates, and what was sent."""
    task = task_of(drawn, setting, rank, world)
    before = flat(task.model.parameters())
    task.meter.keep_gradients = True
    with Collectives() as counted:
        task.meter.seen = counted.seen
        task.meter.begin()
        train(task)
    gradient, weights = uncut(task_of(drawn, setting, 0, 1))
    return {
        "gradient_error": relative(flat(task.meter.gradients[0]), gradient),
        "weights_error": ((flat(task.model.parameters()) - weights).norm() / (weights - before).norm()).item(),
        "weights": flat(task.model.parameters()).abs().sum().item(),
        "collectives": task.meter.collectives(),
    }


def uncut(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """The first gradient and the last weights of updates that are one forward each, divided by all targets."""
    task.meter.keep_gradients = True
    for update in task.updates():
        batch = collate(update)
        logits = task.model(input_ids=batch["input_ids"]).logits
        num_targets = sum(len(sample["labels"]) - 1 for sample in update)
        causal_loss(logits, batch["labels"], logits.shape[-1], num_targets).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
    return flat(task.meter.gradients[0]), flat(task.model.parameters())


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    train, setting = function_of(job["contestant"]), Setting(**job["setting"])
    for library in EVERYBODY[job["contestant"]].libraries:
        importlib.import_module({"lightning": "lightning.pytorch"}.get(library, library))
    run = search if EVERYBODY[job["contestant"]].counts else alone
    found: dict[str, Any] = {"sizes": run(train, job["samples"], setting, rank, world, job["sizes"])}
    if job["proof"]:
        found["proof"] = proof(train, job["samples"], setting.proof(), rank, world)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
