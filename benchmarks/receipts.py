"""The cost of holding the gradient against what the last call has left, beside the same update without it.

Both loops train the same small Llama on the same rows. One has its checks taken out: receipts of gradients and
parameters between calls and around each loss, gradients that share memory, hooks and dtypes. They are work of the host,
the same for any model of so many parameters, so an update of 3 ms shows them. Blocks of updates are interleaved; the
ratio is that of medians. Writes benchmarks/results/receipts_*.json.
"""

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks import one_microbatch, result
from megabatch import GradientAccumulator, losses
from megabatch.engine.ownership import Ownership
from megabatch.wrappers import gradients
from megabatch.wrappers.base import Wrapper

NUM_BLOCKS, UPDATES_PER_BLOCK = 40, 20
WARMUP = 10  # blocks of one update
MICROBATCHES = (1, 4)
ROWS, TOKENS = 8, 32


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Inside, nothing is held against anything."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (Ownership, "check"), (Ownership, "leave"), (Ownership, "receipt"), (Ownership, "is_new"),
            (Ownership, "check_unmoved"), (Wrapper, "check_parameters"), (gradients, "separate"),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, nothing))
        yield


def update(accumulator: GradientAccumulator, optimizer: torch.optim.Optimizer, batch: one_microbatch.Batch) -> None:
    """One update of the loop."""
    accumulator.forward_backward(batch, losses.next_token)
    if accumulator.finalize(max_norm=1.0).finite:
        optimizer.step()


def compare(num_microbatches: int) -> dict[str, float]:
    """Median milliseconds of an update with the checks and without, and their ratio."""
    ids = torch.randint(0, 384, (ROWS, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    loops = {}
    for name in ("checked", "unchecked"):
        model, optimizer = one_microbatch.build(32, 1)
        loops[name] = GradientAccumulator(model, micro_batch_size=ROWS // num_microbatches), optimizer
    times: dict[str, list[float]] = {name: [] for name in loops}
    for block in range(WARMUP + NUM_BLOCKS):
        for name in sorted(loops, reverse=bool(block % 2)):
            with unchecked() if name == "unchecked" else contextlib.nullcontext():
                update(*loops[name], batch)  # the interpreter knows its functions again
                for _ in range(UPDATES_PER_BLOCK if block >= WARMUP else 1):
                    start = time.perf_counter()
                    update(*loops[name], batch)
                    times[name].append(time.perf_counter() - start)
    medians = {name: 1000 * statistics.median(values[WARMUP:]) for name, values in times.items()}
    return {f"{name}_ms": value for name, value in medians.items()} | {
        "ratio": medians["checked"] / medians["unchecked"]
    }


def main() -> None:
    """Run, print and write the result beside what it was measured with."""
    torch.set_num_threads(1)
    made_with = result.made_with(["transformers"])
    rows = {str(number): compare(number) for number in MICROBATCHES}
    for name, row in rows.items():
        print(f"{name} microbatches: {row['unchecked_ms']:.3f} ms without, {row['checked_ms']:.3f} ms with the checks")
    claim = "what is held against the last call takes the host a fixed time: 0.05 to 0.1 ms an update for 12 parameters"
    found = {"claim": claim, **made_with, "threads": 1, "rows": rows, "repeats": NUM_BLOCKS * UPDATES_PER_BLOCK}
    print(result.write(result.dated("receipts"), found))


if __name__ == "__main__":
    main()
