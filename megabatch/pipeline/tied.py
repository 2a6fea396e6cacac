"""Parameters that stages of several ranks share, such as the embedding and the head of a language model.

Each rank has a copy. Copies start equal, and their gradients are summed once per update, so that equal steps of the
optimizer leave equal copies.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import local
from megabatch.errors import PlanError
from megabatch.inspection.checksum import checksum
from megabatch.torch_private.classes import is_dtensor


class TiedCopy(NamedTuple):
    """This rank's copy of a parameter."""

    parameter: nn.Parameter
    group: dist.ProcessGroup  # of the ranks with a copy
    is_counted: bool  # in the norm: the copy of the first of them


class TiedParameters:
    """This rank's copies of the parameters that stages of several ranks share. Every method is collective.

    Args:
        copies: This rank's copies, by names that are the same on all ranks with a copy.
        parameters: Of the stages of this rank.
        group: The ranks along "pp".
        ranks: All ranks of the update.

    Raises:
        PlanError: On all ranks, if copies cannot be one parameter.
    """

    def __init__(
        self, copies: Mapping[str, nn.Parameter], parameters: Sequence[nn.Parameter], group: dist.ProcessGroup,
        ranks: DataRanks,
    ) -> None:  # fmt: skip
        self._ranks, self._stages = ranks, DataRanks(pipeline_groups=[group])
        ids = set(map(id, parameters))
        local_facts = {name: _facts(parameter, id(parameter) in ids) for name, parameter in copies.items()}
        reports = self._stages.exchange_objects(local_facts)
        self.names = sorted({name for report in reports for name in report})  # those of all ranks
        holders = {name: [rank for rank, report in enumerate(reports) if name in report] for name in self.names}
        facts = {name: [report[name] for report in reports if name in report] for name in self.names}
        self._raise_first([_problem_of(name, holders[name], facts[name]) for name in self.names])
        self.copies = {
            name: TiedCopy(copies[name], _group_of(holders[name], group), holders[name][0] == group.rank())
            for name in self.names
            if name in copies and copies[name].requires_grad
        }
        self.check_copies()

    @property
    def uncounted(self) -> list[nn.Parameter]:
        """The copies whose gradient the norm counts on another rank."""
        return [copy.parameter for copy in self.copies.values() if not copy.is_counted]

    def sum_gradients(self) -> None:
        """Give all copies the sum of their gradients."""
        used = self.check_copies()
        for name in sorted(used & self.copies.keys()):  # in one order on all ranks, which sets do not have
            parameter, group, _ = self.copies[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout != torch.strided:
                parameter.grad = parameter.grad.to_dense()
            dist.all_reduce(local(parameter.grad), group=group)

    def check_copies(self) -> set[str]:
        """Compare the copies, and return the names of those that have a gradient on any rank. Wait for the device.

        Raises `PlanError` on all ranks if copies have come to differ.
        """
        local_facts = {
            name: (int(checksum(local(copy.parameter.detach()))), copy.parameter.grad is not None)
            for name, copy in self.copies.items()
        }
        reports = self._stages.exchange_objects(local_facts)
        sums = {name: {report[name][0] for report in reports if name in report} for name in self.names}
        self._raise_first([
            f"copies of the tied parameter {name!r} have different weights; load the same into all, and step them "
            "alike, with one learning rate and weight decay"
            for name, checksums in sums.items() if len(checksums) > 1
        ])  # fmt: skip
        return {name for report in reports for name, (_, has_gradient) in report.items() if has_gradient}

    def _raise_first(self, problems: Sequence[str | None]) -> None:
        """Raise the first problem of any rank on all: those of other data ranks have copies of their own."""
        answers = self._ranks.exchange_objects(next(filter(None, problems), None))
        if any(answers):
            raise PlanError(next(filter(None, answers)))


def _facts(parameter: nn.Parameter, is_known: bool) -> str:
    """Return in words what copies must have in common."""
    if not is_known:
        return ""
    laid = f" as {parameter.placements}" if is_dtensor(parameter) else ""
    is_trained = "trained" if parameter.requires_grad else "frozen"
    return f"{tuple(parameter.shape)}{laid}, {parameter.dtype}, {is_trained}"


def _problem_of(name: str, holders: Sequence[int], facts: Sequence[str]) -> str | None:
    """Return why copies on these ranks cannot be one parameter."""
    if not all(facts):
        return f"tied= has {name!r}, which is no parameter of the stages; give it after the stages are wrapped"
    if len(holders) == 1:
        return f"tied= has {name!r} on one rank along 'pp'; name it on every rank that has a copy, or leave it out"
    if len(set(facts)) > 1:
        return f"copies of the tied parameter {name!r} are {' and '.join(dict.fromkeys(facts))}; make all alike"
    return None


def _group_of(holders: Sequence[int], group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the process group of the ranks with a copy, of which this is one."""
    if len(holders) == group.size():
        return group
    ranks = dist.get_process_group_ranks(group)
    return cast(
        dist.ProcessGroup, dist.new_group([ranks[holder] for holder in holders], use_local_synchronization=True)
    )
