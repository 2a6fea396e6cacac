"""Partial: an update in several calls, so that it can be saved between two of them and gone on with."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megabatch import Plan
from megabatch.batch import Deferred
from megabatch.train.ranks import Ranks

MICROBATCHES_A_CALL = 8  # of a rank; in each call gradients are reduced as in an update of its own


@dataclass
class Calls:
    """This rank's samples of every call of an update, and what has become of those that were made."""

    parts: list[list[int]]  # samples of each call, by their places in the update
    num_made: int = 0
    ran: list[list[int]] = field(default_factory=list[list[int]])  # microbatches
    num_split: int = 0  # of them, that did not fit in memory

    def left(self, batch: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """The number and the samples of each call that is still to be made."""
        for number in range(self.num_made, len(self.parts)):
            yield number, part_of(batch, self.parts[number])

    def note(self, plan: Plan) -> None:
        """Take in how the call that was just made was cut."""
        places = self.parts[self.num_made]
        self.ran += [[places[row] for row in rows] for rows in plan.microbatches]
        self.num_split += plan.num_split
        self.num_made += 1

    @property
    def is_whole(self) -> bool:
        """Whether every call was made."""
        return self.num_made == len(self.parts)

    def as_run(self, plan: Plan) -> Plan:
        """The plan of the whole update, as it was run."""
        return replace(plan, microbatches=tuple(map(tuple, self.ran)), num_split=self.num_split)

    def state_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def calls_of(plan: Plan, ranks: Ranks) -> Calls:
    """The calls of an update that is to be cut so; as many on every rank. Collective."""
    cut = [rows for rows in plan.microbatches if rows]
    parts = [
        [row for rows in cut[first : first + MICROBATCHES_A_CALL] for row in rows]
        for first in range(0, len(cut), MICROBATCHES_A_CALL)
    ]
    most = max(map(int, ranks.gather(str(len(parts)))))
    return Calls(parts + [[] for _ in range(most - len(parts))])


def part_of(batch: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    """Some samples of an update."""
    if not isinstance(batch, Deferred):
        return [batch[place] for place in places]
    lengths = [batch.lengths[place] for place in places]
    weights = None if batch.weights is None else [batch.weights[place] for place in places]
    return Deferred(
        lambda index: batch[places[index]], lengths, weights, look_ahead=batch.look_ahead, measured=batch.measured
    )
