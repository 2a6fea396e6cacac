"""The "auto" limit beside limits found by hand, samples in one row, and batches that are prepared early."""

import statistics
from typing import Any

import torch

from benchmarks.gpu import models
from benchmarks.gpu.job import GIB, Job, median_ms
from benchmarks.gpu.recovery import profile_updates
from megabatch import GradientAccumulator, losses
from megabatch.batching import OneRow
from megabatch.planners import Auto

LIMITS = (4096, 8192, 16384, 32768, 65536)
NEAR = 1.05  # times the tokens a second of "auto" that the best limit by hand may reach
ATTENTION = {
    "sdpa": (torch.float32, 1e-4),
    "flex_attention": (torch.float32, 1e-3),
    "flash_attention_2": (torch.bfloat16, 5e-2),
    "varlen": (torch.bfloat16, 5e-2),
}


def run_auto(job: Job) -> None:
    """What "auto" chooses, what the choice costs, and whether a limit by hand is faster."""
    cases: tuple[tuple[str, str, int | None], ...] = job.pick(
        (("0.6B", "GSM8K", None), ("0.6B", "long tail", None), ("0.6B", "long tail", 24 * GIB)),
        (("0.1B", "long tail", 2 * GIB),),
    )
    for shape, data, memory_bytes in cases:
        name = f"{shape} {data}{f' {memory_bytes // GIB} GiB' if memory_bytes else ''}"
        with job.row(name) as row:
            row |= _choose(job, shape, data, memory_bytes)
            is_whole = memory_bytes is None or job.small
            if is_whole:
                by_hand = {limit: _tokens_per_second(job, shape, data, limit) for limit in job.pick(LIMITS, (512,))}
                row["by_hand"] = by_hand
                row["best_over_auto"] = max(by_hand.values()) / row["tokens_per_second"]
            row["ok"] = row["split"] == 0 and (job.small or row.get("best_over_auto", 1.0) <= NEAR)


def _updates(job: Job, shape: str, data: str) -> list[list[models.Sample]]:
    vocabulary = models.shape_of(shape, small=job.small).vocabulary
    return models.updates_of(data, job.pick(128, 8), 4, vocabulary=vocabulary, small=job.small)


def _choose(job: Job, shape: str, data: str, memory_bytes: int | None) -> dict[str, Any]:
    updates = _updates(job, shape, data)
    model = models.llama(shape, torch.bfloat16, job.device, small=job.small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=job.is_cuda)
    gradient = GradientAccumulator(model, planner=Auto(memory_bytes=memory_bytes))
    gradient.reserve_for(optimizer)
    start = job.now()
    gradient.tune(updates[0], losses.next_token)
    tune_seconds = job.now() - start
    job.reset_peak()
    seconds = [_update(job, gradient, optimizer, update) for update in updates]
    plan, fit = gradient.last_plan, gradient.fit
    assert plan is not None
    assert fit is not None
    median = statistics.median(seconds[1:])
    tokens = sum(map(models.num_tokens, updates[1:]))
    return {
        "limit": fit.max_microbatch_tokens, "tune_seconds": tune_seconds, "update_seconds": median,
        "tune_in_updates": tune_seconds / median, "reserved_gib": job.peaks()[1],
        "tokens_per_second": tokens / sum(seconds[1:]), "split": plan.num_split, "microbatches": plan.num_microbatches,
        "predicted_over_measured_seconds": plan.seconds / seconds[-1] if plan.seconds else None,
    }  # fmt: skip


def _update(job: Job, gradient: Any, optimizer: torch.optim.Optimizer, update: list[models.Sample]) -> float:
    start = job.now()
    gradient.forward_backward(update, losses.next_token)
    if gradient.finalize(max_norm=1.0).finite:
        optimizer.step()
    return job.now() - start


def _tokens_per_second(job: Job, shape: str, data: str, limit: int) -> float:
    updates = _updates(job, shape, data)
    model = models.llama(shape, torch.bfloat16, job.device, small=job.small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=job.is_cuda)
    gradient = GradientAccumulator(model, max_microbatch_tokens=limit)
    seconds = [_update(job, gradient, optimizer, update) for update in updates]
    job.release()
    return sum(map(models.num_tokens, updates[1:])) / sum(seconds[1:])


def run_one_row(job: Job) -> None:
    """`OneRow` beside samples that are padded: the gradient, the padding and the time, by attention backend."""
    models.register_varlen_attention()
    for attention, (dtype, limit) in ATTENTION.items():
        if attention != "sdpa" and not job.is_cuda:
            job.write(attention, ok=True, left_out="needs a GPU")
            continue
        with job.row(attention) as row:
            samples = models.texts(16, vocabulary=384)
            model = models.llama("0.1B", dtype, job.device, small=True)
            expected = models.oracle(model.float(), samples)
            try:
                model = models.llama("0.1B", dtype, job.device, small=True, attention=attention)
            except ImportError as error:
                row["left_out"] = str(error)[:120]
                continue
            batching = OneRow(flash_attn_kwargs=attention == "varlen")
            gradient = GradientAccumulator(model, max_microbatch_tokens=640, batching=batching)
            gradient.forward_backward(samples, losses.next_token)
            gradient.finalize()
            row |= models.errors(models.gradients(model), expected)
            row["ok"] = row["whole"] <= limit
    updates = _updates(job, "0.1B", "long tail")
    ways: dict[str, tuple[str, Any]] = {"padded": ("sdpa", None), "one row": ("sdpa", OneRow())}
    if job.is_cuda:
        ways["one row, varlen"] = "varlen", OneRow(flash_attn_kwargs=True)
    for name, (attention, batching) in ways.items():
        with job.row(f"seconds, {name}") as row:
            model = models.llama("0.1B", torch.bfloat16, job.device, small=job.small, attention=attention)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=job.is_cuda)
            gradient = GradientAccumulator(model, max_microbatch_tokens=job.pick(8192, 512), batching=batching)
            row["ms"] = median_ms([_update(job, gradient, optimizer, update) for update in updates][1:])


def run_prepare(job: Job) -> None:
    """Updates whose batches are prepared while the device works, beside those that are not."""
    updates = _updates(job, "0.1B", "GSM8K")
    with job.row("seconds of an update") as row:
        for prepares in (False, True):
            model = models.llama("0.1B", torch.bfloat16, job.device, small=job.small)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=job.is_cuda)
            gradient = GradientAccumulator(model, max_microbatch_tokens=job.pick(8192, 128))
            following = iter([*updates[1:], *updates])
            early: list[Any] = []  # the next update, as prepare() returned it

            def run(
                update: list[models.Sample], gradient: Any = gradient, optimizer: Any = optimizer,
                following: Any = following if prepares else None, early: list[Any] = early,
            ) -> None:  # fmt: skip
                gradient.forward_backward(early.pop() if early else update, losses.next_token)
                if following is not None:
                    early.append(gradient.prepare(next(following), losses.next_token))
                if gradient.finalize(max_norm=1.0).finite:
                    optimizer.step()

            seconds: list[float] = []
            for update in updates:
                start = job.now()
                run(update)
                seconds.append(job.now() - start)
            name = "prepared" if prepares else "unprepared"
            row[f"{name}_ms"] = median_ms(seconds[1:])
            row[name] = profile_updates(job, run, updates[:3])
        row["ratio"] = row["prepared_ms"] / row["unprepared_ms"]
