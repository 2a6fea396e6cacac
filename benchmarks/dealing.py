"""Work over ranks: the samples of an update dealt by megabatch and by its peers, counted without a clock.

    python -m benchmarks.dealing            # half an hour; writes benchmarks/results/dealing_*.json
    python -m benchmarks.dealing --quick    # few ranks, to see that it works; writes nothing

For each number of ranks, samples a rank and distribution of lengths, some updates are dealt and cut into microbatches
of at most 8,192 padded tokens. Counted is the work of the busiest rank over the mean of all ranks' work without
padding. The work of a microbatch is its padded tokens, each counted as 1 + longest / 4,096 for attention.

- megabatch: `UpdateSampler(max_microbatch_tokens=8192)`, then the accumulator's cut.
- samples: single samples dealt by their work, then the same cut. This is `UpdateSampler` without a limit.
- rebalance: transformers' `BatchRebalanceSampler` at its best number of microbatches, of those that divide the samples
  of a rank and are at most megabatch's. It has no limit of tokens; its largest microbatch is counted beside it.
- verl: samples dealt by its Karmarkar-Karp, from the package's source, then the same cut.
- Where ranks need other numbers of microbatches, those with fewer cut their own smaller, as a run of megabatch does.
- bound: no dealing at as many microbatches as megabatch's has less work on its busiest rank. It relaxes the number of
  microbatches (Lagrange), so no dealing may reach it.
"""

import argparse
import ast
import importlib.metadata
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from benchmarks import result
from megabatch import CostModel
from megabatch.planning.balancing import balance_lengths
from megabatch.planning.dealing import deal
from megabatch.planning.finer_cut import split_into
from megabatch.planning.partition import plan_share, split

CAP = 8192
WORK = CostModel()  # without a launch, which is counted apart
RANKS, PER_RANK = (2, 8, 32, 128, 1024), (8, 32, 128)
QUICK_RANKS, QUICK_PER_RANK = (2, 8), (8, 32)
UPDATES = {2: 20, 8: 10, 32: 5, 128: 2, 1024: 1}  # by ranks
MOST_REBALANCED = 8_192  # samples of an update; transformers' sampler takes minutes for more
FEES = np.geomspace(1, CAP, 40)  # tokens that a microbatch costs in the bound
CLAIM = "the busiest rank works less where an update is grouped by length before it is dealt"
Dealt = list[np.ndarray]  # lengths of each rank
Draw = Callable[[np.random.Generator, int], np.ndarray]
DATA: dict[str, Draw] = {
    "gsm8k": lambda generator, number: generator.lognormal(5.1, 0.42, number).clip(20, 600),
    "chat": lambda generator, number: generator.lognormal(5.0, 0.8, number).clip(20, 2048),
    "code": lambda generator, number: generator.lognormal(5.5, 1.3, number).clip(10, CAP),
    "equal": lambda _, number: np.full(number, 512.0),
}


def cut_of(dealt: Dealt) -> tuple[float, int]:
    """Return the work of the busiest rank, and the microbatches of each.

    Every rank runs as many microbatches as the one that needs the most. The others cut their own smaller, and repeat
    their last one as a dummy if they have too few samples.
    """
    plans = [plan_share(lengths.tolist(), None, CAP, None) for lengths in dealt]
    most = max(plan.num_microbatches for plan in plans)
    busiest = 0.0
    for plan in plans:
        cut = split_into(plan.lengths, plan.microbatches, most, WORK.seconds)
        cut += cut[-1:] * (most - len(cut))
        busiest = max(busiest, work_of(plan.lengths, cut))
    return busiest, most


def work_of(lengths: Sequence[int], microbatches: Sequence[Sequence[int]]) -> float:
    """Return the work of a rank's microbatches."""
    return sum(WORK.seconds(len(rows), max(lengths[row] for row in rows)) for rows in microbatches if rows)


def by_rank(lengths: np.ndarray, ranks: np.ndarray, num_ranks: int) -> Dealt:
    order = np.argsort(ranks, kind="stable")
    return np.split(lengths[order], np.cumsum(np.bincount(ranks, minlength=num_ranks))[:-1])


def rebalanced(lengths: np.ndarray, num_ranks: int, microbatches: int) -> tuple[float, int]:
    """Return the work of the busiest rank and the tokens of the largest microbatch, dealt by transformers."""
    sampler = BatchRebalanceSampler(lengths.tolist(), len(lengths), num_ranks, microbatches)
    dealt = sampler._assign(list(range(len(lengths))), lengths.tolist())
    tokens = [len(rows) * int(lengths[rows].max()) for rank in dealt for rows in rank]
    return max(work_of(lengths.tolist(), rank) for rank in dealt), max(tokens)


