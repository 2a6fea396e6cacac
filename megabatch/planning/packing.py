"""Packing: items into rows of a fixed size, and one rank's packed plan."""

from collections.abc import Sequence
from dataclasses import replace

from megabatch.planning.plan import Plan

BLOCK_BITS = 10  # one word of a Spaces holds 2**BLOCK_BITS numbers


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


def without_padding(lengths: Sequence[int], plan: Plan, max_microbatch_tokens: int | None) -> Plan:
    """Return one rank's plan for packed samples: the fewest microbatches that best fit finds under the cap.

    Without a cap the microbatches stay as they are.
    """
    if max_microbatch_tokens is not None:
        rows = best_fit([max(1, length) for length in lengths], max_microbatch_tokens)
        plan = replace(plan, microbatches=tuple(map(tuple, rows)))
    return replace(plan, padded=False)
