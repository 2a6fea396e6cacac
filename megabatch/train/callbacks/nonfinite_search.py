"""Find the samples that make an update nonfinite, by group testing.

An update of some of the samples says if any of them is at fault. A gradient is a sum over samples, so neither their
microbatches nor their ranks matter.
"""

import json
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megabatch import Update
from megabatch.train.data.updates import part_of
from megabatch.train.runtime.ranks import Ranks

Item = tuple[int, int]  # data rank, and the number of a sample in its part of the update
IsBad = Callable[[Sequence[Item]], bool]  # whether an update of these samples alone is not finite; collective


class Asked:
    """The samples that an update was asked for, on all ranks. Making one is collective."""

    def __init__(self, batch: Sequence[Any], ranks: Ranks) -> None:
        self._batch, self._ranks = batch, ranks
        sizes = self._of_data_ranks(len(batch))
        self.items = [(rank, index) for rank, size in sizes.items() for index in range(size)]
        self.degree = ranks.dp_degree

    def part(self, items: Sequence[Item]) -> Sequence[Any]:
        """Return the samples of this rank among them."""
        return part_of(self._batch, [index for rank, index in items if rank == self._ranks.dp_rank])

    def names(self, mine: Sequence[str], items: Sequence[Item]) -> list[str]:
        """Return the names of the samples; ``mine``: those of this rank. Collective."""
        names = self._of_data_ranks(list(mine))
        return sorted(names[rank][index] for rank, index in items)

    def _of_data_ranks(self, value: Any) -> dict[int, Any]:
        """Return the value of each data rank."""
        told = [json.loads(text) for text in self._ranks.gather(json.dumps([self._ranks.dp_rank, value]))]
        return dict(sorted(dict(told).items()))


@dataclass(frozen=True)
class Rest:
    """A finite update, and the samples left out of it."""

    update: Update
    left_out: list[Item]


def rest_of(update: Update, asked: Asked, is_bad: IsBad, again: Callable[[Sequence[Item]], Update]) -> Rest | None:
    """Return the update without the samples at fault; ``update``: that of all; ``again``: makes it of others.

    None where more than half of the samples are at fault, or none is by itself: then it is not the samples.
    """
    left, left_out = asked.items, list[Item]()
    while problem_of(update) is not None:
        most = len(asked.items) // 2 - len(left_out)
        first = suspects(update, left, asked.degree)
        known = first if len(first) == len(left) or is_bad(first) else left  # bad together
        found = list(islice(at_fault(known, is_bad), most + 1))
        if not 0 < len(found) <= most:
            return None
        left_out += found
        left = [item for item in left if item not in found]
        update = again(left)
    return Rest(update, left_out)


def at_fault(items: Sequence[Item], is_bad: IsBad) -> Generator[Item]:
    """Yield the samples that are bad by themselves, of samples that are bad together."""
    if len(items) == 1:
        yield items[0]
        return
    half = len(items) // 2
    for part in (items[:half], items[half:]):
        if is_bad(part):
            yield from at_fault(part, is_bad)


def suspects(update: Update, items: Sequence[Item], degree: int) -> list[Item]:
    """Return the samples of the data ranks whose totals are not finite, or all samples if every total is finite.

    A guess: along two data axes (HSDP) reports lie in another order than data ranks.
    """
    reports = [row[4:] for row in update.reports.tolist()]  # [cp * degree, terms]
    ranks = {index % degree for index, totals in enumerate(reports) if not all(map(math.isfinite, totals))}
    return [item for item in items if item[0] in ranks] or list(items)


def problem_of(update: Update) -> str | None:
    """Return what is not finite in the update, or None. An update with nothing to learn has no problem."""
    problem = None if bool(update.finite) else update.problem()  # both wait for the device
    return None if problem is None else str(problem)
