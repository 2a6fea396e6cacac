"""What is predicted of an update's memory, beside what a process takes for it.

Every run is one update of a small Llama on the CPU, on processes of its own. Measured is the high-water mark of
resident memory (VmHWM, reset before the update) above what was resident before the model was made, on rank 0; predicted
is `megabatch.simulate`, which runs without any of it. tests/memory asserts what tensors take. A process also holds
scratch of libraries, which depends on its processor: MKL's kernels for Intel hold 12 to 14 MB more than those for AMD.
Writes benchmarks/results/memory_*.json.

    python -m benchmarks.memory                 # all, some twenty minutes on two cores
    python -m benchmarks.memory 25m:ddp         # those whose names have this in them; writes nothing
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import result
from tests.exact.launch import launch
from tests.memory.runs import MALLOC, Run, honest_malloc, predicted

MEGABYTE = 10**6
CLAIM = (
    "the peak of an update's memory is predicted without running it, at 95 to 100 % of what its process takes, in "
    "float32 and in bfloat16; the rest is scratch of libraries, which differs by processor"
)
RUNS = [
    Run(),
    Run(rows=16),
    Run(rows=16, recompute="yes"),
    Run(microbatches=3),
    Run(optimizer="sgd-foreach"),
    Run(optimizer="adamw-fused"),
    Run(precision="bfloat16"),
    Run(wrapper="ddp", microbatches=2),
    Run(wrapper="ddp", microbatches=2, sync="every"),
    Run(wrapper="ddp", rows=8, optimizer="sgd-foreach"),
    Run(wrapper="fsdp2"),
    Run(wrapper="fsdp2", microbatches=3),
    Run(wrapper="fsdp2", microbatches=3, sync="every"),
    Run(wrapper="fsdp2", rows=16, microbatches=2, sync="every", recompute="yes"),
    Run(wrapper="fsdp2", microbatches=2, precision="mixed"),
    Run(wrapper="fsdp2", microbatches=2, sync="every", precision="mixed"),
    Run(wrapper="fsdp2", microbatches=2, precision="bfloat16"),
    Run(wrapper="fsdp2", microbatches=2, sync="every", optimizer="adamw-fused"),
    Run(wrapper="fsdp2", microbatches=2, sync="every", optimizer="sgd-foreach"),
    Run(wrapper="hsdp", microbatches=2),
    Run(wrapper="hsdp", microbatches=2, sync="every"),
    Run(wrapper="hsdp", microbatches=2, sync="replica_last"),
    Run("flat"),
    Run("flat", "ddp", microbatches=2),
    Run("flat", "fsdp2", microbatches=2),
    Run("flat", "fsdp2", microbatches=2, sync="every"),
    Run("100m", rows=2),
    Run("100m", rows=8, recompute="yes"),
    Run("100m", "ddp", rows=2, microbatches=2),
    Run("100m", "fsdp2", rows=2, microbatches=2),
    Run("100m", "fsdp2", rows=2, microbatches=2, sync="every"),
]


def compare(run: Run, folder: Path) -> dict[str, Any]:
    """Both numbers of a run, with what they are made of."""
    job = f"measured/{run}"
    with honest_malloc():
        (first, *_) = launch(run.world, "tests.memory.runs:job", [job], folder)[job]
    if "error" in first:
        raise SystemExit(first["error"])
    real, simulated = first["value"], predicted(run)
    return {
        "run": str(run),
        "predicted_bytes": simulated.peak_bytes,
        "measured_bytes": real["peak_bytes"],
        "ratio": round(simulated.peak_bytes / real["peak_bytes"], 4),
        "resident_before_bytes": real["before_bytes"],
        "resident_high_bytes": real["high_bytes"],
        "where": simulated.where,
        "at_peak_bytes": simulated.at_peak,
        "sent_bytes": simulated.sent_bytes,
    }


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    made_with = result.made_with(["transformers"])
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(run for run in RUNS if wanted in str(run)):
            row = compare(run, Path(folder) / str(number))
            rows.append(row)
            sizes = "  ".join(f"{row[f'{kind}_bytes'] / MEGABYTE:8.1f}" for kind in ("predicted", "measured"))
            print(f"{row['run']:62} {sizes} MB  {row['ratio']:.3f}", flush=True)
    ratios = [row["ratio"] for row in rows]
    print(f"{len(rows)} runs, predicted / measured {min(ratios)} to {max(ratios)}")
    if wanted:
        return
    found = {
        "claim": CLAIM,
        **made_with,
        "threads_a_process": 1,
        "names": "size:wrapper:rows:tokens:microbatches:sync:optimizer:precision:recompute",
        "rows": rows,
        "ratio": {"least": min(ratios), "median": statistics.median(ratios), "most": max(ratios)},
        "malloc": MALLOC,
    }
    print(result.write(result.dated("memory"), found))


if __name__ == "__main__":
    main()
