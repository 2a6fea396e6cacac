"""The ranks that work on an update, and their positions among its calls."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch.errors import PlanError
from megabatch.inspection.mesh_axes import CONTEXT_AXES, DATA_AXES, EXPERT_AXIS, check_axes, groups_of
from megabatch.torch_private.process_groups import groups_of_process, num_begun

VERBS = (
    "no call", "forward_backward()", "finalize()", "forward()", "evaluate()", "open()", "microbatch()",
)  # fmt: skip


@dataclass
class CallPosition:
    """The place of a rank among the calls of its accumulator. Each message between ranks begins with it.

    Messages of the first exchange of a call have one size, so that ranks in different calls compare their positions
    before a collective with other sizes begins. ``update`` counts closed updates, and ``call`` the calls of
    `forward_backward` in the open one.
    """

    accumulator: int = 0
    verb: str = VERBS[0]
    update: int = 0
    call: int = 0
    num_discarded: int = 0


@dataclass
class DataRanks:
    """The ranks that work on one update. With one rank every message is free.

    Rows of `exchange_numbers` come in the order of data ranks, then context ranks, then those that hold parts of the
    model: the first ``degree`` rows are of different samples, the first ``num_weighing`` of different targets.

    Attributes:
        data_groups: Groups of the data axes, the inner axis first, so that rows come in the order of ranks.
        context_groups: The group of the axis cp, if it has several ranks.
        tensor_groups: The same of tp.
        pipeline_groups: The same of pp.
        position: Where this rank is among the calls of its accumulator.
        groups: Groups over which gradients, totals and weights are summed: those of data and context axes.
        degree: Number of ranks that see different samples, dp_degree.
        context_degree: Number of stretches that each sequence is cut into.
        num_weighing: Number of ranks that see different targets. Weights are summed over them.
        num_all: Number of ranks, with those that hold other parts of the model.
        is_alone: True if no other rank works on the update.
    """

    data_groups: Sequence[dist.ProcessGroup] = ()
    context_groups: Sequence[dist.ProcessGroup] = ()
    tensor_groups: Sequence[dist.ProcessGroup] = ()
    pipeline_groups: Sequence[dist.ProcessGroup] = ()
    position: CallPosition = field(default_factory=CallPosition, kw_only=True)
    groups: list[dist.ProcessGroup] = field(init=False)
    degree: int = field(init=False)
    context_degree: int = field(init=False)
    num_weighing: int = field(init=False)
    num_all: int = field(init=False)
    is_alone: bool = field(init=False)
    _messages: Any = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        self.data_groups = _of_several_ranks(self.data_groups)
        self.context_groups = _of_several_ranks(self.context_groups)
        self.tensor_groups = _of_several_ranks(self.tensor_groups)
        self.pipeline_groups = _of_several_ranks(self.pipeline_groups)
        self.groups = [*self.data_groups, *self.context_groups]
        all_groups = [*self.groups, *self.tensor_groups, *self.pipeline_groups]
        self.degree = _num_ranks(self.data_groups)
        self.context_degree = _num_ranks(self.context_groups)
        self.num_weighing = self.degree * self.context_degree
        self.num_all = _num_ranks(all_groups)
        self.is_alone = not all_groups
        if all_groups:
            from megabatch.core.messages import RankMessages

            self._messages = RankMessages(all_groups, self.num_all)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> "DataRanks":
        """Return the ranks along the axes of a mesh, by their names.

        Raises `PlanError` for unknown names, and for ranks of experts, which only a model with experts there has.
        """
        check_axes(mesh)
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
        if sizes.get(EXPERT_AXIS, 1) > 1:
            raise PlanError(
                f"mesh axis 'ep' has {sizes[EXPERT_AXIS]} ranks, but no parameter of the model is a DTensor over it; "
                "make the experts DTensors with Shard(0) over 'ep', or leave the axis out"
            )
        inner_first = groups_of(mesh, DATA_AXES)[::-1]
        return cls(inner_first, groups_of(mesh, CONTEXT_AXES), groups_of(mesh, ("tp",)), groups_of(mesh, ("pp",)))

    @property
    def context_rank(self) -> int:
        """Index of the stretch of each sequence that this rank sees."""
        return self.context_groups[0].rank() if self.context_groups else 0

    @property
    def _model_rank(self) -> int:
        """Index of this rank among those that see the same targets and hold other parts of the model."""
        index, stride = 0, 1
        for group in (*self.tensor_groups, *self.pipeline_groups):
            index, stride = index + stride * group.rank(), stride * group.size()
        return index

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The ranks with the other stages of this rank's pipeline."""
        return self.pipeline_groups[0] if self.pipeline_groups else None

    def exchange_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return every rank's numbers, a row for each. This takes one message between hosts.

        Raises `MegabatchError` on all ranks if they are in different calls.
        """
        if self._messages is None:
            return [list(numbers)]
        row = torch.tensor([numbers], dtype=torch.float64, device="cpu")
        return self._messages.exchange(row, self.position).tolist()

    def exchange_objects(self, value: Any) -> list[Any]:
        """Return every rank's object, in the order of the rows of `exchange_numbers`."""
        if self._messages is None:
            return [value]
        return self._messages.exchange_objects(value, self.position)

    def gather_report(self, numbers: Tensor) -> Tensor:
        """Return the report of all ranks that see different targets at the end of an update: [n] -> [num_weighing, n].

        This takes one message between devices. On the CPU it raises `MegabatchError` if ranks are in different calls.
        On a device the host does not wait, so it sends its position, and the first message of another call raises.
        """
        if numbers.device.type != "cpu":
            self.send_position()
            return self.gather_on_device(numbers)
        rows = self._messages.exchange(numbers[None], self.position)
        return rows[self._model_rank * self.num_weighing :][: self.num_weighing]

    def send_position(self) -> None:
        """Send this rank's position to the other hosts, and do not wait. The next message compares what has come."""
        self._messages.send_position(self.position)

    def gather_on_device(self, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks that see different targets: [n] -> [num_weighing, n].

        This takes one message between devices. The host does not wait.
        """
        return gather_rows(numbers[None], self.groups)


def _of_several_ranks(groups: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    return [group for group in groups if group.size() > 1]


def _num_ranks(groups: Sequence[dist.ProcessGroup]) -> int:
    return prod(group.size() for group in groups)


def gather_rows(rows: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Return the rows of all ranks of some groups: [1, n] -> [ranks, n]."""
    for group in groups:
        parts = [torch.empty_like(rows) for _ in range(group.size())]
        dist.all_gather(parts, rows, group=group)
        rows = torch.cat(parts)
    return rows


def num_collectives() -> int | None:
    """Return the number of collectives that this process has begun. None if a backend does not count them."""
    with contextlib.suppress(RuntimeError):
        return sum(map(num_begun, groups_of_process()))
    return None
