"""Small messages between the ranks that work on an update: a single process imports none of it.

Each message begins with the place of its rank among the calls of its accumulator, and all ranks compare these places.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.core.mesh import VERBS, CallPosition, gather_rows
from megabatch.errors import PositionError

HEADER_SIZE = 6
MESSAGE_SIZE = 48  # numbers of a message, with its header; a longer one has the size of its numbers


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
        sizes = [int(row) for (row,) in self.exchange(size, position).tolist()]
        padded = torch.zeros(1, max(sizes), dtype=torch.uint8, device="cpu")
        padded[0, : len(data)] = data
        rows = gather_rows(padded, self._groups)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def exchange(self, row: Tensor, position: CallPosition) -> Tensor:
        """Return the rows of all ranks, compared by their positions: [1, n] -> [num_all, n]."""
        self._compare_sent_positions()
        size = row.shape[1]
        rows = torch.zeros(1, max(MESSAGE_SIZE, HEADER_SIZE + size), dtype=torch.float64, device="cpu")
        rows[0, :HEADER_SIZE] = torch.tensor(_header(position), dtype=torch.float64, device="cpu")
        rows[0, HEADER_SIZE : HEADER_SIZE + size] = row
        # Compared after the last group, so that no rank waits for one that has raised before.
        rows = gather_rows(rows, self._groups)
        check_positions(rows[:, :HEADER_SIZE].tolist(), self._num_all)
        return rows[:, HEADER_SIZE : HEADER_SIZE + size]

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
        sent, self._sent_positions = self._sent_positions, []
        for work, _ in sent:
            work.wait()
        for _, parts in sent:
            check_positions(torch.cat(parts)[:, :HEADER_SIZE].tolist(), self._num_all)


def _header(position: CallPosition) -> list[float]:
    """Return a position as numbers, with the rank of this process first."""
    verb = VERBS.index(position.verb)
    rank = dist.get_rank() if dist.is_initialized() else 0
    numbers = rank, position.accumulator, verb, position.update, position.call, position.num_discarded
    return [*map(float, numbers)]


def check_positions(headers: Sequence[Sequence[float]], num_ranks: int) -> None:
    """Raise `PositionError` if ranks are in different calls.

    The error is broadcast if ``headers`` are of fewer than ``num_ranks`` ranks, since the others may not see it.
    """
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, *numbers in {tuple(header): None for header in headers}:  # a rank's may come several times
        ranks.setdefault(tuple(map(int, numbers)), []).append(int(rank))
    if len(ranks) == 1:
        return
    discards = {position[-1] for position in ranks}
    accumulators = {position[0] for position in ranks}
    places: list[str] = []
    for (accumulator, verb, update, call, num_discarded), members in ranks.items():
        names = f"rank {members[0]} is" if len(members) == 1 else f"ranks {', '.join(map(str, sorted(members)))} are"
        place = f"{names} in {VERBS[verb]} of update {update}"
        if VERBS[verb] == "forward_backward()":
            place = f"{names} in {VERBS[verb]}, call {call} of update {update}"
        if len(accumulators) > 1:
            place += f" of accumulator {accumulator}"
        if len(discards) > 1:
            place += f" after {num_discarded} discarded"
        places.append(place)
    error = PositionError(
        f"{'; '.join(places)}; make the same calls of an accumulator on every rank, with [] where a rank has no samples"
    )
    error.strands_others = sum(map(len, ranks.values())) < num_ranks
    raise error


def _cpu_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the group itself if it carries CPU tensors, else a new gloo group of the same ranks."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    made = dist.new_group(dist.get_process_group_ranks(group), backend="gloo", use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)  # this rank is one of its ranks
    return made
