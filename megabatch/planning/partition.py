"""Integers into bins: `balance` shares over ranks, `split` a share into microbatches, `best_fit` packed rows.

All are pure and deterministic: every rank computes the same answer from the same lengths.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

FEW = 8  # items dealt in one round; with fewer a heap is faster
PATIENCE = 256  # items that rounds may be short of FEW before a heap deals the rest
FEW_TOKENS = 2**20  # a table of lengths up to here costs less than sorting them
MOST_STEPS = 4  # groups of `group_neighbors`, the schedule steps of a pipelined call
BLOCK_BITS = 10  # one word of a Spaces holds 2**BLOCK_BITS numbers


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


def split(
    lengths: Sequence[int],
    seconds: Callable[[int, int], float],
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
) -> list[tuple[int, ...]]:
    """Group the items into microbatches under a cap, at the least total price; the longest come first.

    A microbatch of ``rows`` items whose longest is ``longest`` holds ``tokens = rows * longest`` padded tokens, at most
    ``max_tokens``, and at most ``max_rows`` items. An item that is longer than the cap goes alone. The price is
    ``seconds(rows, longest)``: a launch, and a rate per row that does not fall with the length (`CostModel`). Some
    cheapest grouping then takes neighbors in the order of length, which is a shortest path over the sorted items, in
    O(items), by `_shortest_path`.

    With ``max_rows`` alone the number of microbatches is the smallest possible, as a user who counts samples expects.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # equals stay in their order
    if not order:
        return []
    longest = [max(1, lengths[item]) for item in order]
    most_rows = len(order) if max_rows is None else max_rows
    if longest[0] == longest[-1]:  # the fewest are the cheapest
        rows = most_rows if max_tokens is None else max(1, min(most_rows, max_tokens // longest[0]))
        return [tuple(order[max(0, end - rows) : end]) for end in range(len(order), 0, -rows)][::-1]
    # A fee per microbatch that exceeds any other saving makes their number the smallest.
    fee = len(order) * seconds(1, longest[0]) if max_tokens is None else 0.0
    lines: dict[int, tuple[float, float, int]] = {}  # by length: the price of a launch and of a row, and the most rows
    for length in dict.fromkeys(longest):
        one_row, two_rows = seconds(1, length), seconds(2, length)
        rows = most_rows if max_tokens is None else min(most_rows, max_tokens // length)
        lines[length] = (fee + 2 * one_row - two_rows, two_rows - one_row, max(1, rows))
    starts = _shortest_path([lines[length] for length in longest])
    groups: list[tuple[int, ...]] = []
    end = len(order)
    while end:
        groups.append(tuple(order[starts[end] : end]))
        end = starts[end]
    return groups[::-1]


def _shortest_path(lines: Sequence[tuple[float, float, int]]) -> list[int]:
    """Return where the last group begins in the cheapest grouping of the first ``end`` items, for each ``end``.

    Groups are neighbors. ``lines[start]`` has the price of a group's launch and of each of its rows, and its most rows.
    The cheapest grouping whose last group begins at ``start`` is a line over the ends. A later line is less steep and
    may go further before its limit. So once it is the cheaper of two it stays so, and the cheapest starts for the ends
    ahead are a queue, each from some end on (the lower envelope of lines that come by falling slope).
    """
    num, best, starts = len(lines), 0.0, [0]
    # The lines of the queue: start, height at end 0, slope, last end, and the first end at which each is the cheapest.
    queue: list[tuple[int, float, float, int, int]] = []
    head = 0
    for start, (launch, slope, rows) in enumerate(lines):
        end = start + 1
        height, last = best + launch - start * slope, min(num, start + rows)
        since = end
        while len(queue) > head:
            _, other_height, steeper, other_last, first = queue[-1]
            if steeper > slope:
                crossing = (height - other_height) / (steeper - slope)
                since = end if crossing < end else int(crossing) + 1 if crossing < other_last else other_last + 1
            else:
                since = end if height < other_height else other_last + 1
            if since > max(first, end):
                break
            queue.pop()
            since = end
        if since <= num:
            queue.append((start, height, slope, last, since))
        while len(queue) - head > 1 and queue[head + 1][4] <= end:
            head += 1
        cheapest, height, slope, _, _ = queue[head]
        starts.append(cheapest)
        best = height + end * slope
    return starts


def group_neighbors(prices: Sequence[np.ndarray]) -> list[int]:
    """Return where each group ends in the cheapest grouping of neighbors into 1 to `MOST_STEPS` groups.

    Args:
        prices: ``prices[start][number - 1]`` is the price of a group of ``number`` items whose first is ``start``.
    """
    num = len(prices)
    table = np.full((num, num + 1), np.inf)  # [start, end]
    for start, row_prices in enumerate(prices):
        table[start, start + 1 :] = row_prices
    best = np.full(num + 1, np.inf)  # [end], of the items before it in `len(starts)` groups
    best[0], starts, totals = 0.0, list[np.ndarray](), list[float]()
    for _ in range(min(MOST_STEPS, num)):
        reached = best[:num, None] + table
        starts.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
        totals.append(float(best[num]))
    ends, end = list[int](), num
    for start_of in reversed(starts[: 1 + totals.index(min(totals))] if totals else []):
        ends.append(end)
        end = int(start_of[end])
    return ends[::-1]


class Spaces:
    """A set of whole numbers that finds its least member above a bound in constant time."""

    def __init__(self, largest: int) -> None:
        self._words = [0] * ((largest >> BLOCK_BITS) + 1)
        self._used = 0  # which words are not zero

    def add(self, number: int) -> None:
        """Add a number."""
        self._words[number >> BLOCK_BITS] |= 1 << (number & ((1 << BLOCK_BITS) - 1))
        self._used |= 1 << (number >> BLOCK_BITS)

    def remove(self, number: int) -> None:
        """Remove a member."""
        block = number >> BLOCK_BITS
        self._words[block] ^= 1 << (number & ((1 << BLOCK_BITS) - 1))
        if not self._words[block]:
            self._used ^= 1 << block

    def at_least(self, number: int) -> int | None:
        """Return the least member of at least ``number``, if there is one."""
        block = number >> BLOCK_BITS
        within = self._words[block] >> (number & ((1 << BLOCK_BITS) - 1))
        if within:
            return number + lowest_bit(within)
        above = self._used >> (block + 1)
        if not above:
            return None
        block += 1 + lowest_bit(above)
        return (block << BLOCK_BITS) + lowest_bit(self._words[block])


def lowest_bit(number: int) -> int:
    """Return the index of the lowest set bit."""
    return (number & -number).bit_length() - 1


def best_fit(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Pack items into rows of a fixed size (best fit decreasing), in O(n log n).

    The longest item goes first, each into the fullest row that has room for it.

    Args:
        lengths: Tokens of each item, from 1 to ``row_tokens``.
        row_tokens: Tokens of a row.

    Returns:
        The indices of each row's items, the longest first.
    """
    row_tokens = min(row_tokens, sum(lengths))  # a row of any size holds all of them
    spaces = Spaces(row_tokens)
    rows_with: dict[int, list[list[int]]] = {}  # by the room that is left in them
    rows: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        length = lengths[item]
        space = spaces.at_least(length)
        if space is None:
            space, row = row_tokens, []
            rows.append(row)
        else:
            row = rows_with[space].pop()
            if not rows_with[space]:
                spaces.remove(space)
        row.append(item)
        if room := space - length:
            if not rows_with.setdefault(room, []):
                spaces.add(room)
            rows_with[room].append(row)
    return rows
