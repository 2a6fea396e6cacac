"""Samples in one row beside padded ones: what attention that takes sequences of several lengths at once saves.

One Llama and one update, of functions of the standard library read as bytes, cut under one cap: padded, with sdpa, as
`GradientAccumulator` does by itself; and in one row (`OneRow`) with sdpa, which computes the whole square of a row,
with flex_attention and with flash_attention_2, each where it is there and can train. In one process, in turns, times
are medians of a synchronized clock. Gradients are compared with those of padded samples first.

    python -m benchmarks.one_row        # on a GPU: 1B in bfloat16, minutes; on the CPU a small one, with sdpa alone

Writes benchmarks/results/one_row_*.json. Ends with status 1 where gradients disagree.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import is_flash_attn_2_available

from benchmarks import hardware, result
from benchmarks.llama import Shape, llama
from benchmarks.speed import data
from benchmarks.turns import TOLERANCES, Way, difference, gradients, medians, write
from megabatch import GradientAccumulator, losses
from megabatch.batching.packed_row import OneRow

CLAIM = "attention that takes sequences of several lengths at once needs no padding"
PADDED = "padded, sdpa"
ATTENTIONS = ("sdpa", "flex_attention", "flash_attention_2")  # of rows


class Size(NamedTuple):
    shape: Shape
    longest_tokens: int  # of a sample; longer ones are left out
    samples: int
    max_microbatch_tokens: int
    dtype: torch.dtype
    repeats: int


SIZES = {
    "1b": Size(Shape(32_000, 2048, 8192, 16, 32, 8), 2048, 256, 16_384, torch.bfloat16, 10),
    "small": Size(Shape(384, 192, 512, 2, 6, 6), 2048, 32, 2048, torch.float32, 5),
    "quick": Size(Shape(384, 32, 96, 2, 4, 2), 256, 12, 512, torch.float32, 2),
}


def samples_of(size: Size) -> list[dict[str, Tensor]]:
    """Functions of the standard library, drawn by chance."""
    everything = data.pool("stdlib", size.longest_tokens, Path(), quick=size is SIZES["quick"])
    chosen = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))[: size.samples]
    ids = [torch.tensor(everything[index]) for index in chosen]
    return [{"input_ids": each, "labels": each} for each in ids]


def missing(attention: str) -> str | None:
    """Why this attention cannot train here."""
    if attention == "flex_attention" and hardware.device().type == "cpu":
        return "it has no backward on the CPU"
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        return "flash_attn is not installed, or there is no GPU for it"
    return None


def ways_of(model: Any, size: Size, samples: list[dict[str, Tensor]]) -> tuple[dict[str, Way], dict[str, Any]]:
    """What computes the update's gradient, and the accumulator of each."""
    there = [each for each in ATTENTIONS if not missing(each)]
    asked = {PADDED: ("sdpa", None)} | {f"one row, {each}": (each, OneRow()) for each in there}
    ways: dict[str, Way] = {}
    accumulators: dict[str, GradientAccumulator] = {}
    for name, (attention, batching) in asked.items():
        model.set_attn_implementation(attention)  # which a row is tried with
        accumulators[name] = GradientAccumulator(
            model, max_microbatch_tokens=size.max_microbatch_tokens, batching=batching
        )
        ways[name] = partial(update, model, attention, accumulators[name], samples)
    return ways, accumulators


def update(model: Any, attention: str, gradient: GradientAccumulator, samples: list[dict[str, Tensor]]) -> None:
    model.set_attn_implementation(attention)
    gradient.forward_backward(samples, losses.next_token)
    gradient.finalize()


def differences(model: nn.Module, ways: dict[str, Way]) -> dict[str, float]:
    """Of gradients in one row from those of padded samples, relative."""
    ways[PADDED]()
    expected = gradients(model)
    return {name: difference(model, way, expected) for name, way in ways.items() if name != PADDED}


def measured(size: Size) -> dict[str, Any]:
    """Conditions of the measurement, for the result file."""
    model = llama(size.shape, size.longest_tokens, size.dtype, hardware.device())
    samples = samples_of(size)
    ways, accumulators = ways_of(model, size, samples)
    apart, tolerance = differences(model, ways), TOLERANCES[size.dtype]
    rows = medians(ways, size.repeats)
    for name, row in rows.items():
        plan = accumulators[name].last_plan
        assert plan is not None  # it has just run
        row |= {"microbatches": plan.num_microbatches, "padding": round(plan.padding, 4)}
        row["tokens_per_second"] = round(1000 * plan.num_tokens / row["ms"], 1)
        row["times_padded"] = round(row["ms"] / rows[PADDED]["ms"], 4)
    return {
        "size": {**size._asdict(), "shape": size.shape._asdict(), "dtype": str(size.dtype).removeprefix("torch.")},
        "real_tokens": sum(len(each["input_ids"]) for each in samples),
        "gradients_differ": apart,
        "tolerance": tolerance,
        "gradients_agree": max(apart.values()) <= tolerance,
        "rows": rows,
        "left_out": {each: why for each in ATTENTIONS if (why := missing(each))},
    }


def asked() -> tuple[str, Size, Path | None]:
    """The size by name and as it is asked for, and where its result goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, without a result file unless --out")
    parser.add_argument("--repeats", type=hardware.positive)
    parser.add_argument("--out", type=Path, help="the result file")
    given = parser.parse_args()
    name = hardware.size_named("1b", quick=given.quick)
    size = SIZES[name]._replace(**({"repeats": given.repeats} if given.repeats else {}))
    return name, size, given.out or (None if given.quick else result.dated("one_row", hardware.name()))


def said(found: dict[str, Any]) -> str:
    """The table, and what it is not."""
    lines = [f"{found['real_tokens']:,} tokens an update, {found['size']['dtype']}, {found['hardware']}"]
    for name, row in found["rows"].items():
        off = found["gradients_differ"].get(name, 0.0)
        lines.append(
            f"{name:27}{row['ms']:10.1f} ms  x{row['times_padded']:.2f}  padding {row['padding']:5.1%}, "
            f"microbatches {row['microbatches']}, gradient off by {off:.0e}"
        )
    return "\n".join(lines + [f"left out: {name}: {why}" for name, why in found["left_out"].items()])


def main() -> None:
    name, size, out = asked()
    write(partial(measured, size), said, out, claim=CLAIM, not_measured=hardware.not_measured(name, "1b"))


if __name__ == "__main__":
    main()
