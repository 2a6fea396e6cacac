"""AdamW on bfloat16 weights, as torch steps them and with their low bits, beside float32.

A matrix gets the same gradients in each way: a constant direction plus noise, rounded to bfloat16. "path" is the
distance from the start over that of float32's weights; "error" is the distance from float32's weights over the same.
Seconds are those of one thread of the processor, the median of the steps of a way; the ways take turns. "held_out" is
the loss of recipes/stdlib.toml on its held-out samples after some updates. Writes
benchmarks/results/bf16_step_*.json, in ten minutes of one thread.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks import result
from megabatch.optim import LowBits

SIZE, NUM_STEPS, NUM_TIMED, LARGE = 512, 100, 15, 2048
WEIGHT, NOISE = 0.02, 1.0  # standard deviation of a weight; of a gradient, whose direction has 1
RATES = (1e-5, 1e-4)
NUM_UPDATES, RECIPE_RATE = 200, 1e-4  # of the recipe
RECIPES = {  # way → overrides
    "float32": [],
    "bfloat16": ["--model.dtype=bfloat16", "--optim.master=none"],
    "low bits": ["--model.dtype=bfloat16"],
}
Make = Callable[[Tensor, float], Optimizer]
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.95), "weight_decay": 0.0, "foreach": True}


def torchs(parameter: Tensor, lr: float) -> Optimizer:
    return AdamW([parameter], lr=lr, **OPTIONS)


WAYS: dict[str, tuple[torch.dtype, Make]] = {
    "float32": (torch.float32, torchs),
    "bfloat16": (torch.bfloat16, torchs),
    "low bits": (torch.bfloat16, lambda *given: LowBits(torchs(*given))),
    "low bits, bfloat16 states": (
        torch.bfloat16,
        lambda *given: LowBits(torchs(*given), state_dtype=torch.bfloat16),
    ),
}


def trained(way: str, lr: float, size: int, num_steps: int) -> tuple[Tensor, Tensor, Optimizer]:
    """Return weights at the start and the end, in float32, and the optimizer."""
    dtype, make = WAYS[way]
    generator = torch.Generator().manual_seed(0)
    start = (WEIGHT * torch.randn(size, size, generator=generator)).bfloat16()
    direction = torch.randn(size, size, generator=generator)
    weight = nn.Parameter(start.to(dtype, copy=True))
    optimizer = make(weight, lr)
    for _ in range(num_steps):
        weight.grad = (direction + NOISE * torch.randn(size, size, generator=generator)).bfloat16().to(dtype)
        optimizer.step()
    end = optimizer.master_weight(weight) if isinstance(optimizer, LowBits) else weight.detach().float()
    return start.float(), end, optimizer


def bytes_a_weight(optimizer: Optimizer) -> float:
    """Return the bytes of a weight and its states."""
    (weight,) = optimizer.param_groups[0]["params"]
    states = [each.nbytes for each in optimizer.state[weight].values() if isinstance(each, Tensor) and each.ndim]
    return (weight.nbytes + sum(states)) / weight.numel()


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for lr in RATES:
        for way in WAYS:
            _, wanted, _ = trained("float32", lr, SIZE, NUM_STEPS)
            start, end, optimizer = trained(way, lr, SIZE, NUM_STEPS)
            length = (wanted - start).norm()
            found.append({
                "lr": lr, "way": way, "path": round(float((end - start).norm() / length), 3),
                "error": round(float((end - wanted).norm() / length), 4), "bit_equal": torch.equal(end, wanted),
                "moved": round(float((end != start).float().mean()), 3), "bytes_a_weight": bytes_a_weight(optimizer),
            })  # fmt: skip
    return found


def seconds_a_step() -> dict[str, float]:
    """Return the median seconds of a step by way. The ways take turns, since the machine is not alone."""
    gradient = torch.randn(LARGE, LARGE, generator=torch.Generator().manual_seed(0))
    made: dict[str, tuple[nn.Parameter, Optimizer, list[float]]] = {}
    for way, (dtype, make) in WAYS.items():
        weight = nn.Parameter((WEIGHT * gradient).to(dtype))
        made[way] = weight, make(weight, RATES[1]), []
    for _ in range(NUM_TIMED):
        for weight, optimizer, seconds in made.values():
            weight.grad = gradient.to(weight.dtype)
            began = time.process_time()
            optimizer.step()
            seconds.append(time.process_time() - began)
    return {way: round(statistics.median(seconds[3:]), 4) for way, (_, _, seconds) in made.items()}


def held_out(way: str) -> float:
    """Return the recipe's held-out loss after its updates."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        keys = {
            "run.folder": folder, "run.max_steps": NUM_UPDATES, "run.save_every": NUM_UPDATES, "eval.every": "none",
            "optim.lr": RECIPE_RATE, "optim.schedule": "constant",
        }  # fmt: skip
        command = [sys.executable, "-m", "megabatch", "train", "recipes/stdlib.toml", *RECIPES[way]]
        command += [f"--{key}={value}" for key, value in keys.items()]
        subprocess.run(command, env=os.environ | quiet, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return round([row["eval_loss"] for row in rows if "eval_loss" in row][-1], 4)


def main() -> None:
    torch.set_num_threads(1)
    origin = result.made_with()
    found = {
        "claim": "with its 16 low bits, bfloat16 moves as far as float32, bit for bit",
        "setting": f"{SIZE} x {SIZE}, {NUM_STEPS} steps, foreach AdamW; seconds: {LARGE} x {LARGE}",
        "rows": rows(),
        "seconds_a_step": seconds_a_step(),
        "held_out": {
            "setting": f"recipes/stdlib.toml, {NUM_UPDATES} updates, lr {RECIPE_RATE:g}",
            **{way: held_out(way) for way in RECIPES},
        },
        **origin,
    }
    for row in (*found["rows"], found["seconds_a_step"], found["held_out"]):
        print(row)
    result.write(result.dated("bf16_step"), found)


if __name__ == "__main__":
    main()
