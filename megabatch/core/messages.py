"""Small messages between the ranks that work on an update: a single process imports none of it.

Each message begins with the place of its rank among the calls of its accumulator, and all ranks compare these places.
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.core.mesh import VERBS, CallPosition, gather_rows
from megabatch.errors import PositionError
from megabatch.inspection.error_kinds import rank_of_process

# Numbers of a message, with its header. A longer message has the size of its numbers.
MESSAGE_SIZE = 48


class Place(NamedTuple):
    """A position as numbers, which ranks can send and compare."""

    accumulator: int
    verb: int
    update: int
    call: int
    num_discarded: int


HEADER_SIZE = 1 + len(Place._fields)


class RankMessages:
    """Sends messages over groups, one after another, so that they reach every rank."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], num_all: int) -> None:
        self._groups = [_cpu_group(group) for group in groups]
        self._num_all = num_all
        self._sent_positions: list[tuple[Any, list[Tensor]]] = []

    def exchange_objects(self, value: Any, position: CallPosition) -> list[Any]:
        """Return every rank's object."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = torch.tensor([[len(data)]], dtype=torch.float64, device="cpu")
        sizes = self.exchange(size, position)[:, 0].long().tolist()
        padded = torch.zeros(1, max(sizes), dtype=torch.uint8, device="cpu")
        padded[0, : len(data)] = data
        rows = gather_rows(padded, self._groups)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def exchange(self, row: Tensor, position: CallPosition) -> Tensor:
        """Return the rows of all ranks, compared by their positions: [1, n] -> [num_all, n]."""
        self._compare_sent_positions()
        end = HEADER_SIZE + row.shape[1]
        message = torch.zeros(1, max(MESSAGE_SIZE, end), dtype=torch.float64, device="cpu")
        message[0, :HEADER_SIZE] = torch.tensor(_header(position), dtype=torch.float64, device="cpu")
        message[0, HEADER_SIZE:end] = row
        # Compared after the last group, so that no rank waits for one that has raised before.
        messages = gather_rows(message, self._groups)
        check_positions(messages[:, :HEADER_SIZE].tolist(), self._num_all)
        return messages[:, HEADER_SIZE:end]

    def send_position(self, position: CallPosition) -> None:
        """Send this rank's position to the other hosts, and do not wait. The next message compares what has come.

        A host in another call takes part in these messages with its first one. It would never take part in those
        between devices.
        """
        self._compare_sent_positions()
        rows = torch.zeros(1, MESSAGE_SIZE, dtype=torch.float64, device="cpu")
        rows[0, :HEADER_SIZE] = torch.tensor(_header(position), dtype=torch.float64, device="cpu")
        for group in self._groups:
            parts = [torch.empty_like(rows) for _ in range(group.size())]
            work = dist.all_gather(parts, rows, group=group, async_op=True)
            self._sent_positions.append((work, parts))
            # As many rows as a message has that was gathered over the groups before.
            rows = rows.repeat(group.size(), 1)

    def _compare_sent_positions(self) -> None:
        sent_positions, self._sent_positions = self._sent_positions, []
        for work, _ in sent_positions:
            work.wait()
        for _, parts in sent_positions:
            check_positions(torch.cat(parts)[:, :HEADER_SIZE].tolist(), self._num_all)


def _header(position: CallPosition) -> list[float]:
    """Return the rank of this process and its place, with which each of its messages begins."""
    verb = VERBS.index(position.verb)
    place = Place(position.accumulator, verb, position.update, position.call, position.num_discarded)
    return [*map(float, (rank_of_process(), *place))]


def check_positions(headers: Sequence[Sequence[float]], num_ranks: int) -> None:
    """Raise `PositionError` if ranks are in different calls.

    The error is broadcast if ``headers`` are of fewer than ``num_ranks`` ranks, since the others may not see it.
    """
    ranks_of_places: dict[Place, list[int]] = {}
    # The header of a rank may come several times.
    for header in dict.fromkeys(map(tuple, headers)):
        rank, *place = map(int, header)
        ranks_of_places.setdefault(Place(*place), []).append(rank)
    if len(ranks_of_places) == 1:
        return
    error = PositionError(
        f"{_describe_places(ranks_of_places)}; make the same calls of an accumulator on every rank, with [] where a "
        "rank has no samples"
    )
    error.strands_others = sum(map(len, ranks_of_places.values())) < num_ranks
    raise error


def _describe_places(ranks_of_places: Mapping[Place, Sequence[int]]) -> str:
    accumulators, _, _, _, discards = map(set, zip(*ranks_of_places, strict=True))
    descriptions: list[str] = []
    for place, ranks in ranks_of_places.items():
        verb = VERBS[place.verb]
        call = f", call {place.call}" if verb == "forward_backward()" else ""
        description = f"{_name_ranks(ranks)} in {verb}{call} of update {place.update}"
        if len(accumulators) > 1:
            description += f" of accumulator {place.accumulator}"
        if len(discards) > 1:
            description += f" after {place.num_discarded} discarded"
        descriptions.append(description)
    return "; ".join(descriptions)


def _name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, sorted(ranks)))} are"


def _cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group itself if it carries CPU tensors, else a new gloo group of the same ranks."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    ranks = dist.get_process_group_ranks(group)
    gloo_group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert isinstance(gloo_group, dist.ProcessGroup)
    return gloo_group
