"""What linear layers that add to their weights' gradients themselves save: the same update with and without.

The first microbatch of an update has nothing to add to, and all that follow have. Two accumulators, one with
``fuse_accumulation``, work on the same Llama and samples; repeats are interleaved, so that the machine's drift falls on
both, and a ratio is that of medians of processor time. Writes benchmarks/results/fused_accumulation_*.json.
"""

import argparse
import statistics
import time

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import result
from megabatch import GradientAccumulator, losses

VOCABULARY = 2048
MAX_ROW_TOKENS = 256
NUM_MICROBATCHES = (8, 64)
MAX_UPDATE_TOKENS = 8192  # more is more of the same
Samples = list[dict[str, torch.Tensor]]


def build(hidden: int, layers: int) -> nn.Module:
    """A Llama from a config, in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 256 * 64,
        num_hidden_layers=layers, num_attention_heads=hidden // 64, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def samples(tokens: int, num_microbatches: int) -> tuple[Samples, int]:
    """Rows of one length that fill the microbatches, and how many are in each."""
    length = min(tokens, MAX_ROW_TOKENS)
    rows = torch.randint(0, VOCABULARY, (tokens // length * num_microbatches, length))
    return [{"input_ids": row, "labels": row} for row in rows], tokens // length


def seconds(gradient: GradientAccumulator, batch: Samples) -> float:
    """Processor time of one update's gradient; the machine is shared."""
    start = time.process_time()
    gradient.forward_backward(batch, losses.next_token)
    gradient.finalize()
    return time.process_time() - start


def compare(model: nn.Module, tokens: int, num_microbatches: int, num_repeats: int) -> dict[str, float]:
    """Median milliseconds a microbatch, apart and fused, and how many times faster the latter is."""
    batch, micro_batch_size = samples(tokens, num_microbatches)
    ways = {
        name: GradientAccumulator(model, micro_batch_size=micro_batch_size, fuse_accumulation=name == "fused")
        for name in ("apart", "fused")
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(num_repeats + 1):
        for name in sorted(ways, reverse=bool(repeat % 2)):
            times[name].append(seconds(ways[name], batch))
    medians = {name: statistics.median(values[1:]) / num_microbatches for name, values in times.items()}
    return {
        "tokens": tokens,
        "microbatches": num_microbatches,
        "apart_ms": round(1000 * medians["apart"], 3),
        "fused_ms": round(1000 * medians["fused"], 3),
        "times_faster": round(medians["apart"] / medians["fused"], 3),
    }


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 1024], help="of a microbatch")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    made_with = result.made_with(["transformers"])
    found: dict[int, list[dict[str, float]]] = {}
    for hidden in given.hidden:
        model = build(hidden, given.layers)
        for tokens in given.tokens:
            for number in NUM_MICROBATCHES:
                if tokens * number <= MAX_UPDATE_TOKENS:
                    row = compare(model, tokens, number, given.repeats)
                    found.setdefault(hidden, []).append(row)
                    print(f"hidden {hidden:5}", *(f"{name} {value:8}" for name, value in row.items()), flush=True)
    written = {
        "claim": "linear layers that add to their weights' gradients themselves make small microbatches faster",
        **made_with,
        "threads": 1,
        "layers": given.layers,
        "rows_by_hidden": found,
        "repeats": given.repeats,
    }
    print(result.write(result.dated("fused_accumulation"), written))


if __name__ == "__main__":
    main()