def karmarkar_karp() -> Callable[..., list[list[int]]] | None:
    """Return verl's function, compiled from the source that the package installs. None without the package."""
    try:
        files = importlib.metadata.files("verl") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    source = next(Path(str(file.locate())) for file in files if file.name == "seqlen_balancing.py")
    tree = ast.parse(source.read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "karmarkar_karp"]
    names: dict[str, Any] = {"heapq": __import__("heapq"), "copy": __import__("copy")}
    exec(compile(ast.Module(wanted, []), str(source), "exec"), names)
    return names["karmarkar_karp"]


def bound_of(lengths: np.ndarray, num_ranks: int, microbatches: int) -> float:
    """Return the least work of the busiest rank in so many microbatches of each rank."""
    items: list[int] = lengths.tolist()
    most = num_ranks * microbatches
    best = max(WORK.sample_seconds(max(items)), sum(map(WORK.sample_seconds, items)) / num_ranks)
    for fee in FEES:
        groups = split(items, replace(WORK, seconds_per_microbatch=fee).seconds, max_tokens=CAP)
        best = max(best, (work_of(items, groups) + fee * (len(groups) - most)) / num_ranks)
    return best


def row_of(data: str, num_ranks: int, per_rank: int, peer: Callable[..., list[list[int]]] | None) -> dict[str, Any]:
    """Return means over updates, in multiples of the mean work of a rank without padding."""
    generator = np.random.default_rng([num_ranks, per_rank])
    counts: dict[str, list[float]] = {}
    for _ in range(UPDATES[num_ranks]):
        lengths = DATA[data](generator, num_ranks * per_rank).astype(np.int64)
        mean = sum(map(WORK.sample_seconds, lengths.tolist())) / num_ranks
        work, microbatches = cut_of(by_rank(lengths, deal(lengths, num_ranks, max_tokens=CAP), num_ranks))
        singles = by_rank(lengths, balance_lengths(lengths, WORK.sample_seconds, num_ranks), num_ranks)
        single_work, single_microbatches = cut_of(singles)
        update = {
            "megabatch": work / mean, "microbatches": microbatches, "samples": single_work / mean,
            "samples_microbatches": single_microbatches, "bound": bound_of(lengths, num_ranks, microbatches) / mean,
        }  # fmt: skip
        if peer is not None and len(lengths) <= MOST_REBALANCED:
            parts = peer([int(WORK.sample_seconds(length)) for length in lengths.tolist()], num_ranks, equal_size=False)
            peer_work, peer_microbatches = cut_of([lengths[part] for part in parts])
            update |= {"verl": peer_work / mean, "verl_microbatches": peer_microbatches}
        if len(lengths) <= MOST_REBALANCED:
            divisors = [number for number in range(1, microbatches + 1) if per_rank % number == 0]
            found = [rebalanced(lengths, num_ranks, number) for number in divisors]
            busiest, largest = min(found)
            update |= {"rebalance": busiest / mean, "rebalance_largest": largest}
        for name, value in update.items():
            counts.setdefault(name, []).append(float(value))
    means = {name: round(statistics.mean(values), 4) for name, values in counts.items()}
    return {"data": data, "ranks": num_ranks, "per_rank": per_rank, "updates": UPDATES[num_ranks]} | means


def line_of(row: dict[str, Any]) -> str:
    names = ("samples", "rebalance", "verl", "megabatch", "bound")
    values = "  ".join(f"{name} {row[name]:.3f}" if name in row else f"{name}   -  " for name in names)
    microbatches = f"{row['microbatches']:.1f} microbatches (samples {row['samples_microbatches']:.1f})"
    return f"{row['data']:6} {row['ranks']:5} x {row['per_rank']:3}  {values}  {microbatches}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few ranks; writes nothing")
    parser.add_argument("--out", type=Path, help="the result file")
    given = parser.parse_args(words)
    ranks, per_rank = (QUICK_RANKS, QUICK_PER_RANK) if given.quick else (RANKS, PER_RANK)
    peer, rows = karmarkar_karp(), []
    made_with = result.made_with(["transformers", "verl"])
    for data in DATA:
        for num_ranks in ranks:
            for samples in per_rank:
                rows.append(row_of(data, num_ranks, samples, peer))
                print(line_of(rows[-1]), flush=True)
    if given.out or not given.quick:
        found = {"claim": CLAIM, **made_with, "max_microbatch_tokens": CAP, "rows": rows}
        print(result.write(given.out or result.dated("dealing"), found))


if __name__ == "__main__":
    main()
