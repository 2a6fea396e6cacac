"""How far bfloat16 weights get with AdamW, as torch steps them and with their low bits, beside float32.

A matrix gets the same gradients in each way: a constant direction plus noise, rounded to bfloat16. "path" is the
distance from the start over that of float32's weights; "error" is the distance from float32's weights over the same.
Seconds are those of one thread of the processor, the median of a way's steps. Writes
benchmarks/results/bf16_step_*.json.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks import result
from megabatch.optim import LowBits

SIZE, NUM_STEPS, NUM_TIMED, LARGE = 512, 100, 15, 2048
WEIGHT, NOISE = 0.02, 1.0  # standard deviation of a weight; of a gradient, whose direction has 1
RATES = (1e-5, 1e-4)
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


def trained(way: str, lr: float, size: int, num_steps: int) -> tuple[Tensor, Tensor, Optimizer, list[float]]:
    """Return weights at the start and the end, in float32, the optimizer, and seconds of each step."""
    dtype, make = WAYS[way]
    generator = torch.Generator().manual_seed(0)
    start = (WEIGHT * torch.randn(size, size, generator=generator)).bfloat16()
    direction = torch.randn(size, size, generator=generator)
    weight = nn.Parameter(start.to(dtype, copy=True))
    optimizer, seconds = make(weight, lr), list[float]()
    for _ in range(num_steps):
        weight.grad = (direction + NOISE * torch.randn(size, size, generator=generator)).bfloat16().to(dtype)
        began = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - began)
    end = optimizer.master_weight(weight) if isinstance(optimizer, LowBits) else weight.detach().float()
    return start.float(), end, optimizer, seconds


def bytes_a_weight(optimizer: Optimizer) -> float:
    """Of the weight and its states."""
    (weight,) = optimizer.param_groups[0]["params"]
    states = [each.nbytes for each in optimizer.state[weight].values() if isinstance(each, Tensor) and each.ndim]
    return (weight.nbytes + sum(states)) / weight.numel()


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for lr in RATES:
        for way in WAYS:
            _, wanted, *_ = trained("float32", lr, SIZE, NUM_STEPS)
            start, end, optimizer, _ = trained(way, lr, SIZE, NUM_STEPS)
            length = (wanted - start).norm()
            found.append({
                "lr": lr, "way": way, "path": round(float((end - start).norm() / length), 3),
                "error": round(float((end - wanted).norm() / length), 4), "bit_equal": torch.equal(end, wanted),
                "moved": round(float((end != start).float().mean()), 3), "bytes_a_weight": bytes_a_weight(optimizer),
            })  # fmt: skip
    return found


def main() -> None:
    torch.set_num_threads(1)
    origin = result.made_with()
    seconds = {way: statistics.median(trained(way, 1e-4, LARGE, NUM_TIMED)[3][3:]) for way in WAYS}
    found = {
        "claim": "with its 16 low bits, bfloat16 moves as far as float32, bit for bit",
        "setting": f"{SIZE} x {SIZE}, {NUM_STEPS} steps, foreach AdamW; seconds: {LARGE} x {LARGE}",
        "rows": rows(),
        "seconds_a_step": {way: round(each, 4) for way, each in seconds.items()},
        **origin,
    }
    for row in (*found["rows"], found["seconds_a_step"]):
        print(row)
    result.write(result.dated("bf16_step"), found)


if __name__ == "__main__":
    main()
