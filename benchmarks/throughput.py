"""`megabatch train` on a Llama of 1.2 billion parameters, beside a loop written by hand: tokens a second.

Each is a process of its own, in turns, on one device: the trainer on a recipe, with all that it writes; and plain
PyTorch, which takes each microbatch's mean over their number, clips the norm to 1 and steps a fused AdamW. The same
model, in float32 and computed in bfloat16 by autocast, the same rows of random tokens (which the trainer shuffles), the
same rows at a time. Tokens a second are from the end of an update to the end of the next, a process's the median after
the first few updates, and here the median of processes.

    python -m benchmarks.throughput            # on a GPU of 80 GiB: 1.2B; on the CPU a small one, a minute

The share of the device's arithmetic (MFU) is PaLM's, appendix B: (6 N + 12 L D T) x tokens a second / peak, with N
parameters without the input's embedding (a tied matrix is the head's, and counts), L layers, D hidden features and T
tokens of a row. A checkpoint at the trainer's end takes 15 GB of TMPDIR. Writes benchmarks/results/throughput_*.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import tomli_w
import torch
from torch import Tensor

from benchmarks import hardware, result
from benchmarks.llama import Shape, config_of, flops_per_token, llama, sizes_of

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
ROWS, METRICS = "rows.npy", "metrics.jsonl"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
FORMULA = "(6 * parameters_without_input + 12 * layers * hidden * tokens) * tokens_per_second / peak_flops_per_second"
ASKED = ("tokens", "update_rows", "micro_rows", "updates", "repeats")


class Size(NamedTuple):
    shape: Shape
    tokens: int  # of a row
    update_rows: int
    micro_rows: int
    updates: int
    left_out: int  # first updates, which warm up
    mixed: bool  # computed in bfloat16
    repeats: int


SIZES = {
    # Microbatches of 4: 40 GiB for the trainer and, with all of its logits, 54 for the loop, by `megabatch plan`.
    "1b": Size(Shape(128_256, 2048, 8192, 16, 32, 8, tied=True), 2048, 32, 4, 20, 5, True, 3),
    "small": Size(Shape(512, 320, 960, 8, 10, 5, tied=True), 256, 8, 2, 8, 2, False, 1),
    "quick": Size(Shape(512, 32, 96, 2, 4, 2, tied=True), 32, 4, 2, 4, 1, True, 1),
}


def rows(folder: str) -> list[dict[str, Tensor]]:
    """The samples of a recipe."""
    return [{"input_ids": row, "labels": row} for row in torch.from_numpy(np.load(Path(folder) / ROWS))]


def recipe_of(size: Size, folder: Path) -> dict[str, Any]:
    """What the trainer runs."""
    computed = {"compute_dtype": "bfloat16"} if size.mixed else {}
    return {
        "model": {"config": config_of(size.shape, size.tokens), **computed},
        "data": {"function": "benchmarks.throughput:rows", "options": {"folder": str(folder)}},
        "update": {"global_batch_size": size.update_rows, "micro_batch_size": size.micro_rows, "max_norm": 1.0},
        "optim": {**ADAMW, "schedule": "constant"},
        "eval": {"num_samples": 0},
        "run": {"folder": str(folder / "run")},
    }


def run(name: str, size: Size, folder: Path) -> None:
    """The process of one of them, which leaves its metrics in the folder's run; on one thread without a GPU."""
    if name == "megabatch":
        (folder / "recipe.toml").write_text(tomli_w.dumps(recipe_of(size, folder)))
        words = ["megabatch", "train", str(folder / "recipe.toml")]
    else:
        words = ["benchmarks.throughput", *sys.argv[1:], "--by-hand", str(folder)]
    environment = os.environ | ({} if torch.cuda.is_available() else ONE_THREAD)
    command = [sys.executable, "-m", *words]
    done = subprocess.run(command, cwd=result.ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"python -m {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def loop(size: Size, folder: Path) -> None:
    """As one writes it; a row of metrics for every update."""
    device = hardware.device()
    model = llama(size.shape, size.tokens, torch.float32, device)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    (folder / "run").mkdir()
    start = hardware.seconds_now()
    with (folder / "run" / METRICS).open("w") as file:
        for update in torch.from_numpy(np.load(folder / ROWS)).split(size.update_rows):  # [update_rows, T]
            total, microbatches = torch.zeros((), device=device), update.split(size.micro_rows)
            for ids in microbatches:
                ids = ids.to(device)  # [micro_rows, T]
                with torch.autocast(device.type, torch.bfloat16, enabled=size.mixed):
                    loss = model(input_ids=ids, labels=ids).loss / len(microbatches)
                loss.backward()
                total += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            row = {"loss": total.item(), "grad_norm": norm.item()}
            start, before = hardware.seconds_now(), start
            print(json.dumps(row | {"tokens_per_second": update.numel() / (start - before)}), file=file)


def run_once(name: str, size: Size) -> dict[str, float]:
    """One process: its median, and where its loss has begun and ended."""
    with TemporaryDirectory(prefix="throughput-") as place:
        shape = (size.updates * size.update_rows, size.tokens)
        np.save(Path(place) / ROWS, np.random.default_rng(0).integers(size.shape.vocabulary, size=shape))
        run(name, size, Path(place))
        lines = (Path(place) / "run" / METRICS).read_text().splitlines()
    updates = [row for row in map(json.loads, lines) if "set" not in row]
    assert len(updates) == size.updates, f"{name} made {len(updates)} updates"
    speed = statistics.median(row["tokens_per_second"] for row in updates[size.left_out :])
    return {"tokens_per_second": speed, "first_loss": updates[0]["loss"], "last_loss": updates[-1]["loss"]}


def in_turns(size: Size) -> dict[str, list[dict[str, float]]]:
    """Every process of each, one at a time."""
    found: dict[str, list[dict[str, float]]] = {"megabatch": [], "by_hand": []}
    for repeat in range(size.repeats):
        for name in sorted(found, reverse=not repeat % 2):
            found[name].append(run_once(name, size))
            print(f"{name:10}{found[name][-1]['tokens_per_second']:14,.1f} tokens/s", flush=True)
    return found


def measured(size: Size) -> dict[str, Any]:
    """Conditions of the measurement, for the result file."""
    flops = flops_per_token(size.shape, size.tokens)
    peak, why = hardware.peak_flops(hardware.name(), torch.bfloat16 if size.mixed else torch.float32)
    rows: dict[str, dict[str, Any]] = {}
    for name, runs in in_turns(size).items():
        speed = statistics.median(each["tokens_per_second"] for each in runs)
        rows[name] = {"tokens_per_second": speed, "mfu": peak and flops * speed / peak, "runs": runs}
    return {
        "size": {**size._asdict(), "shape": size.shape._asdict()},
        "parameters": sizes_of(size.shape)[0],
        "parameters_without_input": sizes_of(size.shape)[1],
        "flops_per_token": flops,
        "peak_flops_per_second": peak,
        "peak_from": why,
        "mfu_formula": FORMULA,
        "rows": rows,
        "ratio": rows["megabatch"]["tokens_per_second"] / rows["by_hand"]["tokens_per_second"],
    }


def asked() -> tuple[str, Size, argparse.Namespace]:
    """The size, by name and as asked for, and the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model; without a result file unless --out")
    for name in ASKED:
        parser.add_argument(f"--{name.replace('_', '-')}", type=hardware.positive)
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--by-hand", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    name = hardware.size_named("1b", quick=given.quick)
    size = SIZES[name]._replace(**{key: value for key in ASKED if (value := getattr(given, key))})
    if size.update_rows % size.micro_rows:
        parser.error(f"--update-rows {size.update_rows} is no multiple of --micro-rows {size.micro_rows}")
    if size.updates <= size.left_out:
        parser.error(f"--updates {size.updates} leaves none after the first {size.left_out}")
    return name, size, given


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    name, size, given = asked()
    if given.by_hand is not None:
        loop(size, given.by_hand)
        return
    missing = hardware.not_measured(name, "1b")
    claim = "megabatch train gives no fewer tokens a second than a loop written by hand"
    made_with = {**result.made_with(["transformers"]), **hardware.facts(), "not_measured": missing}
    found = {"claim": claim, **made_with, **measured(size)}
    used = "  ".join(f"{each} {row['mfu']:.1%}" for each, row in found["rows"].items() if row["mfu"] is not None)
    print(f"megabatch / by hand: {found['ratio']:.4f}; MFU: {used or 'none'} ({found['peak_from']})")
    print(missing or f"measured on {hardware.name()}")
    if given.out is not None or not given.quick:
        print(result.write(given.out or result.dated("throughput", hardware.name()), found))


if __name__ == "__main__":
    main()
