"""CPU time of one rank that balances an update over many ranks, beside one heap over all samples.

    python -m benchmarks.ranks          # 3 minutes; writes benchmarks/results/ranks_*.json

Every rank computes the shares of all ranks before each update, so this time does not fall with the number of ranks. One
process simulates rank 0. The heap is the same rule with one push and one pop per sample. Both must give every rank the
same samples. Lengths are drawn from GSM8K (bytes of question and answer), and from a log-normal distribution.
"""

import heapq
import json
import time
from typing import Any

import numpy as np

from benchmarks import result
from benchmarks.speed.__main__ import GSM8K
from megabatch import UpdateSampler
from megabatch.planning.balancing import balance_lengths

NUM_RANKS = (1, 4, 16, 64, 256, 1024, 4096)
SAMPLES_PER_RANK = (8, 64, 1024)
MAX_SAMPLES = 2**20  # of an update, for the heap; the sampler runs four times as many
NUM_REPEATS = 5
LONGEST_TOKENS = 32_768
Row = dict[str, Any]


def draw(num: int) -> dict[str, np.ndarray]:
    """Return ``num`` lengths by name of their distribution."""
    random = np.random.default_rng(0)
    drawn = {"log-normal": random.lognormal(np.log(400), 1.0, num).clip(1, LONGEST_TOKENS).astype(np.int64)}
    if GSM8K.exists():
        rows = map(json.loads, GSM8K.read_text(encoding="utf-8").splitlines())
        drawn["gsm8k"] = random.choice([len(f"{row['question']}\n{row['answer']}".encode()) for row in rows], num)
    return drawn


def by_heap(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the rank of each sample: the longest first, each to the rank with the fewest tokens that has room."""
    num = len(lengths)
    costs, ranks = [float(each) for each in lengths], np.empty(num, dtype=np.int32)
    heap = [(0.0, rank, num // num_ranks + (rank < num % num_ranks)) for rank in range(num_ranks)]
    for sample in sorted(range(num), key=lambda each: (-costs[each], each)):
        load, rank, room = heapq.heappop(heap)
        ranks[sample] = rank
        if room > 1:
            heapq.heappush(heap, (load + costs[sample], rank, room - 1))
    return ranks


def slowest_over_mean(lengths: np.ndarray, ranks: np.ndarray, num_ranks: int) -> float:
    """Return the most tokens of a rank over their mean."""
    tokens = np.bincount(ranks, weights=lengths, minlength=num_ranks)
    return float(tokens.max() / tokens.mean())


def measure(name: str, lengths: np.ndarray, num_ranks: int) -> Row:
    """Time the sampler's share of one update, and the heap where it does not take too long."""
    sampler = UpdateSampler(lengths, global_batch_size=len(lengths), dp_rank=0, dp_degree=num_ranks)
    ids = np.arange(len(lengths))
    times: list[float] = []
    for _ in range(NUM_REPEATS):
        start = time.process_time()
        sampler.share(ids)
        times.append(time.process_time() - start)
    ranks = balance_lengths(lengths, float, num_ranks)
    row: Row = {
        "lengths": name,
        "ranks": num_ranks,
        "samples": len(lengths),
        "cpu_ms": 1000 * sorted(times)[NUM_REPEATS // 2],
        "slowest_over_mean": slowest_over_mean(lengths, ranks, num_ranks),
    }
    if len(lengths) <= MAX_SAMPLES:
        start = time.process_time()
        heaped = by_heap(lengths, num_ranks)
        row["heap_cpu_ms"] = 1000 * (time.process_time() - start)
        row["heap_slowest_over_mean"] = slowest_over_mean(lengths, heaped, num_ranks)
        row["same_shares"] = bool((ranks == heaped).all())
    return row


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    made_with, rows = result.made_with(), list[Row]()
    for per_rank in SAMPLES_PER_RANK:
        for num_ranks in NUM_RANKS:
            for name, lengths in draw(per_rank * num_ranks).items():
                row = measure(name, lengths, num_ranks)
                rows.append(row)
                print(
                    f"{name:10} {num_ranks:5} ranks x {per_rank:5} samples: {row['cpu_ms']:8.2f} ms, heap "
                    f"{row.get('heap_cpu_ms', float('nan')):8.1f} ms, slowest/mean {row['slowest_over_mean']:.5f}"
                )
    claim = "balancing an update over 1,024 ranks x 1,024 samples takes less than 50 ms of CPU, with the heap's shares"
    print(result.write(result.dated("ranks"), {"claim": claim, **made_with, "repeats": NUM_REPEATS, "rows": rows}))


if __name__ == "__main__":
    main()
