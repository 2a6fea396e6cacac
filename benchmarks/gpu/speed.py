"""Tokens a second of megabatch and its peers on the same updates, each at its best micro batch size, in turns."""

import contextlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import hardware, result
from benchmarks.gpu import models
from benchmarks.gpu.job import Job, median_ms
from benchmarks.llama import flops_per_token
from megabatch import GradientAccumulator, losses

DTYPE = torch.bfloat16
LEARNING_RATE = 1e-5
MAX_NORM = 1.0
MARGIN_SECONDS = 20.0  # with less left, measurements are not repeated
Updates = list[list[models.Sample]]
Run = Callable[[Updates], list[float]]  # returns the seconds of each update


class Contestant(NamedTuple):
    """A way to make the updates, and the sizes of a microbatch that are tried for it."""

    make: Callable[[Job, Any, int], Run]
    sizes: tuple[int, ...]


def run_loops(job: Job) -> None:
    """Plain loops and megabatch on two data sets and two models, the search first and then the best ones in turns."""
    rows = job.pick((4, 8, 16, 32, 64), (2, 8))
    caps = job.pick((4096, 8192, 16384, 32768), (128, 256))
    contestants = {
        "plain": Contestant(partial(_loop, sorts=False), rows),
        "sorted": Contestant(partial(_loop, sorts=True), rows),
        "megabatch": Contestant(_megabatch, caps),
    }
    for shape in job.pick(("0.1B", "0.6B"), ("0.1B",)):
        for data in models.LENGTHS:
            _compare(job, shape, data, contestants)


def run_trainers(job: Job) -> None:
    """transformers' Trainer, its batch_rebalance, and MegabatchTrainer, on 0.1B and the lengths of GSM8K."""
    if not job.has("accelerate", "datasets", "pandas"):
        return
    rows = job.pick((8, 16, 32, 64), (2, 8))
    contestants = {
        "Trainer": Contestant(partial(_trainer, strategy="sequential"), rows),
        "Trainer, batch_rebalance": Contestant(partial(_trainer, strategy="batch_rebalance"), rows),
        "MegabatchTrainer": Contestant(partial(_trainer, strategy="megabatch"), job.pick((8192, 16384), (128,))),
    }
    _compare(job, "0.1B", "GSM8K", contestants)


def _compare(job: Job, shape: str, data: str, contestants: dict[str, Contestant]) -> None:
    sizes = models.shape_of(shape, small=job.small)
    updates = models.updates_of(data, job.pick(64, 8), job.pick(7, 3), vocabulary=sizes.vocabulary, small=job.small)
    model = models.llama(shape, DTYPE, job.device, small=job.small)
    best: dict[str, Run] = {}
    for name, contestant in contestants.items():
        with job.row(f"{shape} {data}: search, {name}") as row:
            medians: dict[int, float] = {}
            for size in contestant.sizes:
                try:
                    seconds = contestant.make(job, model, size)(updates[:3])
                except torch.OutOfMemoryError:
                    break
                finally:
                    model.zero_grad(set_to_none=True)
                    job.release()
                medians[size] = statistics.median(seconds[1:])
            chosen = min(medians, key=medians.__getitem__)
            best[name] = contestant.make(job, model, chosen)
            row |= {"best": chosen, "ms": {size: round(1000 * each, 2) for size, each in medians.items()}}
    with job.row(f"{shape} {data}") as row:
        row |= _in_turns(job, shape, data, updates, best)
        for name, run in best.items():
            with _counted_tokens(model) as computed:
                run(updates)
            row[name]["computed_over_real"] = round(sum(computed) / sum(map(models.num_tokens, updates)), 3)
    model.zero_grad(set_to_none=True)
    del model, best
    job.release()


def _in_turns(job: Job, shape: str, data: str, updates: Updates, runs: dict[str, Run]) -> dict[str, Any]:
    """Return tokens a second, MFU and peaks of each, and how many times as long each takes as megabatch."""
    sizes = models.shape_of(shape, small=job.small)
    warmup = 2
    timed = updates[warmup:]
    tokens = sum(models.num_tokens(update) for update in timed)
    mean_tokens = tokens // sum(map(len, timed))
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks: dict[str, float] = dict.fromkeys(runs, 0.0)
    for repeat in range(job.pick(3, 1)):
        if repeat and job.seconds_left < MARGIN_SECONDS:
            break
        for name in list(runs)[:: -1 if repeat % 2 else 1]:
            job.reset_peak()
            seconds[name].append(sum(runs[name](updates)[warmup:]))
            peaks[name] = max(peaks[name], job.peaks()[1])
    peak_flops, _ = hardware.peak_flops(hardware.name(), DTYPE)
    found: dict[str, Any] = {}
    for name, values in seconds.items():
        rate = tokens / statistics.median(values)
        mfu = rate * flops_per_token(sizes, mean_tokens) / peak_flops if peak_flops else None
        found[name] = {
            "tokens_per_second": round(rate, 1), "repeats_seconds": values, "mfu": mfu, "reserved_gib": peaks[name],
        }  # fmt: skip
    ours = next(name for name in found if "mega" in name.lower())
    for values in found.values():
        values["times_ours"] = round(found[ours]["tokens_per_second"] / values["tokens_per_second"], 3)
    return {"mean_tokens": mean_tokens, **found}


