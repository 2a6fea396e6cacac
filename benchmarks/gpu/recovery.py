"""Out of memory inside an update, where the host waits, and a run that is killed and resumed."""

import contextlib
import json
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from benchmarks import result
from benchmarks.gpu import models
from benchmarks.gpu.job import GIB, Job, Row
from megabatch import GradientAccumulator, Learner, losses

FLOAT32_LIMIT = 1e-4


def run_out_of_memory(job: Job) -> None:
    """A microbatch that does not fit runs again in parts, and the gradient stays the same."""
    rows, tokens = job.pick((64, 1024), (8, 80))
    generator = torch.Generator().manual_seed(0)
    lengths = [tokens - 7 * (index % 9) for index in range(rows)]
    samples = [
        {"input_ids": ids, "labels": ids} for ids in (torch.randint(1, 384, (n,), generator=generator) for n in lengths)
    ]
    with job.row("reference") as row:
        model = models.llama("0.1B", torch.float32, job.device, small=job.small)
        gradient = GradientAccumulator(model, micro_batch_size=2)
        gradient.forward_backward(samples, losses.next_token)
        gradient.finalize()
        expected = models.gradients(model)
        row["samples"] = len(samples)
        del model, gradient
    for wrapper in ("plain", "ddp"):
        with job.row(f"another owner holds the memory, {wrapper}") as row, _held_memory(job):
            _compare_updates(job, row, wrapper, samples, expected, micro_batch_size=rows)
    with job.row("the process has a limit") as row, _limited_memory(job):
        _compare_updates(job, row, "plain", samples, expected, micro_batch_size=rows)
    with job.row('the process has a limit, "auto"') as row, _limited_memory(job):
        _compare_updates(job, row, "plain", samples, expected, max_microbatch_tokens="auto")


@contextlib.contextmanager
def _held_memory(job: Job) -> Generator[None]:
    """Leave 10 GiB of the device, so that cudaMalloc itself fails."""
    held = None
    if job.is_cuda:
        free = torch.cuda.mem_get_info()[0] - 10 * GIB
        held = torch.empty(max(0, free), dtype=torch.uint8, device=job.device)
    try:
        yield
    finally:
        del held
        job.release()


