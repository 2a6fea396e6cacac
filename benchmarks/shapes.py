"""Tokens computed with `shapes=K`, beside the free split, on the lengths of GSM8K.

    python -m benchmarks.shapes                       # a minute of one core; writes benchmarks/results/shapes_*.json
    python -m benchmarks.shapes --gsm8k FILE --quick  # a part, of which nothing is written

Shapes are chosen from the first update and used in all others, as GradientAccumulator does. No model runs: the numbers
follow from lengths alone. A token is a byte, or a fourth of a sample's bytes, which is about what a vocabulary of words
gives.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import result
from benchmarks.speed.__main__ import GSM8K
from megabatch.planning.partition import plan_share
from megabatch.planning.shapes import choose_shapes, plan_in_shapes

CLAIM = (
    "on the lengths of GSM8K, six shapes of packed rows compute about as many tokens as the free split of padded rows"
)
COUNTS = (3, 6, 12)  # shapes
LIMITS = (2048, 8192, 16384)  # tokens of a microbatch
UPDATES = (8, 16, 32, 64, 128, 256, 512)  # samples of a rank
MAX_UPDATES = 100
KINDS = {"bytes": 1, "bytes / 4": 4}


def lengths_of(path: Path, bytes_per_token: int) -> np.ndarray:
    """Tokens of each sample, in an order drawn once."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    counted = np.array([len(f"{row['question']}\n{row['answer']}".encode()) for row in rows])
    return np.random.default_rng(0).permutation(-(-counted // bytes_per_token))


def measure(lengths: np.ndarray, num_samples: int, max_tokens: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the tokens computed by each cut over those of the samples."""
    starts = range(0, min(len(lengths) // num_samples, MAX_UPDATES) * num_samples, num_samples)
    updates = [lengths[start : start + num_samples].tolist() for start in starts]
    real = sum(map(sum, updates))
    free = [plan_share(update, None, max_tokens, None) for update in updates]
    row: dict[str, Any] = {"samples": num_samples, "max_tokens": max_tokens, "updates": len(updates)}
    row["free"] = round(sum(plan.padded_tokens for plan in free) / real, 4)
    row["free_microbatches"] = sum(plan.num_microbatches for plan in free)
    row["free_shapes"] = len({(len(rows), max(plan.lengths_of(rows))) for plan in free for rows in plan.microbatches})
    for packed in (True, False):
        for count in counts:
            chosen = choose_shapes(updates[0], count, num_samples=num_samples, max_tokens=max_tokens, packed=packed)
            plans = [plan_in_shapes(update, chosen, None, max_tokens, None, packed=packed) for update in updates]
            row[f"{'row' if packed else 'padded'}_{count}"] = {
                "computed_over_real": round(sum(plan.padded_tokens for plan in plans) / real, 4),
                "computed_over_free": round(sum(plan.padded_tokens for plan in plans) / real / row["free"], 4),
                "microbatches": sum(plan.num_microbatches for plan in plans),
                "shapes": len({shape for plan in plans for shape in plan.shapes.values()}),
            }
    return row


def main() -> None:
    """Print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, default=GSM8K, help="a JSON object a line: question, answer")
    parser.add_argument("--quick", action="store_true", help="six shapes and one limit; nothing is written")
    asked = parser.parse_args()
    made = result.made_with()
    counts, limits = ((6,), (8192,)) if asked.quick else (COUNTS, LIMITS)
    rows: list[dict[str, Any]] = []
    for kind, bytes_per_token in KINDS.items():
        lengths = lengths_of(asked.gsm8k, bytes_per_token)
        for max_tokens in limits:
            for num_samples in UPDATES:
                row = {"token": kind} | measure(lengths, num_samples, max_tokens, counts)
                rows.append(row)
                six = [
                    f"{row[name]['computed_over_free']:.3f} ({row[name]['shapes']})" for name in ("row_6", "padded_6")
                ]
                print(
                    kind,
                    max_tokens,
                    num_samples,
                    f"free {row['free']:.3f} ({row['free_shapes']})",
                    *six,
                    sep="  ",
                    flush=True,
                )
    if not asked.quick:
        print(result.write(result.dated("shapes"), {"claim": CLAIM, **made, "rows": rows}))


if __name__ == "__main__":
    main()
