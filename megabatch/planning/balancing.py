"""Balance of items over ranks: whole samples, or whole microbatches, by their predicted cost."""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

FEW = 8  # items dealt in one round; with fewer a heap is faster
PATIENCE = 256  # items that rounds may be short of FEW before a heap deals the rest
FEW_TOKENS = 2**20  # a table of lengths up to here costs less than sorting them


def balance(costs: Sequence[float], num_bins: int) -> list[list[int]]:
    """Deal items over bins whose sizes differ by at most one and whose costs are close.

    The costliest item goes first, each to the cheapest bin that still has room (longest processing time first,
    Graham 1969, with equal cardinalities so that the bins also cut into equal numbers of microbatches). The answer is
    the same on every rank, if the costs are.

    Args:
        costs: Cost of each item, in any unit.
        num_bins: Number of bins, ranks for example.

    Returns:
        The indices of each bin's items, rising. With fewer items than bins some bins are empty.
    """
    if num_bins == 1:
        return [list(range(len(costs)))]
    prices = np.asarray(costs, dtype=np.float64)
    order = np.argsort(-prices, kind="stable")
    bins = _deal(prices[order], order, num_bins)
    ends = np.cumsum(np.bincount(bins, minlength=num_bins))
    return [items.tolist() for items in np.split(np.argsort(bins, kind="stable"), ends[:-1])]


def balance_lengths(lengths: np.ndarray, price: Callable[[int], float], num_bins: int) -> np.ndarray:
    """Return the bin of each item, as `balance` deals items of cost ``price(length)``.

    Args:
        lengths: [items], whole numbers from 0.
        price: Cost of an item by its length. It is asked once for each length.
        num_bins: Number of bins.

    Returns:
        [items], from 0 to ``num_bins - 1``.
    """
    if num_bins == 1 or not len(lengths):
        return np.zeros(len(lengths), dtype=np.int32)
    kinds, names = lengths, None  # a kind is a length, or its number among the lengths
    if lengths.max() >= FEW_TOKENS:
        names, kinds = np.unique(lengths, return_inverse=True)
    counts = np.bincount(kinds)
    known = np.flatnonzero(counts)
    distinct: list[int] = (known if names is None else names).tolist()
    prices, place = np.unique([-price(length) for length in distinct], return_inverse=True)  # the highest first
    places = np.zeros(len(counts), dtype=np.min_scalar_type(len(prices)))  # numpy sorts 16 bits in linear time
    places[known] = place
    falling = np.repeat(-prices, np.bincount(place, weights=counts[known]).astype(np.int64))
    return _deal(falling, np.argsort(places[kinds], kind="stable"), num_bins)


def _deal(falling: np.ndarray, order: np.ndarray, num_bins: int) -> np.ndarray:
    """Return the bin of each item.

    ``falling`` are the costs from the highest on, and ``order`` the items that they belong to.

    Each item goes to the cheapest bin with room, the first of equals. A round deals many items at once. It takes bins
    by rising cost as long as each is cheaper than all that this round has filled: the next item would go there anyway.
    """
    num, dealt = len(falling), np.empty(len(falling), dtype=np.int32)
    room = np.full(num_bins, num // num_bins)
    room[: num % num_bins] += 1
    bins = np.flatnonzero(room)  # those with room, and their room and load
    room, loads = room[bins], np.zeros(len(bins))
    start, patience = 0, PATIENCE if num_bins >= FEW else 0
    while start < num and patience > 0:
        by_load = loads.argsort(kind="stable")[: num - start]
        before = loads[by_load]
        after = before + falling[start : start + len(by_load)]
        is_cheaper = before[1:] < np.minimum.accumulate(after[:-1])
        taken = len(by_load) if is_cheaper.all() else 1 + int(is_cheaper.argmin())
        chosen = by_load[:taken]
        dealt[start : start + taken] = bins[chosen]
        loads[chosen] = after[:taken]
        room[chosen] -= 1
        if not room[chosen].all():
            bins, loads, room = bins[room > 0], loads[room > 0], room[room > 0]
        start, patience = start + taken, min(PATIENCE, patience + taken - FEW)
    heap = list(zip(loads.tolist(), bins.tolist(), room.tolist(), strict=True))
    heapq.heapify(heap)
    for item in range(start, num):
        load, index, remaining_room = heapq.heappop(heap)
        dealt[item] = index
        if remaining_room > 1:
            heapq.heappush(heap, (load + float(falling[item]), index, remaining_room - 1))
    bins_of_items = np.empty_like(dealt)
    bins_of_items[order] = dealt
    return bins_of_items


def fill(
    lengths: Sequence[int], *, max_rows: int | None = None, max_tokens: int | None = None
) -> list[tuple[int, ...]]:
    """Fill microbatches in ascending order of length, each as far as the limit allows; ties keep their order.

    Limits are as in `split`. Any number of these microbatches, filled anew, gives the same microbatches: the item that
    closes one is the first of the next, and every item of a later microbatch is as long or longer, so it closes the
    microbatch too. Ranks that hold whole microbatches of an update therefore find them again on their own.
    """
    groups: list[tuple[int, ...]] = []
    group: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: (lengths[item], item)):
        rows = len(group) + 1
        over = max_tokens is not None and rows * max(1, lengths[item]) > max_tokens
        if group and (over or (max_rows is not None and rows > max_rows)):
            groups.append(tuple(group))
            group = []
        group.append(item)
    return [*groups, tuple(group)] if group else groups


def deal_microbatches(
    lengths: Sequence[int],
    num_bins: int,
    price: Callable[[int, int], float],
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> list[list[tuple[int, ...]]]:
    """Cut samples into microbatches whatever the number of ranks, and deal whole microbatches over ranks.

    Args:
        lengths: Tokens of each sample.
        num_bins: Number of ranks.
        price: Cost of a microbatch by its number of samples and the tokens of its longest, which is balanced.
        max_rows: Samples of a microbatch. This or
        max_tokens: padded tokens of a microbatch.

    Returns:
        The microbatches of each rank, as indices of samples. A rank may have none.
    """
    microbatches = fill(lengths, max_rows=max_rows, max_tokens=max_tokens)
    prices = [price(len(microbatch), lengths[microbatch[-1]]) for microbatch in microbatches]  # the longest is the last
    return [[microbatches[index] for index in indices] for indices in balance(prices, num_bins)]
