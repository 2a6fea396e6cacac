"""`split_into`: microbatches cut smaller, in place of the dummy microbatches of a rank that has too few."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


def split_into(
    lengths: Sequence[int], groups: Sequence[Sequence[int]], number: int, seconds: Callable[[int, int], float]
) -> list[tuple[int, ...]]:
    """Cut groups further until there are ``number`` of them, or each has one item; the longest come first.

    The next cut is the one that saves the most padding, in the middle where no cut saves any.

    Args:
        lengths: Tokens of each item.
        groups: The items of each group, as `split` returns them.
        number: Groups to have.
        seconds: Price of a group by its number of items and the tokens of its longest.
    """
    waiting = [_best_cut(lengths, group, seconds) for group in groups]
    heapq.heapify(waiting)
    while waiting and len(waiting) < number and (cut := waiting[0]).place:
        heapq.heapreplace(waiting, _best_cut(lengths, cut.group[: cut.place], seconds))
        heapq.heappush(waiting, _best_cut(lengths, cut.group[cut.place :], seconds))
    return sorted((cut.group for cut in waiting), key=lambda group: (-lengths[group[0]], group[0]))


class _Cut(NamedTuple):
    """The cut of a group that saves the most. Of two, the smaller is the better one."""

    price: float  # minus the seconds that it saves
    unevenness: int  # minus the items of the smaller part
    group: tuple[int, ...]  # by falling length
    place: int  # items before the cut; 0 for a single item


def _best_cut(lengths: Sequence[int], group: Sequence[int], seconds: Callable[[int, int], float]) -> _Cut:
    """Return the best cut of a group. The part behind it is padded to a shorter item; a launch costs the same."""
    group = tuple(sorted(group, key=lambda item: (-lengths[item], item)))
    if len(group) < 2:
        return _Cut(math.inf, 0, group, 0)
    longest = max(1, lengths[group[0]])
    cuts: list[_Cut] = []
    for place in range(1, len(group)):
        rows = len(group) - place
        price = seconds(rows, max(1, lengths[group[place]])) - seconds(rows, longest)
        cuts.append(_Cut(price, -min(place, rows), group, place))
    return min(cuts)
