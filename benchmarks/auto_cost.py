"""Cost of "auto": the small updates that choose the limit of a microbatch, beside one update of 64 samples.

For each model a new accumulator chooses its limit, and then makes updates with it. CPU seconds of the one thread count,
the median of a few runs. Tokens are those that the model processes, with padding. ``update_at_largest`` is an update
under a limit of all samples, so that the chosen limit is seen to be no slower. ``stated_limit`` compares
``cost="measure"`` with relative costs in the same updates.
Writes benchmarks/results/auto_cost_*.json.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import result
from megabatch import GradientAccumulator, losses
from megabatch.planners import Tokens

NUM_REPEATS = 3
NUM_SAMPLES, SHORTEST, LONGEST = 64, 16, 128
MODELS = {"small": (128, 4), "deep and thin": (32, 24)}  # hidden size, layers
FEW = ((4, 2048), (16, 8192))  # samples of an update, and the limit, where a cost is measured
NUM_COLD, NUM_UPDATES = 8, 16  # of a run with a measured cost
Sample = dict[str, torch.Tensor]


class Forwards:
    """Counts the forwards of a model, and the tokens that go through it."""

    def __init__(self, model: nn.Module) -> None:
        self.num = self.tokens = 0
        model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.num += 1
        self.tokens += (args[0] if args else named["input_ids"]).numel()

    def of(self, work: Callable[[], object]) -> tuple[int, int, float]:
        """Return forwards, tokens and CPU seconds of ``work``."""
        num, tokens, start = self.num, self.tokens, time.process_time()
        work()
        return self.num - num, self.tokens - tokens, time.process_time() - start


def build(hidden: int, layers: int) -> nn.Module:
    """Build a Llama from a config."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=1000, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def samples(number: int, generator: torch.Generator) -> list[Sample]:
    """Return samples of many lengths."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (number,), generator=generator).tolist()
    ids = [torch.randint(0, 1000, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


def measure(hidden: int, layers: int) -> dict[str, Any]:
    """Measure a choice, and updates with it."""
    model, batch = build(hidden, layers), samples(NUM_SAMPLES, torch.Generator().manual_seed(0))
    forwards, tuned, limits = Forwards(model), [], []

    def update(gradient: GradientAccumulator) -> None:
        gradient.forward_backward(batch, losses.next_token)
        gradient.finalize(max_norm=1.0)

    def measure_updates(gradient: GradientAccumulator) -> tuple[int, int, float]:
        update(gradient)  # a new loss is checked in its first call
        num, tokens, seconds = zip(*(forwards.of(lambda: update(gradient)) for _ in range(NUM_REPEATS)), strict=True)
        return num[0], tokens[0], statistics.median(seconds)

    update(GradientAccumulator(model, micro_batch_size=8))  # warm
    for _ in range(NUM_REPEATS):
        gradient = GradientAccumulator(model)
        tuned.append(forwards.of(lambda gradient=gradient: gradient.tune(batch, losses.next_token)))
        limits.append(gradient.fit)
    num_forwards, tokens, seconds = map(statistics.median, zip(*tuned, strict=True))
    middle = sorted(limits, key=lambda fit: fit.max_microbatch_tokens)[NUM_REPEATS // 2]
    cut = GradientAccumulator(model, planner=Tokens(middle.max_microbatch_tokens, middle.cost))
    num_microbatches, update_tokens, update_seconds = measure_updates(cut)
    whole = GradientAccumulator(model, planner=Tokens(NUM_SAMPLES * LONGEST, middle.cost))
    _, _, whole_seconds = measure_updates(whole)
    return {
        "choice": {"forwards": num_forwards, "tokens": tokens, "ms": 1000 * seconds},
        "update": {"forwards": num_microbatches, "tokens": update_tokens, "ms": 1000 * update_seconds},
        "update_at_largest": {"ms": 1000 * whole_seconds},
        "choice_in_updates": {"by_tokens": tokens / update_tokens, "by_seconds": seconds / update_seconds},
        "limits": [fit.max_microbatch_tokens for fit in limits],
        "measured_rows": [[each.rows for each in fit.measured] for fit in limits],
    }


def compare_costs(hidden: int, layers: int, num_samples: int, cap: int) -> dict[str, Any]:
    """Measure updates under a stated limit with relative costs, and with ``cost="measure"``, side by side."""
    generator, model = torch.Generator().manual_seed(1), build(hidden, layers)
    split_by = {
        "relative": GradientAccumulator(model, max_microbatch_tokens=cap),
        "measure": GradientAccumulator(model, planner=Tokens(cap, "measure")),
    }
    found = {name: {"ms": 0.0, "microbatches": 0} for name in split_by}
    for step in range(NUM_COLD + NUM_UPDATES):
        batch = samples(num_samples, generator)
        for name in sorted(split_by, reverse=bool(step % 2)):
            gradient, start = split_by[name], time.process_time()
            gradient.forward_backward(batch, losses.next_token)
            gradient.finalize()
            if step >= NUM_COLD and gradient.last_plan is not None:
                found[name]["ms"] += 1000 * (time.process_time() - start) / NUM_UPDATES
                found[name]["microbatches"] += gradient.last_plan.num_microbatches / NUM_UPDATES
    return {"samples": num_samples, "max_microbatch_tokens": cap, **found}


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    torch.set_num_threads(1)
    made_with, rows = result.made_with(["transformers"]), {}
    for name, size in MODELS.items():
        rows[name] = row = measure(*size)
        print(
            f"{name:14} choice {row['choice']['forwards']:3} forwards {row['choice']['ms']:7.1f} ms   update "
            f"{row['update']['forwards']:3} forwards {row['update']['ms']:7.1f} ms (at the largest limit "
            f"{row['update_at_largest']['ms']:7.1f})   choice / update {row['choice_in_updates']['by_seconds']:.2f} "
            f"by time, {row['choice_in_updates']['by_tokens']:.2f} by tokens   limits {row['limits']}"
        )
        row["stated_limit"] = [compare_costs(*size, *case) for case in FEW]
        for each in row["stated_limit"]:
            print(" ".join(f"{key} {value}" for key, value in each.items()))
    found = {"claim": '"auto" costs about one update of 64 samples', **made_with, "threads": 1, "rows": rows,
             "repeats": NUM_REPEATS}  # fmt: skip
    print(result.write(result.dated("auto_cost"), found))


if __name__ == "__main__":
    main()
