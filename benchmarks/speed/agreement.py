"""Whether contestants made the update that they are said to make, by gradients and weights in float64."""

from collections.abc import Iterable
from typing import Any

EXACT = 1e-6  # what float32 inside a peer's own loss comes to, and far below what another update makes of the weights
SAME = 1e-10  # of a gradient's error, and of the sum of all weights
Row = dict[str, Any]


def disagreeing(rows: Iterable[Row]) -> list[str]:
    """Who did not, and by how much.

    Who weighs by targets has the gradient and the weights of uncut updates. Who takes a mean of microbatches' means has
    the plain loop's, where the same samples share a microbatch; on several ranks Lightning deals them otherwise. Packs
    are like nobody's.
    """
    rows = list(rows)
    plain = {(row["regime"], row["data"], row["ranks"]): row for row in rows if row["contestant"] == "plain"}
    found: list[str] = []
    for row in rows:
        error = off(row, plain.get((row["regime"], row["data"], row["ranks"])))
        if error is not None and error > (SAME if row["weighs"] == "microbatches" else EXACT):
            found.append(
                f"{row['contestant']} on {row['data']} ({row['regime']}), {row['ranks']} ranks: its update is off by "
                f"{error:.1e}"
            )
    return found


def off(row: Row, plain: Row | None) -> float | None:
    """How far the gradient or the weights are from where they should be; AdamW's weights alone know no scale."""
    if row["weights_error"] is None:
        return None
    if row["weighs"] == "targets":
        return max(row["gradient_error"], row["weights_error"])
    if plain is None or not row["same_samples"] or (row["contestant"] == "lightning" and row["ranks"] > 1):
        return None
    of_gradient = abs(row["gradient_error"] - plain["gradient_error"])
    return max(of_gradient, abs(row["proof_weights"] / plain["proof_weights"] - 1))
