"""Whether dealing samples over ranks by what they cost keeps ranks from waiting, beside dealing by length.

    python -m benchmarks.dealt_by_cost             # half an hour; writes benchmarks/results/dealt_by_cost_*.json
    python -m benchmarks.dealt_by_cost --quick     # small, to see that it works; writes nothing

A small Llama on bytes, as recipes/stdlib.toml and recipes/gsm8k.toml have it. What a rank's share of an update takes is
measured in one process with one thread, share after share: the time that the processor gave to it, the best of some, so
that what else the machine does falls on no rank. Prices are those of the trainer, from what "auto" has measured before.
"""

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import result
from benchmarks.speed.__main__ import GSM8K
from megabatch import CostModel, GradientAccumulator, UpdateSampler, losses
from megabatch.planners import Auto, Tokens
from megabatch.planning.balancing import balance
from megabatch.planning.limits import TunedLimit
from megabatch.train.autotune.microbatch_limit import MAX_RATIO, MIN_RATIO, even_tokens
from megabatch.train.data.stdlib import stdlib_functions, stdlib_root
from megabatch.train.data.updates import balancing_cost

CLAIM = "ranks that are dealt samples by what they were measured to cost wait less for the slowest than by length"
LONGEST_TOKENS = 4096  # longer samples are left out
CAP_TOKENS = 8192  # of a microbatch
MEMORY_BYTES = 3 * 2**28  # of a rank, from which some bound follows
CASES = ((2, 32), (4, 32), (4, 64))  # ranks, samples of an update
NUM_FITS, NUM_UPDATES, NUM_REPEATS = 4, 6, 3
SIMULATED = 200  # updates of which prices alone are added up
ATTENTION = (0.0, 0.25, 1.0, 4.0)  # of the longest sample over its other work, as it is and as it is dealt by
Row = dict[str, Any]
Price = Any  # a function of a length


def build() -> torch.nn.Module:
    """The model of both recipes, the same each time."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=384, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16_384, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def lengths_of(data: str) -> np.ndarray:
    """Bytes of each sample."""
    if data == "stdlib":
        texts = [f"{each.prompt}{each.response}" for each in stdlib_functions(stdlib_root())]
    else:
        rows = map(json.loads, GSM8K.read_text(encoding="utf-8").splitlines())
        texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    lengths = np.array([len(text.encode()) for text in texts])
    return lengths[lengths <= LONGEST_TOKENS]


def samples_of(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """Samples of these lengths; what they say takes no time of its own."""
    drawn = [torch.randint(3, 259, (length,)) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in drawn]


def fits(model: torch.nn.Module, lengths: np.ndarray, number: int) -> list[TunedLimit]:
    """What a microbatch was measured to cost, anew each time."""
    found: list[TunedLimit] = []
    for _ in range(number):
        gradient = GradientAccumulator(model, planner=Auto(memory_bytes=MEMORY_BYTES))
        usual = np.random.default_rng(0).choice(lengths, 15).tolist()
        gradient.tune(samples_of([int(lengths.max()), *usual]), losses.next_token)
        assert gradient.fit is not None
        found.append(gradient.fit)
    return found


def attention_of(fit: TunedLimit) -> float | None:
    """Of the longest sample, over its other work; None where nothing else was seen."""
    cost = fit.cost
    return (
        round(cost.seconds_per_pair * fit.longest_tokens / cost.seconds_per_token, 2)
        if cost.seconds_per_token
        else None
    )


def priced(attention: float, longest: int) -> CostModel:
    return CostModel(seconds_per_token=1.0, seconds_per_pair=attention / longest)


def slowest(seconds: list[float]) -> float:
    """Over the mean."""
    return max(seconds) / statistics.mean(seconds)


def share_seconds(gradient: GradientAccumulator, lengths: list[int]) -> float:
    """What the processor spends on an update of one rank's share."""
    samples = samples_of(lengths)
    start = time.process_time()
    gradient.forward_backward(samples, losses.next_token)
    seconds = time.process_time() - start
    gradient.finalize()
    return seconds


