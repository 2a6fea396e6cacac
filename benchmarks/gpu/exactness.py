"""Exactness on the device: the project's GPU tests, the cells of one rank, and float64 and bfloat16 by wrapper."""

import os
import subprocess
import sys
import warnings
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks import result
from benchmarks.gpu import models
from benchmarks.gpu.job import Job
from megabatch import GradientAccumulator, losses, verify

CUTS: tuple[dict[str, int], ...] = ({"micro_batch_size": 1}, {"max_microbatch_tokens": 320}, {"micro_batch_size": 100})
WRAPPERS = ("plain", "ddp", "fsdp2")
SYNCS = {"plain": ("last",), "ddp": ("last", "every"), "fsdp2": ("last", "every", "gather_once")}
FLOAT64_LIMIT = 1e-12
TEST_MODULES = ("pytest", "hypothesis")
MARGIN_SECONDS = 10.0  # before the section's end, in which it writes its rows
BFLOAT16_LIMIT = 2.0  # times the error of plain torch's uncut gradient


def run_gpu_tests(job: Job) -> None:
    """tests/gpu, as a developer runs it, without the plugins that happen to be installed."""
    if not job.has(*TEST_MODULES):
        return
    with job.row("tests/gpu") as row:
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        timeout = job.seconds_left - MARGIN_SECONDS
        done = subprocess.run(
            command, cwd=result.ROOT, env=environment, capture_output=True, text=True, timeout=timeout
        )
        print(done.stdout, done.stderr)
        lines = done.stdout.strip().splitlines()
        failed = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
        row |= {"ok": done.returncode == 0, "last_line": lines[-1] if lines else "", "failed": failed}


def run_cells(job: Job) -> None:
    """The cells of tests/exact of one rank, their models on the device."""
    if not job.has(*TEST_MODULES):
        return
    from tests.exact.cells import sampled
    from tests.exact.harness import CellRun, run
    from tests.exact.test_exact import check

    models.join_one_rank(job.device)
    cells = [cell for cell in sampled() if cell.world == 1 and cell.wrapper in WRAPPERS and cell.evidence != "refused"]
    cells = cells[:: job.pick(1, 24)]
    counts: dict[str, dict[str, Any]] = {}
    for cell in cells:
        if job.seconds_left < MARGIN_SECONDS:
            break
        kind = counts.setdefault(f"{cell.wrapper} {cell.evidence}", {"cells": 0, "worst": 0.0, "failed": []})
        kind["cells"] += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's own, about one rank
                value = run(CellRun(cell, job.device))
            kind["worst"] = max(kind["worst"], value["gradient"])
            check(cell, {"value": value})
        except Exception as error:
            kind["failed"].append(f"{cell.name}: {type(error).__name__}: {error}"[:200])
    for name, kind in counts.items():
        job.write(name, ok=not kind["failed"], **kind | {"failed": kind["failed"][:4]})
    job.write("cells", ok=True, ran=sum(kind["cells"] for kind in counts.values()), of=len(cells))


def run_wrappers(job: Job) -> None:
    """float64 and bfloat16, plain, DDP and FSDP2 over one rank, every cut, beside plain torch of the whole update."""
    samples = models.texts(24)
    with job.row("float64 plain torch, device against CPU") as row:
        expected = models.oracle(models.gpt2(torch.float64, torch.device("cpu")), samples)
        row |= models.errors(models.oracle(models.gpt2(torch.float64, job.device), samples), expected)
        row["ok"] = row["worst"] <= FLOAT64_LIMIT
    for wrapper in WRAPPERS:
        for sync in SYNCS[wrapper]:
            with job.row(f"float64 {wrapper} {sync}") as row:
                row["worst"] = max(_float64_error(job, wrapper, sync, cut, expected) for cut in CUTS)
                row["ok"] = row["worst"] <= FLOAT64_LIMIT
    for wrapper in WRAPPERS:
        with job.row(f"verify {wrapper}") as row:
            verdict = verify(
                models.wrapped(models.gpt2(torch.float32, job.device), wrapper), losses.next_token, samples[:8]
            )
            row |= {"ok": verdict.ok, "worst": verdict.worst}
    _run_bfloat16(job)


def _float64_error(job: Job, wrapper: str, sync: str, cut: dict[str, int], expected: models.Gradients) -> float:
    """Return the worst error of the second of two updates, each of two calls."""
    samples = models.texts(24)
    model = models.wrapped(models.gpt2(torch.float64, job.device), wrapper)
    gradient = GradientAccumulator(model, sync=sync, **cut)
    for _ in range(2):
        gradient.forward_backward(samples[:9], losses.next_token)
        gradient.forward_backward(samples[9:], losses.next_token)
        gradient.finalize(max_norm=1e9)
    return models.errors(models.gradients(model), expected)["worst"]


def _run_bfloat16(job: Job) -> None:
    """bfloat16 weights against the float32 gradient of the same weights, beside the error of uncut plain torch."""
    samples = models.texts(24, vocabulary=384)
    reference = models.llama("0.1B", torch.bfloat16, job.device, small=job.small)
    weights = {name: value.detach().cpu() for name, value in reference.state_dict().items()}
    uncut = models.oracle(reference, samples)
    expected = models.oracle(reference.float(), samples)  # TF32 is off by default
    plain_error = models.errors(uncut, expected)["whole"]
    del reference
    job.write("bfloat16 plain torch, uncut", ok=True, whole=plain_error)
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    kinds: dict[str, tuple[str, torch.dtype, dict[str, Any], dict[str, Any]]] = {
        "plain": ("plain", torch.bfloat16, {}, {}),
        "plain, added in float32": ("plain", torch.bfloat16, {}, {"accumulate_dtype": torch.float32}),
        "ddp": ("ddp", torch.bfloat16, {}, {}),
        "fsdp2": ("fsdp2", torch.bfloat16, {}, {}),
        "fsdp2, float32 weights": ("fsdp2", torch.float32, {"mp_policy": mixed}, {}),
    }
    for name, (wrapper, dtype, wrap_options, options) in kinds.items():
        with job.row(f"bfloat16 {name}") as row:
            by_cut: list[float] = []
            for cut in CUTS:
                model = models.llama("0.1B", dtype, job.device, small=job.small)
                model.load_state_dict(weights)
                model = models.wrapped(model, wrapper, **wrap_options)
                gradient = GradientAccumulator(model, **cut, **options)
                gradient.forward_backward(samples, losses.next_token)
                gradient.finalize()
                by_cut.append(models.errors(models.gradients(model), expected)["whole"])
                del model, gradient
                job.release()
            row |= {"whole": max(by_cut), "by_cut": by_cut, "over_plain": max(by_cut) / plain_error}
            row["ok"] = row["over_plain"] <= BFLOAT16_LIMIT
