"""Few shapes (shape buckets): microbatches of K sizes (rows x tokens), chosen to cost least, for torch.compile.

Pure and deterministic: every rank computes the same answer from the same lengths.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megabatch.planning.packing import best_fit
from megabatch.planning.plan import LAUNCH_SHARE, CostModel, Plan

Shape = tuple[int, int]  # rows, and the tokens that each is filled up to
Groups = dict[tuple[int, ...], Shape]  # samples of a microbatch → its shape
NUM_LENGTHS, NUM_DRAWS, MAX_DRAWN = 24, 8, 256  # lengths tried; updates drawn, and samples of each
NUM_PACKED, NUM_ROWS = 64, 512  # updates drawn to be packed, and rows of them whose sizes are looked at
ROUNDS = 3  # in which each shape is chosen again beside the others


def choose_shapes(
    lengths: Sequence[int], count: int, *, num_samples: int, max_rows: int | None = None,
    max_tokens: int | None = None, cost: CostModel | None = None, packed: bool = False,
) -> tuple[Shape, ...]:  # fmt: skip
    """Choose at most ``count`` shapes of microbatches that cost least on updates drawn from known lengths.

    Padded: each shape in turn is the one that lowers the price of the drawn updates most; then each is chosen again
    beside the others. One shape is as long as the longest sample. Packed: the sizes of a row to which the rows of the
    drawn updates are filled up with the fewest tokens. One of them is ``max_tokens``.

    Args:
        lengths: Tokens of known samples.
        count: Number of shapes.
        num_samples: Samples of a rank in an update.
        max_rows: Most samples of a microbatch. None: ``max_tokens`` limits it.
        max_tokens: Most padded tokens of a microbatch. None: ``max_rows`` limits it.
        cost: Seconds of a microbatch. None uses relative costs.
        packed: True for samples that lie in one row; ``max_tokens`` is then given.

    Returns:
        Rows and tokens of each shape, the longest first.
    """
    known = np.sort(np.maximum(np.asarray(lengths, dtype=np.int64), 1))
    drawn = max(1, min(num_samples, MAX_DRAWN))
    random = np.random.default_rng(0)  # with replacement: the known samples may be those of a single update
    if packed:
        assert max_tokens is not None  # or the accumulator was not made
        updates = random.choice(known, (NUM_PACKED, drawn))
        packs = [(update, best_fit(update.tolist(), max_tokens)) for update in updates]
        totals = [int(update[row].sum()) for update, rows in packs for row in rows]
        return tuple((1, tokens) for tokens in _fewest_tokens(totals, count, max_tokens))
    updates = np.sort(random.choice(known, (NUM_DRAWS, drawn)))[:, ::-1]
    top = int(known[-1])
    kinds = np.array(sorted({
        (rows >> halvings, tokens)
        for tokens in np.quantile(known, np.linspace(0, 1, NUM_LENGTHS + 1)[1:], method="higher").tolist()
        for rows in [_most_rows(drawn, tokens, max_rows, max_tokens)]
        for halvings in range(rows.bit_length())
    }))  # fmt: skip
    price = (cost or _usual_cost(kinds.tolist())).seconds
    prices = np.array([price(*kind) for kind in kinds.tolist()])
    chosen: list[int] = []
    for turn in range(count * ROUNDS):
        other_kinds = chosen[1:] if turn >= count else chosen  # the one that has been there longest is chosen again
        added = _totals(updates, kinds, prices, other_kinds)
        if not any(kinds[kind][1] == top for kind in other_kinds):
            added[kinds[:, 1] < top] = np.inf
        chosen = [*other_kinds, int(added.argmin())]
    shapes = {tuple(kinds[kind].tolist()) for kind in chosen}
    return tuple(sorted(shapes, key=lambda shape: (-shape[1], -shape[0])))


def _totals(updates: np.ndarray, kinds: np.ndarray, prices: np.ndarray, chosen: Sequence[int]) -> np.ndarray:
    """Return the price of all updates [updates, samples] with each kind beside the chosen ones: [kinds]."""
    num = updates.shape[1]
    best = np.zeros((num + 1, len(kinds), len(updates)))  # price of the samples from each place on
    every = np.arange(len(kinds))
    for start in range(num - 1, -1, -1):
        fits = kinds[:, 1, None] >= updates[None, :, start]
        ends = np.minimum(start + kinds[:, 0], num)
        best[start] = np.where(fits, prices[:, None] + best[ends, every], np.inf)
        for kind in chosen:
            through = np.where(fits[kind], prices[kind] + best[ends[kind]], np.inf)
            np.minimum(best[start], through, out=best[start])
    return best[0].sum(axis=1)


def _fewest_tokens(totals: Sequence[int], count: int, top: int) -> list[int]:
    """Return at most ``count`` sizes, ``top`` among them, that hold rows of these totals with the fewest tokens."""
    rows = np.sort(np.asarray(totals))[:: max(1, len(totals) // NUM_ROWS)]
    sizes, counts = np.unique([*rows.tolist(), top], return_counts=True)
    held = np.concatenate([[0], np.cumsum(counts)])
    best, before = held[1:] * sizes, list[np.ndarray]()  # tokens of the rows up to each size, if that is the largest
    for _ in range(min(count, len(sizes)) - 1):
        through = best[:, None] + (held[None, 1:] - held[1:, None]) * sizes[None, :]  # [last but one, last]
        through[np.tril_indices(len(sizes))] = np.iinfo(np.int64).max
        through = np.vstack([held[1:] * sizes, through])  # or no smaller size at all
        before.append(through.argmin(axis=0))
        best = through.min(axis=0)
    sizes_chosen, last = [int(sizes[-1])], len(sizes) - 1
    for argmin in reversed(before):
        if (row := int(argmin[last])) == 0:
            break
        last = row - 1
        sizes_chosen.append(int(sizes[last]))
    return sizes_chosen


def plan_in_shapes(
    lengths: Sequence[int], shapes: Sequence[Shape], max_rows: int | None, max_tokens: int | None,
    cost: CostModel | None, *, packed: bool = False, num_positions: int | None = None,
) -> Plan:  # fmt: skip
    """Split one rank's samples into microbatches of ``shapes``, unpriced. The lengths are checked already.

    Args:
        lengths: Tokens of each sample.
        shapes: Rows and tokens of each shape, the longest first.
        max_rows: Most samples of a microbatch. None: ``max_tokens`` limits it.
        max_tokens: Most tokens of a microbatch. None: ``max_rows`` limits it. Both may be below what the shapes were
            chosen for, which are then smaller.
        cost: Seconds of a microbatch. None uses relative costs.
        packed: True for samples that lie in one row.
        num_positions: The longest row that the model takes, where samples are padded.
    """
    kinds = shapes_within(shapes, max(lengths, default=0), max_rows, max_tokens, num_positions)
    seconds = (cost or _usual_cost(shapes)).seconds
    groups = (_pack_into_shapes if packed else split_into_shapes)(lengths, kinds, seconds)
    return Plan(tuple(groups), tuple(lengths), tuple(range(len(lengths))), shapes=groups, padded=not packed)


def shapes_within(
    shapes: Sequence[Shape], longest: int, max_rows: int | None, max_tokens: int | None, num_positions: int | None
) -> list[Shape]:
    """Return the shapes as the limits allow them, and one row for samples of ``longest`` tokens that fit in none.

    That row has twice the tokens of the longest shape, or four times, ..., or the most that a limit allows.
    """
    top = shapes[0][1] if max_tokens is None else min(shapes[0][1], max_tokens)
    cut = ((rows, min(tokens, top)) for rows, tokens in shapes)
    kinds = [*dict.fromkeys((_most_rows(rows, tokens, max_rows, max_tokens), tokens) for rows, tokens in cut)]
    while top < longest:
        known = [tokens for _, tokens in shapes if tokens >= longest][-1:]
        top = min([2 * top, *(limit for limit in (*known, max_tokens, num_positions) if limit and limit >= longest)])
        if top >= longest:
            kinds.append((1, top))
    return kinds


def split_into_shapes(lengths: Sequence[int], shapes: Sequence[Shape], seconds: Callable[[int, int], float]) -> Groups:
    """Group samples into padded microbatches of given shapes at the least total price; the longest come first.

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


def _pack_into_shapes(lengths: Sequence[int], shapes: Sequence[Shape], seconds: Callable[[int, int], float]) -> Groups:
    """Pack samples into rows of given sizes: the cheapest of the packings that fill each size as far as they can."""
    sizes = sorted({tokens for _, tokens in shapes})
    counted = [max(1, length) for length in lengths]
    longest = max(counted, default=1)
    packings = [
        {
            tuple(row): (1, next(size for size in sizes if size >= sum(counted[index] for index in row)))
            for row in best_fit(counted, capacity)
        }
        for capacity in sizes
        if capacity >= longest
    ]
    return min(packings, key=lambda groups: sum(seconds(1, tokens) for _, tokens in groups.values()))


def _most_rows(rows: int, tokens: int, max_rows: int | None, max_tokens: int | None) -> int:
    return max(1, min(rows, max_rows or rows, rows if max_tokens is None else max_tokens // tokens))


def _usual_cost(shapes: Sequence[Shape]) -> CostModel:
    """Return the cost of a microbatch that was not measured: a launch is a share of the largest shape."""
    return CostModel(seconds_per_microbatch=max(rows * tokens for rows, tokens in shapes) / LAUNCH_SHARE)
