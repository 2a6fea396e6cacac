"""Samples that begin alike beside padded rows: what it saves to compute a prompt once.

One Llama and one update of completions of prompts, cut under one limit, the tokens of four padded rows: padded, and
with `SharedPrefix`, whose cost model says how many completions share a tree. In one process, in turns, on one thread;
times are medians of CPU seconds. Gradients are compared with those of padded rows first.

    python -m benchmarks.shared_prefix        # 5 minutes on a core

Writes benchmarks/results/shared_prefix_*.json. Ends with status 1 where gradients disagree.
"""

import argparse
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import hardware, result
from benchmarks.llama import Shape, llama
from benchmarks.turns import TOLERANCES, Way, difference, gradients, medians, write
from megabatch import GradientAccumulator, losses
from megabatch.batching import SharedPrefix

CLAIM = "a prompt is computed once for its completions, where that is faster"
PADDED, SHARED = "padded rows", "shared prefixes"
SHAPE = Shape(384, 256, 688, 4, 4, 4)
NO_TARGET = -100


class Work(NamedTuple):
    prompt: int  # tokens
    completion: int
    group: int  # completions of a prompt
    prompts: int = 1

    def __str__(self) -> str:
        return f"{self.prompt} / {self.completion} x {self.group}" + (f", {self.prompts} prompts" * (self.prompts > 1))


WORKS = (Work(512, 128, 8), Work(1024, 64, 16), Work(256, 256, 8), Work(256, 512, 8), Work(512, 128, 2, 4))
QUICK = (Work(64, 8, 4), Work(8, 96, 2))


def samples_of(work: Work) -> list[dict[str, Tensor]]:
    """Completions of each prompt, whose tokens are the targets, drawn by chance."""
    drawn = torch.Generator().manual_seed(0)
    found: list[dict[str, Tensor]] = []
    for _ in range(work.prompts):
        prompt = torch.randint(1, SHAPE.vocabulary, (work.prompt,), generator=drawn)
        for _ in range(work.group):
            completion = torch.randint(1, SHAPE.vocabulary, (work.completion,), generator=drawn)
            labels = torch.cat([torch.full_like(prompt, NO_TARGET), completion])
            found.append({"input_ids": torch.cat([prompt, completion]), "labels": labels})
    return found


def update(gradient: GradientAccumulator, samples: list[dict[str, Tensor]]) -> None:
    gradient.forward_backward(samples, losses.next_token)
    gradient.finalize()


def measured_work(model: Any, work: Work, repeats: int) -> dict[str, Any]:
    """Error, tokens and times of one kind of work."""
    samples, limit = samples_of(work), 4 * (work.prompt + work.completion)
    accumulators = {
        name: GradientAccumulator(model, max_microbatch_tokens=limit, batching=batching)
        for name, batching in ((PADDED, None), (SHARED, SharedPrefix()))
    }
    ways: dict[str, Way] = {name: partial(update, each, samples) for name, each in accumulators.items()}
    ways[PADDED]()
    off = difference(model, ways[SHARED], gradients(model))
    rows = medians(ways, repeats, clock=time.process_time)
    plan = accumulators[SHARED].last_plan
    assert plan is not None  # it has just run
    firsts = [first for rows in plan.microbatches for first in plan.firsts_of(rows)]
    return {
        "limit_tokens": limit,
        "tokens": plan.num_tokens,
        "computed_tokens": plan.padded_tokens,
        "samples_per_row": list(Counter(firsts).values()),
        "gradients_differ": off,
        "rows": rows,
        "times_faster": round(rows[PADDED]["ms"] / rows[SHARED]["ms"], 3),
    }


def measured(works: tuple[Work, ...], repeats: int) -> dict[str, Any]:
    """Conditions of the measurement, for the result file."""
    model = llama(SHAPE, 2048, torch.float32, torch.device("cpu"))
    found = {str(work): measured_work(model, work, repeats) for work in works}
    tolerance = TOLERANCES[torch.float32]
    return {
        "shape": SHAPE._asdict(),
        "clock": "CPU seconds of the process",
        "tolerance": tolerance,
        "gradients_agree": max(each["gradients_differ"] for each in found.values()) <= tolerance,
        "works": found,
    }


def said(found: dict[str, Any]) -> str:
    """The table."""
    lines = ["prompt / completion x group"]
    for name, each in found["works"].items():
        padded, shared = (each["rows"][way]["ms"] for way in (PADDED, SHARED))
        lines.append(
            f"{name:28}{each['tokens']:7,} tokens, {each['computed_tokens']:6,} computed, samples a row "
            f"{each['samples_per_row']}, {padded:8.0f} ms, {shared:8.0f} ms, x{each['times_faster']:.2f}, "
            f"gradient off by {each['gradients_differ']:.0e}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short samples, without a result file unless --out")
    parser.add_argument("--repeats", type=hardware.positive, default=5)
    parser.add_argument("--out", type=Path, help="the result file")
    given = parser.parse_args()
    out = given.out or (None if given.quick else result.dated("shared_prefix"))
    works = QUICK if given.quick else WORKS
    write(partial(measured, works, given.repeats), said, out, claim=CLAIM, not_measured=None)


if __name__ == "__main__":
    main()
