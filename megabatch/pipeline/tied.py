"""Parameters that stages of several ranks share, such as the embedding and the head of a language model.

Each rank has a copy. Copies start equal, and their gradients are summed once per update, so that equal steps of the
optimizer leave equal copies.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn

from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import local
from megabatch.errors import PlanError
from megabatch.inspection.checksum import checksum
from megabatch.torch_private.classes import is_dtensor


class TiedCopy(NamedTuple):
    """This rank's copy of a parameter, and the ranks with a copy. The norm counts that of the first of them."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    is_counted: bool


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
        facts = self._gather_by_name(local_facts)
        self.names = list(facts)
        self._raise_first([_problem_of(name, list(facts_by_rank.values())) for name, facts_by_rank in facts.items()])
        self.copies: dict[str, TiedCopy] = {}
        # In one order on all ranks, since a new group is collective.
        for name, holders in facts.items():
            if name in copies and copies[name].requires_grad:
                is_counted = min(holders) == group.rank()
                self.copies[name] = TiedCopy(copies[name], _group_of(list(holders), group), is_counted)
        self.check_copies()

    @property
    def uncounted(self) -> list[nn.Parameter]:
        """The copies whose gradient the norm counts on another rank."""
        return [copy.parameter for copy in self.copies.values() if not copy.is_counted]

    def sum_gradients(self) -> None:
        """Give all copies the sum of their gradients."""
        used = self.check_copies()
        for name, (parameter, group, _) in self.copies.items():
            if name not in used:
                continue
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
        used: set[str] = set()
        problems: list[str] = []
        for name, facts_by_rank in self._gather_by_name(local_facts).items():
            checksums, have_gradient = map(set, zip(*facts_by_rank.values(), strict=True))
            if True in have_gradient:
                used.add(name)
            if len(checksums) > 1:
                problems.append(
                    f"copies of the tied parameter {name!r} have different weights; load the same into all, and step "
                    "them alike, with one learning rate and weight decay"
                )
        self._raise_first(problems)
        return used

    def _gather_by_name(self, local_facts: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
        """Return the facts of all ranks along "pp" by name and rank, in the same order on all ranks."""
        by_name: dict[str, dict[int, Any]] = {}
        for rank, report in enumerate(self._stages.exchange_objects(local_facts)):
            for name, facts in report.items():
                by_name.setdefault(name, {})[rank] = facts
        return dict(sorted(by_name.items()))

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


def _problem_of(name: str, facts: Sequence[str]) -> str | None:
    """Return why copies with these facts cannot be one parameter."""
    if not all(facts):
        return f"tied= has {name!r}, which is no parameter of the stages; give it after the stages are wrapped"
    if len(facts) == 1:
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
