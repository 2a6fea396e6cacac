"""Whether contestants made the update that they are said to make, by the weights that came out of it in float64."""

from collections.abc import Iterable
from typing import Any

EXACT = 1e-6  # what float32 inside a peer's own loss comes to, and far below what another update makes of the weights
SAME = 1e-10  # of the sum of all weights
Row = dict[str, Any]


def disagreeing(rows: Iterable[Row]) -> list[str]:
    """Who did not, and by how much.

    Who weighs by targets has the weights of uncut updates; packs do not, as their updates are others. Who takes a mean
    of microbatches' means has the plain loop's weights, where the same samples share a microbatch; on several ranks
    Lightning deals them otherwise.
    """
    rows = list(rows)
    plain = {(row["data"], row["ranks"]): row["proof_weights"] for row in rows if row["contestant"] == "plain"}
    found: list[str] = []
    for row in rows:
        error, most = row["weights_error"], EXACT
        if row["weighs"] == "microbatches":
            alone = not row["same_samples"] or (row["contestant"] == "lightning" and row["ranks"] > 1)
            partner = None if alone else plain.get((row["data"], row["ranks"]))
            error, most = partner and abs(row["proof_weights"] / partner - 1), SAME
        if error is not None and error > most:
            found.append(f"{row['contestant']} on {row['data']}, {row['ranks']} ranks: weights are off by {error:.1e}")
    return found
