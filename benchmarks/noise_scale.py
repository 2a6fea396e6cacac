"""What it costs to measure the gradient's noise: an update in two halves, a norm between them, beside a plain one.

Both train the same small Llama on the same samples: forward, backward, clip, AdamW. Repeats are interleaved, so that
drift falls on both, and the ratio is the median of those of neighbors. Seconds are the processor's, of one thread:
those of the clock have whatever else runs on the machine. Writes benchmarks/results/noise_scale_*.json.
"""

import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import result
from megabatch import GradientAccumulator, Learner, losses
from megabatch.train.callbacks.noise_scale import NoiseScale
from megabatch.train.config import Config
from megabatch.train.context import Callbacks, RunContext
from megabatch.train.data.updates import NumUpdates
from megabatch.train.loop import make_update
from megabatch.train.model.build import ParallelModel
from megabatch.train.parallel.wrap import WrapperChoice
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal

NUM_REPEATS, WARMUP = 30, 2
INTERVALS = (10, 20, 50)
MICRO_BATCH_SIZE = 8
NUM_SAMPLES = {"one microbatch": MICRO_BATCH_SIZE, "eight microbatches": 8 * MICRO_BATCH_SIZE}  # of an update
LENGTH, VOCABULARY = 112, 384
Batch = list[dict[str, torch.Tensor]]


class Loop:
    """Updates that are all measured, or none of them."""

    def __init__(self, *, measures: bool) -> None:
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "llama", vocab_size=VOCABULARY, hidden_size=192, intermediate_size=576, num_hidden_layers=2,
            num_attention_heads=4, use_cache=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        gradient = GradientAccumulator(model, micro_batch_size=MICRO_BATCH_SIZE)
        self.learner = Learner(model, optimizer, gradient, max_norm=1.0)
        given: dict[str, Any] = {"model": {"config": {}}, "update": {"global_batch_size": 2}, "run": {"folder": "-"}}
        recipe = Config.model_validate({**given, "advice": {"every": 1 if measures else None}})
        self.context = self.context_of(recipe)
        self.context.callbacks = Callbacks([NoiseScale(self.context)] if measures else [])

    def context_of(self, recipe: Config) -> RunContext:
        """A run without data: samples come from here."""
        model, nowhere = self.learner.model, cast(Any, SimpleNamespace(ids=[], num_updates=NumUpdates(None, None)))
        return RunContext(
            recipe, Ranks(0, 1, torch.device("cpu")), Console(enabled=False, loss_digits=4), StopSignal(speaks=False),
            Heartbeat(Rendezvous(), None), None, nowhere, nowhere,
            ParallelModel(model, model, WrapperChoice("plain", ""), [], [], {}),
            self.learner, losses.next_token, None, {},
        )  # fmt: skip

    def update(self, batch: Batch) -> int:
        """One update; its microbatches."""
        cast(Any, self.context.updates).ids = list(range(len(batch)))
        make_update(self.context, batch)
        assert self.context.update is not None
        return self.context.update.num_microbatches


def samples(number: int) -> Batch:
    """Of one length: of others, smaller microbatches would have less padding, and halves would gain by it."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, VOCABULARY, (LENGTH,), generator=draw) for _ in range(number)]
    return [{"input_ids": row, "labels": row} for row in rows]


def compare(num_samples: int) -> dict[str, Any]:
    """Median milliseconds of both, and what an update costs more on average at each interval."""
    loops = {name: Loop(measures=name == "measured") for name in ("plain", "measured")}
    batch, counts = samples(num_samples), dict[str, int]()
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(WARMUP + NUM_REPEATS):
        for name in sorted(loops, reverse=bool(repeat % 2)):
            start = time.process_time()
            counts[name] = loops[name].update(batch)
            times[name].append(time.process_time() - start)
    medians = {name: 1000 * statistics.median(values[WARMUP:]) for name, values in times.items()}
    pairs = zip(times["measured"][WARMUP:], times["plain"][WARMUP:], strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    return {
        "num_samples": num_samples,
        "num_microbatches": counts,
        **{f"{name}_ms": value for name, value in medians.items()},
        "ratio": ratio,
        "cost_of_an_update": {str(every): (ratio - 1) / every for every in INTERVALS},
    }


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    torch.set_num_threads(1)
    made_with = result.made_with(["transformers"])
    rows = {name: compare(number) for name, number in NUM_SAMPLES.items()}
    for name, row in rows.items():
        costs = "  ".join(f"every {every}: {cost:.2%}" for every, cost in row["cost_of_an_update"].items())
        print(f"{name:18}{row['plain_ms']:7.1f} ms  measured {row['measured_ms']:7.1f} ms  {row['ratio']:.3f}  {costs}")
    found = {
        "claim": "measuring the gradient's noise once in 20 updates costs less than 1 % of an update",
        **made_with,
        "threads": 1,
        "rows": rows,
        "repeats": NUM_REPEATS,
    }
    print(result.write(result.dated("noise_scale"), found))


if __name__ == "__main__":
    main()
