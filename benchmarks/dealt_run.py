"""Padding and CPU time of updates on real ranks: samples dealt one by one, and grouped before they are dealt.

    python -m benchmarks.dealt_run             # some four minutes; writes benchmarks/results/dealt_run_*.json
    python -m benchmarks.dealt_run --quick     # 2 ranks and few updates; writes nothing

Each rank is a process of one thread with the small Llama of recipes/gsm8k.toml on bytes, under DistributedDataParallel.
Samples have GSM8K's lengths. "one by one" is the sampler without a limit, and a rank with fewer microbatches than
another runs dummy microbatches. "grouped" is the sampler with the accumulator's limit, and such a rank cuts its own
microbatches smaller. The two take turns, update by update, on the same samples. Seconds are CPU seconds of the busiest
rank, which other processes on the same cores do not change.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from benchmarks import result
from benchmarks.dealt_by_cost import build, lengths_of, samples_of
from megabatch import GradientAccumulator, UpdateSampler, losses
from megabatch.core.call import MicrobatchPlanner

CLAIM = "ranks that are dealt groups of similar length compute less padding and take less CPU time for the same update"
CAP_TOKENS = 8192
SAMPLES_PER_RANK = 32
NUM_RANKS, NUM_UPDATES = (2, 4), 8
WAYS: dict[str, dict[str, int]] = {"one by one": {}, "grouped": {"max_microbatch_tokens": CAP_TOKENS}}


def measure_rank(rank: int, num_ranks: int, num_updates: int, folder: str) -> None:
    """Run the updates of one rank, and write its rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    gradient = GradientAccumulator(DistributedDataParallel(build()), max_microbatch_tokens=CAP_TOKENS)
    lengths = lengths_of("gsm8k").tolist()
    size = SAMPLES_PER_RANK * num_ranks
    samplers = {way: iter(UpdateSampler(lengths, global_batch_size=size, **options)) for way, options in WAYS.items()}
    rows: list[dict[str, Any]] = []
    for number in range(num_updates + 1):  # the first warms up
        for way, sampler in samplers.items():
            drawn = [lengths[sample] for sample in next(sampler)]
            MicrobatchPlanner.fills_up = way == "grouped"
            samples = samples_of(drawn)
            dist.barrier()
            start = time.process_time()
            gradient.forward_backward(samples, losses.next_token)
            update = gradient.finalize(max_norm=1.0)
            seconds = time.process_time() - start
            assert bool(update.finite)
            assert gradient.last_plan is not None
            computed = [tokens for tokens in gradient.last_plan.microbatch_tokens if tokens]
            num_dummies = gradient.last_plan.num_microbatches - len(computed)
            row = {"seconds": seconds, "real": sum(drawn), "computed": sum(computed) + num_dummies * computed[-1],
                   "dummies": num_dummies}  # fmt: skip
            shares: list[Any] = [None] * num_ranks
            dist.all_gather_object(shares, row)
            if number and not rank:
                rows.append({"way": way, "ranks": shares})
    if not rank:
        torch.save(rows, f"{folder}/rows.pt")
    dist.destroy_process_group()


def summarize(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return padding over all ranks, the busiest rank's tokens over the ideal, and its CPU seconds."""
    real = sum(rank["real"] for row in rows for rank in row["ranks"])
    computed = sum(rank["computed"] for row in rows for rank in row["ranks"])
    over: list[float] = []
    for row in rows:
        busiest = max(rank["computed"] for rank in row["ranks"])
        over.append(busiest * len(row["ranks"]) / sum(rank["real"] for rank in row["ranks"]))
    return {
        "padding": round(1 - real / computed, 4),
        "busiest_over_ideal": round(statistics.mean(over), 4),
        "dummies_per_update": statistics.mean(sum(rank["dummies"] for rank in row["ranks"]) for row in rows),
        "busiest_seconds": round(statistics.median(max(rank["seconds"] for rank in row["ranks"]) for row in rows), 3),
        "mean_seconds": round(
            statistics.median(statistics.mean(rank["seconds"] for rank in row["ranks"]) for row in rows), 3
        ),
    }


def main() -> None:
    is_quick = "--quick" in sys.argv
    about, found = result.made_with(["transformers"]), []
    for num_ranks in NUM_RANKS[:1] if is_quick else NUM_RANKS:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(measure_rank, (num_ranks, 2 if is_quick else NUM_UPDATES, folder), nprocs=num_ranks)
            rows = torch.load(Path(folder) / "rows.pt")
        for way in WAYS:
            found.append({"ranks": num_ranks, "way": way} | summarize([row for row in rows if row["way"] == way]))
            print(found[-1], flush=True)
    if not is_quick:
        print(result.write(result.dated("dealt_run"), {**about, "claim": CLAIM, "rows": found}))


if __name__ == "__main__":
    main()
