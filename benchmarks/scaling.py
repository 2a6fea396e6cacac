"""What grows with what: memory and time with an update's microbatches, the sampler with the data, dealing with ranks.

    python -m benchmarks.scaling                      # some five minutes; writes benchmarks/results/scaling_*.json
    python -m benchmarks.scaling --quick              # small, to see that it works; writes nothing

Memory is the high-water mark of resident memory above what was there before, of a process of its own whose allocator
gives back what is freed. What dealing costs is said by the cost model; its times are of one rank, which deals for all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result
from benchmarks.speed.__main__ import GSM8K
from megabatch import CostModel, GradientAccumulator, UpdateSampler, losses, plan
from megabatch.planning.balancing import balance
from tests.memory.runs import MALLOC, memory_bytes

CLAIM = (
    "an update's memory does not grow with its size and its time grows in proportion; ten million samples take ten "
    "bytes each; ranks are dealt the same work"
)
NUM_MICROBATCHES = (1, 2, 8, 64, 256, 1024)
NUM_SAMPLES = (10_000, 1_000_000, 10_000_000)
DEALT = ((8, 512), (64, 4096), (1024, 65_536), (1024, 8192), (1024, 1024))  # ranks, samples of an update
TOKENS = 64  # of a microbatch's only row
CAP_TOKENS = 2048
CUT = ((1000, 2048), (10_000, 2048), (100_000, 2048), (100_000, 65_536))  # samples, the cap in tokens
QUICK = {"CUT": ((1000, 2048),), "NUM_MICROBATCHES": (1, 2, 64), "NUM_SAMPLES": (10_000,), "DEALT": ((8, 512),)}
Row = dict[str, Any]


def in_a_process(*words: str) -> Row:
    """What this file prints when it is asked for one measurement."""
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | MALLOC
    command = [sys.executable, "-m", "benchmarks.scaling", *words]
    done = subprocess.run(command, cwd=result.ROOT, env=os.environ | quiet, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def update(num_microbatches: int) -> Row:
    """The second update of a small Llama, whose samples are all there before it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=4,
                         vocab_size=4000, use_cache=False)  # fmt: skip
    batch = {name: torch.zeros(num_microbatches, TOKENS, dtype=torch.long) for name in ("input_ids", "labels")}
    before = memory_bytes("VmRSS")
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    gradient = GradientAccumulator(model, micro_batch_size=1)
    for kept in (1, num_microbatches):  # the first update makes the optimizer's states, and loads what is needed
        Path("/proc/self/clear_refs").write_text("5")
        start = time.perf_counter()
        gradient.forward_backward({name: rows[:kept] for name, rows in batch.items()}, losses.next_token)
        assert gradient.finalize(max_norm=1.0).finite
        optimizer.step()
    seconds = time.perf_counter() - start
    return {
        "num_microbatches": num_microbatches,
        "peak_bytes": memory_bytes("VmHWM") - before,
        "seconds": seconds,
        "seconds_per_microbatch": seconds / num_microbatches,
    }


def sampler(num_samples: int) -> Row:
    """A sampler made and asked for its first update; the lengths it is given are an array."""
    lengths = np.random.default_rng(0).integers(1, 8192, num_samples)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory_bytes("VmRSS"), time.perf_counter()
    made = UpdateSampler(lengths, global_batch_size=512, dp_rank=0, dp_degree=8)
    updates = iter(made)
    next(updates)
    started = time.perf_counter()
    next(updates)
    return {
        "num_samples": num_samples,
        "kept_bytes": memory_bytes("VmRSS") - before,
        "peak_bytes": memory_bytes("VmHWM") - before,
        "start_seconds": started - start,
        "next_update_seconds": time.perf_counter() - started,
    }


def cut(lengths: np.ndarray, num_samples: int, cap_tokens: int) -> Row:
    """An update of one rank, cut into microbatches."""
    drawn: list[int] = lengths[:num_samples].tolist()
    start = time.process_time()
    (found,) = plan(drawn, max_microbatch_tokens=cap_tokens, cost=CostModel())
    return {
        "samples_of_an_update": num_samples,
        "max_microbatch_tokens": cap_tokens,
        "num_microbatches": found.num_microbatches,
        "padding": found.padding,
        "cpu_seconds": time.process_time() - start,
    }


def dealt(lengths: np.ndarray, ranks: int, size: int, num_updates: int = 3) -> Row:
    """The slowest rank over the mean, of updates drawn from the lengths, and the CPU time of one rank that plans."""
    own = UpdateSampler(lengths, global_batch_size=size, dp_rank=0, dp_degree=ranks)
    updates = UpdateSampler(lengths, global_batch_size=size)
    cost, over, planned, times = CostModel(), [], [], []
    for samples, _ in zip(updates, range(num_updates), strict=False):
        start = time.process_time()
        own.share(samples)
        times.append(time.process_time() - start)
        drawn: list[int] = lengths[samples].tolist()
        seconds = [each.seconds or 0.0 for each in plan(
            drawn, dp_degree=ranks, max_microbatch_tokens=CAP_TOKENS, cost=cost)]  # fmt: skip
        planned.append(max(seconds) / statistics.mean(seconds))
        shares = balance([float(length) for length in drawn], ranks)  # what every rank's sampler does
        seconds = [sum(cost.sample_seconds(drawn[index]) for index in share) for share in shares]
        over.append(max(seconds) / statistics.mean(seconds))
    return {
        "ranks": ranks,
        "samples_of_an_update": size,
        "slowest_over_mean": max(over),
        "slowest_over_mean_with_padding": max(planned),
        "planning_cpu_seconds_of_1000_updates": 1000 * statistics.median(times),
    }


def gsm8k_lengths(path: Path) -> np.ndarray | None:
    """Bytes of each question with its answer."""
    if not path.exists():
        return None
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return np.array([len(f"{row['question']}\n{row['answer']}".encode()) for row in rows])


def many_lengths(longest: int = CAP_TOKENS) -> np.ndarray:
    """A million, spread as text is: lognormal, half of them above 400 tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(400), 0.6, 1_000_000)
    return drawn.clip(1, longest).astype(np.int64)


def report(row: Row) -> Row:
    words = (f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value:,}" if isinstance(value, int)
             else f"{key} {value}" for key, value in row.items())  # fmt: skip
    print("  ".join(words), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gsm8k", type=Path, default=GSM8K)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        return print(json.dumps({"update": update, "sampler": sampler}[asked.one[0]](int(asked.one[1]))))
    sizes = globals() | (QUICK if asked.quick else {})
    made_with = result.made_with(["transformers"])
    grown = [report(in_a_process("--one", "update", str(number))) for number in sizes["NUM_MICROBATCHES"]]
    sampled = [report(in_a_process("--one", "sampler", str(number))) for number in sizes["NUM_SAMPLES"]]
    data = {"lognormal": many_lengths(), "gsm8k": gsm8k_lengths(asked.gsm8k)}
    cuts = [report(cut(data["lognormal"], *each)) for each in sizes["CUT"]]
    ranks = [
        report({"lengths": name} | dealt(lengths, *each))
        for name, lengths in data.items()
        for each in sizes["DEALT"]
        if lengths is not None and each[1] <= len(lengths)
    ]
    if not asked.quick:
        path = result.dated("scaling")
        result.write(path, {"claim": CLAIM, **made_with, "malloc": MALLOC, "update": grown, "sampler": sampled,
                            "cutting": cuts, "dealing": ranks})  # fmt: skip
        print(path)
    return None


if __name__ == "__main__":
    main()