@contextlib.contextmanager
def _counted_tokens(model: Any) -> Generator[list[int]]:
    """Count the tokens of each forward, with padding."""
    computed: list[int] = []

    def count(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else arguments[0]
        computed.append(ids.numel())

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield computed
    finally:
        handle.remove()


def _loop(job: Job, model: Any, rows: int, *, sorts: bool) -> Run:
    """Plain torch: the sum over targets, divided by their number. In arrival order with a mask, or sorted without."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=job.is_cuda)

    def run_update(update: list[models.Sample]) -> None:
        ordered = sorted(update, key=lambda sample: len(sample["input_ids"])) if sorts else update
        total = models.num_targets(update)
        for start in range(0, len(ordered), rows):
            batch = models.moved(models.padded(ordered[start : start + rows], mask=not sorts), job.device)
            (models.sum_of_losses(model, batch) / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return partial(_timed, job, run_update)


def _megabatch(job: Job, model: Any, cap: int) -> Run:
    """The loop of the README."""
    longest = job.pick(models.MAX_TOKENS, cap)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=job.is_cuda)
    gradient = GradientAccumulator(model, max_microbatch_tokens=max(cap, longest))

    def run_update(update: list[models.Sample]) -> None:
        gradient.forward_backward(update, losses.next_token)
        if gradient.finalize(max_norm=MAX_NORM).finite:
            optimizer.step()

    return partial(_timed, job, run_update)


def _timed(job: Job, run_update: Callable[[list[models.Sample]], None], updates: Updates) -> list[float]:
    seconds: list[float] = []
    for update in updates:
        start = job.now()
        run_update(update)
        seconds.append(job.now() - start)
    return seconds


def _trainer(job: Job, model: Any, size: int, *, strategy: str) -> Run:
    """Trainer over the updates in their order, with nothing written and nothing logged."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from megabatch.integrations.transformers import MegabatchTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.times.append(job.now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.times.append(job.now())

    class InOrder(Trainer):
        def _get_train_sampler(self, *arguments: Any) -> Any:
            sampler: Any = super()._get_train_sampler(*arguments)
            sampler.shuffle = False  # an update keeps the samples that are drawn for it
            return sampler

    is_ours = strategy == "megabatch"

    def run(updates: Updates) -> list[float]:
        rows = [{key: value.tolist() for key, value in sample.items()} for update in updates for sample in update]
        micro = 8 if is_ours else size
        clock = Clock()
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, per_device_train_batch_size=micro, gradient_accumulation_steps=len(updates[0]) // micro,
                max_steps=len(updates), logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
                optim="adamw_torch_fused" if job.is_cuda else "adamw_torch", learning_rate=LEARNING_RATE,
                max_grad_norm=MAX_NORM, use_cpu=not job.is_cuda, remove_unused_columns=False,
                train_sampling_strategy="sequential" if is_ours else strategy,
            )  # fmt: skip
            options: dict[str, Any] = {"max_microbatch_tokens": size} if is_ours else {}
            kind: Any = MegabatchTrainer if is_ours else InOrder if strategy == "batch_rebalance" else Trainer
            trainer = kind(
                model, arguments, data_collator=models.padded, train_dataset=rows, callbacks=[clock], **options
            )
            trainer.train()
        return [after - before for before, after in zip(clock.times[:-1], clock.times[1:], strict=True)]

    return run


def run_one_microbatch(job: Job) -> None:
    """An update of one microbatch: plain torch and megabatch, the device's time and the host's."""
    sizes = job.pick((("0.1B", 8, 128), ("0.1B", 32, 512), ("0.6B", 8, 1024)), (("0.1B", 8, 32),))
    for shape, rows, tokens in sizes:
        with job.row(f"{shape} {rows}x{tokens}") as row:
            row |= _one_microbatch(job, shape, rows, tokens)


def _one_microbatch(job: Job, shape: str, rows: int, tokens: int) -> dict[str, Any]:
    models_of_ways = [models.llama(shape, DTYPE, job.device, small=job.small) for _ in range(2)]
    plain_model, our_model = models_of_ways
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=job.is_cuda) for model in models_of_ways
    ]
    ids = torch.randint(384, (rows, tokens), generator=torch.Generator().manual_seed(0))
    gradient = GradientAccumulator(our_model, micro_batch_size=rows)

    def plain() -> None:
        optimizers[0].zero_grad(set_to_none=True)
        batch = models.moved({"input_ids": ids}, job.device)
        logits = plain_model(**batch).logits[:, :-1].float()
        F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(plain_model.parameters(), MAX_NORM)
        optimizers[0].step()

    def ours(*, reads_finite: bool) -> None:
        gradient.forward_backward({"input_ids": ids, "labels": ids}, losses.next_token)
        finalized = gradient.finalize(max_norm=MAX_NORM)
        if not reads_finite or finalized.finite:
            optimizers[1].step()

    ways = {"plain": plain, "megabatch": partial(ours, reads_finite=True), "unread": partial(ours, reads_finite=False)}
    seconds = job.in_turns(ways, warmup=job.pick(5, 1), repeats=job.pick(30, 3))
    milliseconds = {f"{name}_ms": median_ms(values) for name, values in seconds.items()}
    ratios = {f"{name}_over_plain": round(milliseconds[f"{name}_ms"] / milliseconds["plain_ms"], 4) for name in ways}
    return milliseconds | ratios


def run_needless_pass(job: Job) -> None:
    """benchmarks.needless_pass: Llama 8B, some 50 GiB."""
    with job.row("benchmarks.needless_pass") as row:
        out = job.folder / "needless_pass.json"
        words = ["--quick"] if job.small else ["--repeats", "5"]
        command = [sys.executable, "-m", "benchmarks.needless_pass", *words, "--out", str(out)]
        done = subprocess.run(command, cwd=result.ROOT, capture_output=True, text=True, timeout=job.seconds_left - 3)
        print(done.stdout, done.stderr[-2000:])
        row |= {"ok": done.returncode == 0, "said": done.stdout.strip().splitlines()[-7:]}
