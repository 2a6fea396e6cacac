"""Microbatches by a rule of the user's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

from megabatch.core.call import MicrobatchPlanner
from megabatch.core.contract import LossHooks
from megabatch.core.samples import STOPPED, Samples
from megabatch.errors import PlanError
from megabatch.planning.plan import Plan
from megabatch.planning.plan_numbers import split_in_halves
from megabatch.planning.planner import Planner


class _View(Sequence[Any]):
    """Samples one by one, each made when it is read."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        indices = range(len(self))[index]
        if isinstance(indices, int):
            return self._samples.one(indices)
        return [self._samples.one(row) for row in indices]


@dataclass(frozen=True)
class RulePlanner(MicrobatchPlanner):
    """Splits samples as a `Planner` of the user's says."""

    rule: Planner | None = None

    def is_repeatable(self, hooks: LossHooks) -> bool:
        """Return False: the rule may draw random numbers."""
        return False

    def plan(self, samples: Samples) -> Plan:
        try:
            groups = cast(Planner, self.rule).cut(list(samples.lengths), _View(samples))
        except StopIteration as error:
            raise PlanError(f"the planner's cut() {STOPPED}") from error
        cut = _checked(groups, len(samples))
        self.batching.check_kinds(samples, cut)
        sync, reason = self.choice
        plan = Plan(cut, tuple(samples.lengths), tuple(range(len(samples))), sync, reason, padded=self.has_rows)
        if self.learned is None:
            return plan
        fits: Callable[[tuple[int, ...]], bool] = self._fits(plan)
        waiting, within = list(reversed(cut)), list[tuple[int, ...]]()
        while waiting:
            rows = waiting.pop()
            if fits(rows):
                within.append(rows)
            else:
                waiting += reversed([tuple(half) for half in split_in_halves(rows)])
        return Plan(tuple(within), plan.lengths, plan.samples, sync, reason, padded=plan.padded)

    def _fits(self, plan: Plan) -> Callable[[tuple[int, ...]], bool]:
        samples, tokens = cast(Any, self.learned)
        return lambda rows: len(rows) < 2 or (len(rows) <= samples and plan.tokens_of(rows) <= tokens)


def _checked(groups: object, num_samples: int) -> tuple[tuple[int, ...], ...]:
    """Return the microbatches of a rule. Raises `PlanError` unless they have each sample once."""
    try:
        cut = tuple(tuple(int(row) for row in group) for group in cast(Any, groups) if len(group))
    except (TypeError, ValueError) as error:
        raise PlanError(f"planner's cut() returned {groups!r:.80}; return a list of lists of indices") from error
    counts = [0] * num_samples
    for row in (row for rows in cut for row in rows):
        if not 0 <= row < num_samples:
            raise PlanError(f"planner's cut() returned sample {row} of {num_samples}; return indices of the samples")
        counts[row] += 1
    wrong = next((row for row, count in enumerate(counts) if count != 1), None)
    if wrong is not None:
        raise PlanError(f"planner's cut() returned sample {wrong} {counts[wrong]} times; return each sample once")
    return cut
