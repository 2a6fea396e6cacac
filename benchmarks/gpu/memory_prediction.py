"""Memory and time of an update: simulated on CPUs, then measured on the device."""

import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from benchmarks import hardware
from benchmarks.gpu import models
from benchmarks.gpu.job import GIB, Job, read
from benchmarks.llama import flops_per_token
from megabatch import GradientAccumulator, losses
from megabatch.errors import PlanError
from megabatch.simulate import device_named, simulate
from megabatch.train.init.hardware import kind_of

NUM_MICROBATCHES = 2
DEFAULT_DEVICE = "h100-80g"
ADAMW = {"lr": 1e-4, "fused": True}
SMALL_CUTS = (2,)
TOKENS = 1024
MARGIN_SECONDS = 15.0  # that a run may take
ENOUGH_SECONDS = 3.0  # of updates; float32 takes seconds for one


class Run(NamedTuple):
    """One update that is predicted and measured: a model, its precision and the size of a microbatch."""

    shape: str
    dtype: torch.dtype
    recompute: bool
    rows: int
    tokens: int
    small: bool

    @property
    def name(self) -> str:
        precision = str(self.dtype).removeprefix("torch.")
        return f"{self.shape} {precision} {self.rows}x{self.tokens}{', recomputed' * self.recompute}"

    def batch(self, num_microbatches: int) -> models.Sample:
        vocabulary = models.shape_of(self.shape, small=self.small).vocabulary
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (self.rows * num_microbatches, self.tokens), generator=generator)  # [B, T]
        return {"input_ids": ids, "labels": ids}


def runs_of(job: Job) -> list[Run]:
    """Three sizes, bfloat16 and float32, recomputed or not, three cuts. A small run takes one size and one cut."""
    cuts = job.pick({"0.1B": (8, 32, 96), "0.6B": (4, 12, 32), "1.2B": (2, 6, 16)}, {"0.1B": SMALL_CUTS})
    tokens = job.pick(TOKENS, 32)
    kinds = product((torch.bfloat16, torch.float32), cuts, (False, True))  # float32 last, as it takes longest
    return [
        Run(shape, dtype, recompute, rows, tokens, job.small)
        for dtype, shape, recompute in kinds
        for rows in cuts[shape]
    ]


def predict(job: Job) -> None:
    """Every run of `measure`, simulated in processes of the CPU."""
    runs = runs_of(job)
    context = get_context("spawn")
    with ProcessPoolExecutor(job.pick(10, 2), mp_context=context) as pool:
        device = _device_name(job)
        jobs = {pool.submit(simulate_run, run, device): run for run in runs}
        for done in as_completed(jobs):
            with job.row(jobs[done].name) as row:
                row |= done.result()


def _device_name(job: Job) -> str:
    """Return the simulated device: the one that is here, or an H100."""
    if not job.is_cuda:
        return DEFAULT_DEVICE
    try:
        return device_named(kind_of(hardware.name())).name
    except PlanError:
        return DEFAULT_DEVICE


def simulate_run(run: Run, device: str) -> dict[str, Any]:
    """Return the predicted peaks in GiB and the predicted seconds. No GPU is used."""
    start = time.perf_counter()
    build = partial(models.llama, run.shape, run.dtype, torch.device("meta"), small=run.small, recompute=run.recompute)
    update = simulate(
        lambda mesh: build(),
        lambda model: torch.optim.AdamW(model.parameters(), **ADAMW),
        partial(run.batch, 1),
        losses.next_token,
        num_microbatches=NUM_MICROBATCHES,
        max_norm=1.0,
        device=device,
    )
    return {
        "predicted_gib": update.peak_bytes / GIB,
        "predicted_reserved_gib": update.reserved().peak_bytes / GIB,
        "predicted_seconds": update.seconds,
        "bound": update.bound,
        "device": device,
        "simulation_seconds": round(time.perf_counter() - start, 2),
    }


def measure(job: Job) -> None:
    """Each run for real: peaks of memory and seconds, beside what `predict` has written."""
    predicted = {row["name"]: row for row in read(job.out) if row["section"] == "predict" and row.get("ok")}
    for run in runs_of(job):
        if job.seconds_left < MARGIN_SECONDS:
            job.write(run.name, ok=True, left_out="the section's time is over")
            continue
        with job.row(run.name) as row:
            row |= _measure_run(job, run)
            expected = predicted.get(run.name)
            if expected is None:
                row["left_out"] = "no prediction"
                continue
            row["predicted_seconds_ratio"] = expected["predicted_seconds"] / row["seconds"]
            if job.is_cuda:
                row["allocated_ratio"] = expected["predicted_gib"] / row["allocated_gib"]
                row["reserved_ratio"] = expected["predicted_reserved_gib"] / row["reserved_gib"]
                row["ok"] = row["split"] == 0 and 0.9 <= row["allocated_ratio"] <= 1.1


def _measure_run(job: Job, run: Run) -> dict[str, Any]:
    job.release()
    base = torch.cuda.memory_allocated() / GIB if job.is_cuda else 0.0
    model = models.llama(run.shape, run.dtype, job.device, small=run.small, recompute=run.recompute)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    gradient = GradientAccumulator(model, micro_batch_size=run.rows)
    batch = run.batch(NUM_MICROBATCHES)
    job.reset_peak()
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) < job.pick(5, 2) and sum(seconds) < ENOUGH_SECONDS):
        start = job.now()
        gradient.forward_backward(batch, losses.next_token)
        if gradient.finalize(max_norm=1.0).finite:
            optimizer.step()
        seconds.append(job.now() - start)
    allocated, reserved = job.peaks()
    median = statistics.median(seconds[1:])
    peak, _ = hardware.peak_flops(hardware.name(), run.dtype)
    flops = flops_per_token(models.shape_of(run.shape, small=run.small), run.tokens) * batch["input_ids"].numel()
    plan = gradient.last_plan
    assert plan is not None
    return {
        "allocated_gib": allocated - base, "reserved_gib": reserved, "seconds": median, "first_seconds": seconds[0],
        "mfu": flops / median / peak if peak else None, "split": plan.num_split,
    }  # fmt: skip
