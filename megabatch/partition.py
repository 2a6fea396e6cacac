"""Integers into bins: `deal` balances shares over ranks, `pack` fills microbatches under a cap.

Both are pure and deterministic: every rank computes the same answer from the same lengths.
"""

import heapq
from collections.abc import Callable, Sequence

Size = Callable[[int, int], float]  # (rows, longest length) -> price of a microbatch


def deal(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Deal the items over ``num_bins`` bins whose sizes differ by at most one and whose costs are close.

    The costliest item goes first, each to the cheapest bin that still has room (longest processing time first,
    Graham 1969, with equal cardinalities so that the bins also cut into equal numbers of microbatches).
    Returns each bin's item indices in rising order; with fewer items than bins some bins are empty.
    """
    if num_bins == 1:
        return [list(range(len(costs)))]
    room = [len(costs) // num_bins + 1] * (len(costs) % num_bins)
    room += [len(costs) // num_bins] * (num_bins - len(room))
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, index) for index in range(num_bins) if room[index]]
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        load, index = heapq.heappop(heap)
        bins[index].append(item)
        if len(bins[index]) < room[index]:
            heapq.heappush(heap, (load + costs[item], index))
    return [sorted(items) for items in bins]


def pack(
    lengths: Sequence[int], price: Size, *, max_rows: int | None = None, max_tokens: int | None = None
) -> list[tuple[int, ...]]:
    """Group the items into microbatches under a cap, at the least total price; the longest come first.

    A microbatch of ``rows`` items whose longest is ``longest`` holds ``rows * longest`` padded tokens, at most
    ``max_tokens``, and at most ``max_rows`` items. Some cheapest grouping takes neighbours in the order of
    length whenever the price grows with both arguments, so a shortest path over the sorted items finds it:
    O(items x rows per microbatch).

    With ``max_rows`` alone the number of microbatches is the smallest possible: who counts samples asked for
    ``max_rows`` at a time.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    fewest = max_tokens is None
    if max_rows is not None and fewest and 0 < len(order) <= max_rows:
        return [tuple(order)]
    best: list[tuple[float, float]] = [(0.0, 0.0)]  # best[end]: (microbatches if they are to be few, price)
    start_of = [0]
    for end in range(1, len(order) + 1):
        candidates: list[tuple[tuple[float, float], int]] = []
        for start in range(end - 1, -1, -1):
            rows, longest = end - start, max(1, lengths[order[start]])
            if start < end - 1 and (
                (max_rows is not None and rows > max_rows) or (max_tokens is not None and rows * longest > max_tokens)
            ):
                break
            count, total = best[start]
            candidates.append(((count + fewest, total + price(rows, longest)), start))
        cost, start = min(candidates)
        best.append(cost)
        start_of.append(start)
    groups: list[tuple[int, ...]] = []
    end = len(order)
    while end:
        groups.append(tuple(order[start_of[end] : end]))
        end = start_of[end]
    return groups[::-1]