@contextlib.contextmanager
def _limited_memory(job: Job) -> Generator[None]:
    """Let torch's allocator use 9 GiB."""
    if not job.is_cuda:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(9 * GIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _compare_updates(
    job: Job, row: Row, wrapper: str, samples: list[models.Sample], expected: models.Gradients, **limit: Any
) -> None:
    """Make two updates. Only the first may run out of memory, and only where there is a GPU."""
    model = models.wrapped(models.llama("0.1B", torch.float32, job.device, small=job.small), wrapper)
    gradient = GradientAccumulator(model, **limit)
    splits, worst = [], 0.0
    for _ in range(2):
        gradient.forward_backward(samples, losses.next_token)
        gradient.finalize()
        assert gradient.last_plan is not None
        splits.append(gradient.last_plan.num_split)
        worst = max(worst, models.errors(models.gradients(model), expected)["whole"])
    may_split = job.is_cuda and "micro_batch_size" in limit
    row |= {"split": splits, "error": worst, "oom_limit": str(gradient.oom_limit)}
    row["ok"] = worst <= FLOAT32_LIMIT and splits[1] == 0 and (splits[0] > 0) == may_split


def run_waits(job: Job) -> None:
    """Where an update makes the host wait for the device, by file and line; and how busy the device is."""
    vocabulary = models.shape_of("0.1B", small=job.small).vocabulary
    updates = models.updates_of("GSM8K", job.pick(64, 8), 6, vocabulary=vocabulary, small=job.small)
    for name, make in _ways(job).items():
        with job.row(name) as row:
            run = make()
            for update in updates[:3]:
                run(update)
            job.now()
            with _counted_waits(job) as places:
                run(updates[3])
            allowed = 1 if "finite" in name or name == "Learner" else 0
            row |= {"waits": sum(places.values()), "allowed": allowed, "places": dict(places.most_common(6))}
            row["ok"] = row["waits"] <= allowed
            del run
    with job.row("three updates, profiled") as row:
        run = _accumulate(job, "plain", reads_finite=True)
        for update in updates[:2]:
            run(update)
        row |= profile_updates(job, run, updates[2:5])


def _ways(job: Job) -> dict[str, Callable[[], Callable[[list[models.Sample]], Any]]]:
    return {
        "plain, nothing is read": lambda: _accumulate(job, "plain"),
        "plain, finite is read": lambda: _accumulate(job, "plain", reads_finite=True),
        "ddp, nothing is read": lambda: _accumulate(job, "ddp"),
        "fsdp2, nothing is read": lambda: _accumulate(job, "fsdp2"),
        "Learner": lambda: _learn(job),
        "microbatch() in a loop of the user's": lambda: _loop(job),
    }


def _model_and_optimizer(job: Job, wrapper: str) -> tuple[Any, torch.optim.Optimizer]:
    model = models.wrapped(models.llama("0.1B", torch.bfloat16, job.device, small=job.small), wrapper)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def _accumulate(job: Job, wrapper: str, *, reads_finite: bool = False) -> Callable[[list[models.Sample]], Any]:
    model, optimizer = _model_and_optimizer(job, wrapper)
    gradient = GradientAccumulator(model, max_microbatch_tokens=job.pick(8192, 128))

    def run(update: list[models.Sample]) -> None:
        gradient.forward_backward(update, losses.next_token)
        finalized = gradient.finalize(max_norm=1.0)
        if not reads_finite or finalized.finite:
            optimizer.step()

    return run


def _learn(job: Job) -> Callable[[list[models.Sample]], Any]:
    model, optimizer = _model_and_optimizer(job, "plain")
    gradient = GradientAccumulator(model, max_microbatch_tokens=job.pick(8192, 128))
    learner = Learner(model, optimizer, gradient, max_norm=1.0)

    def run(update: list[models.Sample]) -> None:
        learner.forward_backward(update, losses.next_token)
        learner.optim_step()

    return run


def _loop(job: Job) -> Callable[[list[models.Sample]], Any]:
    model, _ = _model_and_optimizer(job, "plain")
    gradient = GradientAccumulator(model)

    def run(update: list[models.Sample]) -> None:
        parts = [update[start : start + 8] for start in range(0, len(update), 8)]
        for index, part in enumerate(parts):
            batch = models.moved(models.padded(part, mask=False), job.device)
            count = (batch["labels"][:, 1:] != models.IGNORED).sum()
            with gradient.microbatch(index, of=len(parts), sum_over=count) as microbatch:
                microbatch.scale(models.sum_of_losses(model, batch)).backward()
        gradient.finalize(max_norm=1.0)

    return run


@contextlib.contextmanager
def _counted_waits(job: Job) -> Generator[Counter[str]]:
    """Count the operations that wait for the device, as torch's sync debug mode warns of them."""
    places: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if job.is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if job.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
            for warning in caught:
                if "called a synchronizing" in str(warning.message):
                    places[f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"] += 1


def profile_updates(job: Job, run: Callable[[list[models.Sample]], Any], updates: list[list[models.Sample]]) -> Row:
    """Return the share of the time in which a kernel runs, and the copies that overlap with one."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.is_cuda else [])]
    with profile(activities=activities) as profiler:
        start = job.now()
        for update in updates:
            run(update)
        seconds = job.now() - start
    if not job.is_cuda:
        return {"wall_ms": round(1000 * seconds, 1)}
    kernels: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    for event in profiler.events() or []:
        if event.device_type != torch.autograd.DeviceType.CUDA or event.is_user_annotation:
            continue
        span = event.time_range.start, event.time_range.end
        (copies if "memcpy htod" in event.name.lower() else kernels).append(span)
    busy, end = 0.0, 0.0
    for begin, stop in sorted(kernels):
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    overlapping = sum(any(a < stop and begin < b for a, b in kernels) for begin, stop in copies)
    return {
        "wall_ms": round(1000 * seconds, 1), "busy": round(busy / 1e6 / seconds, 4), "copies": len(copies),
        "copies_beside_kernels": overlapping,
    }  # fmt: skip


def run_training(job: Job) -> None:
    """recipes/stdlib.toml from end to end: as it is; and, with kernels that give the same bits, once killed."""
    if not job.has("pydantic", "tyro", "tomli_w", "datasets", "pandas", "pyarrow"):
        return
    steps = job.pick(200, 12)
    keys = [f"--run.max_steps={steps}", f"--run.save_every={job.pick(25, 4)}"]
    # The backward of sdpa adds parts in any order on a GPU. Eager attention does not, and needs a square of the length.
    same_bits = ["--model.attention=eager", *job.pick(["--data.max_sample_tokens=4096"], [])]
    if job.small:
        keys += [
            "--update.global_batch_size=2", "--update.max_microbatch_tokens=2048", "--data.max_sample_tokens=1024",
            "--eval.num_samples=4", "--eval.every=6", "--model.config.hidden_size=16",
            "--model.config.intermediate_size=16",
        ]  # fmt: skip
    recipe = result.ROOT / "recipes" / "stdlib.toml"
    for name, more in (("recipe", []), ("whole", same_bits)):
        with job.row(name) as row:
            _train(job, recipe, f"--run.folder={job.folder / name}", *keys, *more)
            rows = _metrics(job.folder / name)
            row |= {"updates": len(rows), "first_loss": rows[0]["loss"], "last_loss": rows[-1]["loss"]}
            row["tokens_per_second"] = rows[-1].get("tokens_per_second")
            row["ok"] = len(rows) == steps and (job.folder / name / "report.html").exists()
    folder = job.folder / "killed"
    with job.row("killed and resumed") as row:
        row["killed_at"] = _kill_at(job, recipe, folder, steps // 3, [*keys, *same_bits])
        _train(job, folder)
        row |= {"updates": len(_metrics(folder)), "ok": len(_metrics(folder)) == steps}
    with job.row("killed beside whole") as row:
        pairs = list(zip(_metrics(job.folder / "whole"), _metrics(folder), strict=True))
        equal = [all(one.get(key) == other.get(key) for key in ("loss", "grad_norm")) for one, other in pairs]
        row |= {"ok": sum(equal) == steps, "equal_rows": sum(equal), "of": len(equal)}


def _train(job: Job, *words: Any) -> None:
    command = [sys.executable, "-m", "megabatch", "train", *map(str, words)]
    done = subprocess.run(command, cwd=job.folder, capture_output=True, text=True, timeout=max(1.0, job.seconds_left))
    print(done.stdout[-2000:], done.stderr[-2000:])
    if done.returncode:
        raise RuntimeError(f"megabatch train ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def _kill_at(job: Job, recipe: Path, folder: Path, row: int, keys: list[str]) -> int:
    """Kill a run once it has written so many rows. Return the rows that it has written."""
    command = [sys.executable, "-m", "megabatch", "train", str(recipe), f"--run.folder={folder}", *keys]
    process = subprocess.Popen(command, cwd=job.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and len(_metrics(folder)) < row:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return len(_metrics(folder))


def _metrics(folder: Path) -> list[Row]:
    """Return the rows of updates, without those of evaluations and without a line that is not finished."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in map(json.loads, lines) if "set" not in row]
