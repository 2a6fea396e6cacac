"""Skip updates whose loss or gradient is not finite, or make them again without the samples at fault.

Group testing finds those: an update of some of the samples says if any of them is at fault. A gradient is a sum over
samples, so neither their microbatches nor their ranks matter.
"""

import math
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Any

from megabatch import MegabatchError, Update
from megabatch.autotune import ModuleSnapshot
from megabatch.train.context import Callback, RunContext, read_values
from megabatch.train.data.updates import part_of
from megabatch.train.runtime.console import count
from megabatch.train.runtime.files import SKIPPED
from megabatch.train.runtime.ranks import Ranks

MAX_IN_A_ROW = 10  # skipped updates
Item = tuple[int, int]  # data rank, and the number of a sample in its part of the update
IsBad = Callable[[Sequence[Item]], bool]  # whether an update of these samples alone is not finite; collective


class SkipNonfinite(Callback):
    """Mend updates as update.on_nonfinite says: "skip_update" or "skip_microbatch". Collective."""

    def __init__(self, context: RunContext) -> None:
        self._searches = context.config.update.on_nonfinite == "skip_microbatch"
        self._log = context.open_log(SKIPPED)
        self._kept: list[ModuleSnapshot] = []  # the modules before the update
        self._num_in_a_row = 0

    def before_update(self, context: RunContext) -> None:
        """Remember the buffers, which forwards change."""
        self._kept = [ModuleSnapshot(module) for module in context.model.base.modules()]

    def after_update(self, context: RunContext) -> None:
        """Look at the update, and replace it by one without the samples at fault."""
        update, reason = context.update, None
        if update is not None and not context.values["finite"]:
            reason = problem_of(update)
        if update is None or reason is None:
            self._num_in_a_row = 0
            return
        step, plan, asked = context.step, context.plan, Asked(context.batch, context.ranks)
        mended = self._without_culprits(context, update, asked) if self._searches else None
        if mended is None:
            self._put_back()
            context.plan = plan  # not of the search
            context.learner.step, context.row["num_samples"] = step, 0
            left_out = asked.items
        else:
            context.update, left_out = mended
            context.values = read_values(context.update)
        context.row["skipped_samples"] = len(left_out)
        names = asked.names(context.updates.names, left_out)
        self._tell(context, reason, names, is_whole=mended is None)

    def end(self, context: RunContext) -> None:
        """Say how much the whole run has left out."""
        rows = self._log.rows()
        if rows:
            samples, num_whole = sum(len(row["samples"]) for row in rows), sum(row["is_whole"] for row in rows)
            text = f"{count(len(rows), 'update')} not finite, {num_whole} skipped whole: "
            context.summary.append(f"{text}{count(samples, 'sample')} left out ({SKIPPED})")

    def _without_culprits(
        self, context: RunContext, update: Update, asked: "Asked"
    ) -> tuple[Update, list[Item]] | None:
        """Return the update of the other samples, and those left out; None if no other samples make one."""
        learner, before = context.learner, context.step - 1

        def accumulate(items: Sequence[Item]) -> None:
            self._put_back()
            learner.step = before
            context.num_calls = 0
            context.forward_backward(asked.part(items))

        def is_bad(items: Sequence[Item]) -> bool:
            accumulate(items)
            return problem_of(learner.gradient.finalize(max_norm=learner.max_norm)) is not None

        def again(items: Sequence[Item]) -> Update:
            accumulate(items)
            return learner.optim_step()

        return rest_of(update, asked, is_bad, again)

    def _put_back(self) -> None:
        for each in self._kept:
            each.put_back()

    def _tell(self, context: RunContext, reason: str, names: list[str], *, is_whole: bool) -> None:
        """Write down what was left out, and say it. Raises where too many updates were skipped in a row."""
        step = context.step
        self._log.append({"step": step, "reason": reason, "is_whole": is_whole, "samples": names})
        self._log.write()
        first = f"{names[0]}{', ...' if len(names) > 1 else ''}"
        what = "skipped" if is_whole else f"made without {len(names)} of its samples ({first})"
        context.console.warn(f"update {step} was {what}: {reason}")
        self._num_in_a_row = self._num_in_a_row + 1 if is_whole else 0
        if self._num_in_a_row == MAX_IN_A_ROW:
            raise MegabatchError(
                f"{MAX_IN_A_ROW} updates in a row were skipped, the last of them {step} ({reason}): it is not "
                "the samples but the weights; resume from an earlier checkpoint with a lower optim.lr"
            )


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
        return dict(sorted(dict(self._ranks.gather((self._ranks.dp_rank, value))).items()))


def rest_of(
    update: Update, asked: Asked, is_bad: IsBad, again: Callable[[Sequence[Item]], Update]
) -> tuple[Update, list[Item]] | None:
    """Return the update without the samples at fault, and those; ``update``: of all; ``again``: makes it of others.

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
    return update, left_out


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
