"""One rank's share, split into microbatches: the cheapest grouping of neighbors in the order of length.

It is pure and deterministic: every rank computes the same answer from the same lengths.
"""

from collections.abc import Callable, Sequence

from megabatch.errors import require_count
from megabatch.planning.plan import LAUNCH_SHARE, CostModel, Plan
from megabatch.planning.settings import check_cost


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


def plan_share(
    lengths: Sequence[int], micro_batch_size: int | None, max_microbatch_tokens: int | None, cost: CostModel | None
) -> Plan:
    """Split one rank's samples into microbatches, unpriced. The lengths are checked already."""
    for name, limit in (("micro_batch_size", micro_batch_size), ("max_microbatch_tokens", max_microbatch_tokens)):
        # A limit of lower_limit() or of a TunedLimit is not checked before.
        if limit is not None and (type(limit) is not int or limit < 1):
            require_count(name, limit)
    if cost is not None and type(cost) is not CostModel:
        check_cost(cost)
    price = cost or CostModel(seconds_per_microbatch=(max_microbatch_tokens or 0) / LAUNCH_SHARE)
    microbatches = split(lengths, price.seconds, max_rows=micro_batch_size, max_tokens=max_microbatch_tokens)
    return Plan(tuple(microbatches), tuple(lengths), tuple(range(len(lengths))))
