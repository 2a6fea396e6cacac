"""Few shapes: microbatches of K sizes (rows x tokens), chosen to cost least, so that torch.compile compiles K graphs.

Pure and deterministic: every rank computes the same answer from the same lengths.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megabatch.planning.plan import LAUNCH_SHARE, CostModel, Plan

Shape = tuple[int, int]  # rows, and the tokens that each is padded to
Groups = dict[tuple[int, ...], Shape]  # samples of a microbatch → its shape
NUM_LENGTHS, NUM_DRAWS, MAX_DRAWN = 24, 8, 256  # lengths tried; updates drawn, and samples of each
ROUNDS = 3  # in which each shape is chosen again beside the others


def split_into_shapes(lengths: Sequence[int], shapes: Sequence[Shape], seconds: Callable[[int, int], float]) -> Groups:
    """Group samples into microbatches of given shapes at the least total price; the longest come first.

    Some cheapest grouping fills each shape with neighbors in the order of length, so this is a shortest path over the
    sorted samples. Rows without a sample cost as much as any.

    Args:
        lengths: Tokens of each sample, none above the longest of ``shapes``.
        shapes: Rows and tokens of each shape.
        seconds: Price of a microbatch of rows x tokens.

    Returns:
        The shape of each microbatch, by the indices of its samples.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    kinds = [(tokens, rows, seconds(rows, tokens)) for rows, tokens in shapes]
    best, chosen = [0.0] * (len(order) + 1), [(0, 0)] * len(order)
    for start in range(len(order) - 1, -1, -1):
        length = lengths[order[start]]
        best[start], chosen[start] = min(
            (price + best[min(start + rows, len(order))], (rows, tokens))
            for tokens, rows, price in kinds
            if tokens >= length
        )
    groups, start = Groups(), 0
    while start < len(order):
        rows, _ = chosen[start]
        groups[tuple(order[start : start + rows])] = chosen[start]
        start += rows
    return groups


def plan_in_shapes(
    lengths: Sequence[int], shapes: Sequence[Shape], max_rows: int | None, max_tokens: int | None,
    cost: CostModel | None, num_positions: int | None = None,
) -> Plan:  # fmt: skip
    """Split one rank's samples into microbatches of ``shapes``, unpriced. The lengths are checked already.

    A limit lowers the rows of a shape. Longer samples run alone, padded to twice the longest shape, or four times, ...,
    or to ``num_positions``, the most that the model has.
    """
    top, needed = shapes[0][1], max(lengths, default=0)
    kinds = [(_most_rows(rows, tokens, max_rows, max_tokens), tokens) for rows, tokens in shapes]
    while top < needed:
        top = min([2 * top, *(most for most in (max_tokens, num_positions) if most is not None and most >= needed)])
        kinds.append((1, top))
    groups = split_into_shapes(lengths, kinds, (cost or _usual_cost(shapes)).seconds)
    return Plan(tuple(groups), tuple(lengths), tuple(range(len(lengths))), shapes=groups)


def _most_rows(rows: int, tokens: int, max_rows: int | None, max_tokens: int | None) -> int:
    return max(1, min(rows, max_rows or rows, rows if max_tokens is None else max_tokens // tokens))


def _usual_cost(shapes: Sequence[Shape]) -> CostModel:
    """Return the cost of a microbatch that was not measured: a launch is a share of the largest shape."""
    return CostModel(seconds_per_microbatch=max(rows * tokens for rows, tokens in shapes) / LAUNCH_SHARE)


def choose_shapes(
    lengths: Sequence[int], count: int, *, num_samples: int, max_rows: int | None = None,
    max_tokens: int | None = None, cost: CostModel | None = None,
) -> tuple[Shape, ...]:  # fmt: skip
    """Choose at most ``count`` shapes of microbatches that cost least on updates drawn from known lengths.

    Each shape in turn is the one that lowers the price of the drawn updates most; then each is chosen again beside the
    others. One shape is as long as the longest sample.

    Args:
        lengths: Tokens of known samples.
        count: Number of shapes.
        num_samples: Samples of a rank in an update.
        max_rows: Samples of a microbatch. This or
        max_tokens: padded tokens of a microbatch.
        cost: Seconds of a microbatch. None uses relative costs.

    Returns:
        Rows and tokens of each shape, the longest first.
    """
    known = np.sort(np.maximum(np.asarray(lengths, dtype=np.int64), 1))
    drawn = max(1, min(num_samples, len(known), MAX_DRAWN))
    random = np.random.default_rng(0)
    updates = np.stack([np.sort(random.choice(known, drawn, replace=False))[::-1] for _ in range(NUM_DRAWS)])
    top = int(known[-1])
    kinds = np.array(sorted({
        (rows >> halvings, tokens)
        for tokens in np.quantile(known, np.linspace(0, 1, NUM_LENGTHS + 1)[1:], method="higher").tolist()
        for rows in [_most_rows(drawn, tokens, max_rows, max_tokens)]
        for halvings in range(rows.bit_length())
    }))  # fmt: skip
    price = (cost or _usual_cost(kinds.tolist())).seconds
    prices = np.array([price(*kind) for kind in kinds.tolist()])
    found: list[int] = []
    for turn in range(count * ROUNDS):
        others = found[1:] if turn >= count else found  # the one that has been there longest is chosen again
        added = _totals(updates, kinds, prices, others)
        if not any(kinds[each][1] == top for each in others):
            added[kinds[:, 1] < top] = np.inf
        found = [*others, int(added.argmin())]
    return tuple(sorted({tuple(kinds[each].tolist()) for each in found}, key=lambda kind: (-kind[1], -kind[0])))


def _totals(updates: np.ndarray, kinds: np.ndarray, prices: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
    """Return the price of all updates [updates, samples] with each kind beside the chosen ones: [kinds]."""
    num = updates.shape[1]
    best = np.zeros((num + 1, len(kinds), len(updates)))  # price of the samples from each place on
    every = np.arange(len(kinds))
    for start in range(num - 1, -1, -1):
        fits = kinds[:, 1, None] >= updates[None, :, start]
        ends = np.minimum(start + kinds[:, 0], num)
        best[start] = np.where(fits, prices[:, None] + best[ends, every], np.inf)
        for each in chosen:
            through = np.where(fits[each], prices[each] + best[ends[each]], np.inf)
            np.minimum(best[start], through, out=best[start])
    return best[0].sum(axis=1)