def dealt(model: torch.nn.Module, lengths: np.ndarray, price: CostModel, ranks: int, size: int, number: int) -> Row:
    """The slowest rank over the mean, measured, of the same updates dealt in both ways."""
    gradient = GradientAccumulator(model, planner=Tokens(CAP_TOKENS, price))
    ways = {"by_length": float, "by_cost": price.sample_seconds}
    over: dict[str, list[float]] = {way: [] for way in ways}
    for ids, _ in zip(UpdateSampler(lengths, global_batch_size=size), range(number), strict=False):
        drawn: list[int] = lengths[ids].tolist()
        shares = {way: balance([of(length) for length in drawn], ranks) for way, of in ways.items()}
        best: dict[tuple[int, ...], float] = {}
        for _ in range(NUM_REPEATS):  # in turns, so that the machine's drift falls on both ways
            for share in dict.fromkeys(tuple(each) for way in ways for each in shares[way]):
                seconds = share_seconds(gradient, [drawn[index] for index in share])
                best[share] = min(best.get(share, seconds), seconds)
        for way in ways:
            over[way].append(slowest([best[tuple(share)] for share in shares[way]]))
    return {
        "ranks": ranks,
        "samples_of_an_update": size,
        "updates": number,
        "slowest_over_mean": {way: round(statistics.mean(values), 4) for way, values in over.items()},
        "of_each_update": {way: [round(value, 4) for value in values] for way, values in over.items()},
    }


def simulated(lengths: np.ndarray, ranks: int, size: int) -> list[Row]:
    """What prices alone say, where attention is something and updates are dealt by something else."""
    found: list[Row] = []
    longest, draw = int(lengths.max()), np.random.default_rng(1)
    updates: list[list[int]] = [draw.choice(lengths, size, replace=False).tolist() for _ in range(SIMULATED)]
    for dealt_by in ATTENTION:
        price = priced(dealt_by, longest).sample_seconds
        shares = [balance([price(length) for length in drawn], ranks) for drawn in updates]
        row: Row = {"ranks": ranks, "samples_of_an_update": size, "dealt_by_attention": dealt_by}
        for attention in ATTENTION:
            true = priced(attention, longest).sample_seconds
            over = [slowest([sum(true(drawn[index]) for index in share) for share in each])
                    for drawn, each in zip(updates, shares, strict=True)]  # fmt: skip
            row[f"slowest_over_mean_at_{attention:g}"] = round(statistics.mean(over), 4)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    made_with, model, found = result.made_with(["transformers"]), build(), {}
    for data in ["stdlib", *(["gsm8k"] if GSM8K.exists() and not quick else [])]:
        lengths = lengths_of(data)
        made = fits(model, lengths, 1 if quick else NUM_FITS)
        seen, kept = [attention_of(fit) for fit in made], [even_tokens(fit) for fit in made]
        print(f"{data}: {len(lengths):,} samples of {lengths.mean():.0f} tokens, at most {lengths.max():,}; attention "
              f"of the longest over the rest {seen}, as much as the rest at {kept} tokens", flush=True)  # fmt: skip
        middle = sorted(made, key=lambda fit: fit.cost.seconds_per_pair / max(fit.cost.seconds_per_token, 1e-12))
        even = even_tokens(middle[len(made) // 2])
        price = None if even is None else balancing_cost(even)
        rows: list[Row] = []
        for ranks, size in () if price is None else CASES[:1] if quick else CASES:
            rows.append(dealt(model, lengths, price, ranks, size, 1 if quick else NUM_UPDATES))
            print(rows[-1], flush=True)
        prices = [row for case in ((2, 32), (4, 32), (8, 64), (8, 256)) for row in simulated(lengths, *case)]
        found[data] = {
            "mean_tokens": round(float(lengths.mean())), "longest_tokens": int(lengths.max()),
            "attention_of_the_longest_over_the_rest": seen, "kept_even_tokens": kept,
            "dealt_by_even_tokens": None if price is None else round(1 / price.seconds_per_pair),
            "measured": rows, "from_prices_alone": prices,
        }  # fmt: skip
    if not quick:
        whole = {"claim": CLAIM, **made_with, "threads": 1, "repeats": NUM_REPEATS, "least": MIN_RATIO,
                 "most": MAX_RATIO,
                 "data": found}  # fmt: skip
        print(result.write(result.dated("dealt_by_cost"), whole))


if __name__ == "__main__":
    main()
