"""What an update of one microbatch costs beside the plain PyTorch loop.

The host's work is the same for any model, so a model of 3 ms an update shows it and one of 100 ms does not.

Both loops train the same small Llama on the same rows: forward, backward, clip, AdamW. Repeats are interleaved, so that
the machine's drift falls on both, and the ratio is that of medians. Only CPU time of the one thread counts.
Writes benchmarks/results/one_microbatch_*.json.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import result
from megabatch import GradientAccumulator, losses

NUM_REPEATS = 40
WARMUP = 5
SIZES = {"tiny": (32, 1, 8, 32), "small": (192, 2, 8, 128)}  # hidden, layers, rows, tokens of a row
Batch = dict[str, torch.Tensor]
Loop = Callable[[Batch], None]


def build(hidden: int, layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Llama from a config, the same each time, and its optimizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=384, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, use_cache=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def plain_loop(hidden: int, layers: int) -> Loop:
    """The loop that one writes without accumulation, with the same loss."""
    model, optimizer = build(hidden, layers)

    def update(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(batch["input_ids"]).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def megabatch_loop(hidden: int, layers: int, rows: int) -> Loop:
    """The same with one microbatch of megabatch."""
    model, optimizer = build(hidden, layers)
    gradient = GradientAccumulator(model, micro_batch_size=rows)

    def update(batch: Batch) -> None:
        gradient.forward_backward(batch, losses.next_token)
        if gradient.finalize(max_norm=1.0).finite:
            optimizer.step()

    return update


def seconds(loop: Loop, batch: Batch) -> float:
    """CPU time of one update."""
    start = time.thread_time()
    loop(batch)
    return time.thread_time() - start


def compare(hidden: int, layers: int, rows: int, tokens: int) -> dict[str, float]:
    """Median CPU milliseconds of both loops, and their ratio."""
    loops = {"plain": plain_loop(hidden, layers), "megabatch": megabatch_loop(hidden, layers, rows)}
    ids = torch.randint(0, 384, (rows, tokens))
    batch = {"input_ids": ids, "labels": ids}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for repeat in range(WARMUP + NUM_REPEATS):
        for name in sorted(loops, reverse=bool(repeat % 2)):
            times[name].append(seconds(loops[name], batch))
    medians = {name: statistics.median(values[WARMUP:]) for name, values in times.items()}
    return {
        "plain_ms": 1000 * medians["plain"],
        "megabatch_ms": 1000 * medians["megabatch"],
        "ratio": medians["megabatch"] / medians["plain"],
    }


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    torch.set_num_threads(1)
    made_with = result.made_with(["transformers"])
    rows = {name: compare(*size) for name, size in SIZES.items()}
    for name, row in rows.items():
        print(f"{name:6} plain {row['plain_ms']:8.3f} ms  megabatch {row['megabatch_ms']:8.3f} ms  {row['ratio']:.3f}")
    found = {
        "claim": "CPU time of an update of one microbatch: what the plain loop costs, and a fixed host time",
        **made_with,
        "threads": 1,
        "rows": rows,
        "repeats": NUM_REPEATS,
    }
    print(result.write(result.dated("one_microbatch"), found))


if __name__ == "__main__":
    main()
