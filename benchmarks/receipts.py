"""The cost of holding the gradient against what the last call has left, beside the same update without it.

One process trains one small Llama on the same rows. Updates alternate strictly: one with the checks, one without. The
order within a pair alternates too. The checks are receipts of gradients and parameters between calls and around each
loss, gradients that share memory, hooks and dtypes. They are work of the host, the same for any model of so many
parameters, so an update of 3 ms shows them. Only CPU time of the one thread counts. The garbage collector runs between
blocks, untimed. The ratio is that of means without the slowest and fastest tenths. Its interval is bootstrapped over
blocks.
Writes benchmarks/results/receipts_*.json.
"""

import gc
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch

from benchmarks import one_microbatch, result
from megabatch import GradientAccumulator, losses
from megabatch.core import update as engine_update
from megabatch.core.guard import CallGuard
from megabatch.guards import call_watch

NUM_BLOCKS, PAIRS_PER_BLOCK = 80, 25
NUM_RESAMPLES = 4000
TRIMMED = 0.1  # of the updates of a kind in a block, at each end
MICROBATCHES = (1, 4)
ROWS, TOKENS = 4, 32


class Nothing:
    """Holds nothing against anything."""

    def of(self, *_: Any, **named: Any) -> None:
        """Note nothing."""

    check = enter = leave = release = of


def switches(gradient: GradientAccumulator) -> dict[str, Callable[[], None]]:
    """Return functions that put the checks of this accumulator in and take them out. Call them untimed."""
    nothing, of_gradient = Nothing(), cast(Any, gradient)
    wrapper = of_gradient.wrapper
    places: list[tuple[Any, str, Any]] = [  # methods are exchanged on objects, since classes keep caches
        (of_gradient, "call_guard", CallGuard()),
        (wrapper, "check_unchanged", nothing.of),
        (call_watch, "Receipt", nothing),
        (call_watch, "check_unmoved", nothing.of),
        (engine_update, "separate_gradients", nothing.of),
    ]
    own = [getattr(owner, name) for owner, name, _ in places]

    def put_in() -> None:
        for (owner, name, _), value in zip(places, own, strict=True):
            setattr(owner, name, value)

    def take_out() -> None:
        for owner, name, value in places:
            setattr(owner, name, value)

    return {"checked": put_in, "unchecked": take_out}


def compare(num_microbatches: int) -> dict[str, Any]:
    """CPU milliseconds of an update with the checks and without, and their ratio with its interval."""
    ids = torch.randint(0, 384, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    model, optimizer = one_microbatch.build(32, 1)
    gradient = GradientAccumulator(model, micro_batch_size=ROWS // num_microbatches)
    set_checks = switches(gradient)
    times: dict[str, list[list[float]]] = {name: [] for name in set_checks}  # by block
    for block in range(NUM_BLOCKS + 1):  # the first is a warm-up
        for seconds in times.values():
            seconds.append([])
        gc.collect()
        for pair in range(PAIRS_PER_BLOCK):
            for name in sorted(set_checks, reverse=bool((block + pair) % 2)):
                set_checks[name]()
                start = time.thread_time()
                gradient.forward_backward(batch, losses.next_token)
                if gradient.finalize(max_norm=1.0).finite:
                    optimizer.step()
                times[name][-1].append(time.thread_time() - start)
    set_checks["checked"]()
    means = {name: np.array([trimmed_mean(each) for each in blocks[1:]]) for name, blocks in times.items()}
    chosen = np.random.default_rng(0).integers(NUM_BLOCKS, size=(NUM_RESAMPLES, NUM_BLOCKS))
    resampled = {name: values[chosen].mean(1) for name, values in means.items()}
    low, high = np.quantile(resampled["checked"] / resampled["unchecked"], [0.025, 0.975])
    return {
        "checked_ms": 1000 * means["checked"].mean(),
        "unchecked_ms": 1000 * means["unchecked"].mean(),
        "ratio": means["checked"].mean() / means["unchecked"].mean(),
        "ratio_95_percent": [low, high],
    }


def trimmed_mean(values: list[float]) -> float:
    """Return the mean without the lowest and the highest tenth."""
    cut = round(TRIMMED * len(values))
    return float(np.mean(sorted(values)[cut : len(values) - cut]))


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    torch.set_num_threads(1)
    gc.disable()
    made_with = result.made_with(["transformers"])
    rows = {str(number): compare(number) for number in MICROBATCHES}
    for name, row in rows.items():
        low, high = row["ratio_95_percent"]
        print(
            f"{name} microbatches: {row['unchecked_ms']:.3f} ms, {row['ratio']:.4f} ({low:.4f} to {high:.4f}) checked"
        )
    claim = "CPU time of an update with what is held against the last call, over the same without it, for 12 parameters"
    pairs = NUM_BLOCKS * PAIRS_PER_BLOCK
    print(
        result.write(
            result.dated("receipts"), {"claim": claim, **made_with, "threads": 1, "rows": rows, "pairs": pairs}
        )
    )


if __name__ == "__main__":
    main()
