"""Splits a pipelined call into schedule steps: few enough to keep the stages busy, short enough to pad little."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np

from megabatch.core.call import CallAgreement, MicrobatchPlanner, PreparedBatch
from megabatch.core.contract import LossHooks
from megabatch.core.samples import Batch, Samples
from megabatch.core.wrapper import Wrapper
from megabatch.errors import PlanError
from megabatch.pipeline.stages import MOST_STEPS, SCHEDULES, Pipeline
from megabatch.planning.plan import LAUNCH_SHARE, CostModel, Plan, check_lengths, priced

# A step may end at these; with more distinct lengths, at some of them.
MOST_LENGTHS = 128


class RankLengths(NamedTuple):
    """The numbers of a data rank from which all ranks choose the same schedule steps.

    ``lengths`` are distinct and rise, and ``counts`` are the samples of each.
    """

    lengths: list[int]
    counts: list[int]
    micro_batch_size: int | None
    max_microbatch_tokens: int | None
    cost: CostModel | None


class ScheduleStep(NamedTuple):
    """A schedule step, the same on all data ranks.

    Its samples have more than ``above`` tokens and at most ``length``. ``rows`` are those of any rank's largest
    microbatch.
    """

    above: int
    num_microbatches: int
    rows: int
    length: int


@dataclass(frozen=True)
class SchedulePlanner(MicrobatchPlanner):
    """Splits samples into schedule steps by length, the longest first, and each step into microbatches.

    One of the two limits is a number: a pipeline refuses "auto". A step of m microbatches over S stages costs
    (m + S - 1) times one microbatch of its shape.
    """

    pipeline: Pipeline | None = None
    # By data rank. Empty if this rank has all samples.
    of_all: tuple[RankLengths, ...] = ()

    def of_call(self, batch: Batch) -> "SchedulePlanner":
        """Return a planner that knows the lengths of all data ranks. Collective."""
        if self.ranks.degree == 1:
            return self
        try:
            summary = self._summarize(self.samples(batch).lengths)
        except Exception:
            # The user's length may raise anything. `prepare` raises it again and tells the other ranks.
            summary = self._summarize([])
        return replace(self, of_all=tuple(self.ranks.exchange_objects(summary)[: self.ranks.degree]))

    def complete(
        self, prepared: PreparedBatch, agreement: CallAgreement, hooks: LossHooks, wrapper: Wrapper
    ) -> tuple[PreparedBatch, CallAgreement]:
        """Add the dummy microbatches that the schedule steps need, the same number on all ranks."""
        assert self.pipeline is not None
        if not agreement.num_microbatches:
            return prepared, agreement
        # A plan that was given may be of `megabatch.plan`, which knows no schedule.
        steps = prepared.plan.steps or (self.pipeline.runnable(agreement.num_microbatches),)
        prepared = replace(prepared, plan=replace(prepared.plan, steps=steps))
        # If the agreed number is larger, ranks have other steps.
        num_microbatches = max(sum(steps), agreement.num_microbatches)
        dummy = agreement.dummy or prepared.dummy
        return prepared, replace(agreement, num_microbatches=num_microbatches, dummy=dummy)

    def is_repeatable(self, hooks: LossHooks) -> bool:
        """Return False if the plan depends on a message between ranks."""
        return self.ranks.degree == 1 and super().is_repeatable(hooks)

    def plan(self, samples: Samples) -> Plan:
        """Return the plan by which samples are split into microbatches."""
        lengths = samples.lengths
        check_lengths(lengths, self.max_microbatch_tokens)
        assert self.pipeline is not None
        steps = choose_steps(self.of_all or (self._summarize(lengths),), self.pipeline.runnable, self.pipeline.bubble)
        sync, reason = self.choice
        numbers, samples_of_rank = tuple(step.num_microbatches for step in steps), tuple(range(len(lengths)))
        plan = Plan(deal_into_steps(lengths, steps), tuple(lengths), samples_of_rank, sync, reason, steps=numbers)
        return plan if self.cost is None else priced(plan, self.cost)

    def fitted(self, plan: Plan, samples: Samples) -> Plan:
        """Return a plan that was made before, for these samples. Raises `PlanError` if it is of others."""
        fitted = super().fitted(plan, samples)
        assert self.pipeline is not None
        is_short = plan.steps and sum(plan.steps) < len(fitted.microbatches)
        runnable = tuple(self.pipeline.runnable(max(1, number)) for number in plan.steps)
        if is_short or runnable != tuple(plan.steps):
            raise PlanError(
                f"plan has schedule steps of {plan.steps} microbatches, which this schedule cannot run; give a plan of "
                "this accumulator"
            )
        return replace(fitted, steps=plan.steps)

    def _summarize(self, lengths: Sequence[int]) -> RankLengths:
        """Return the numbers by which all ranks choose the same steps."""
        return _count_lengths(lengths, *self.limits, self.cost)


def _count_lengths(
    lengths: Sequence[int], micro_batch_size: int | None, max_microbatch_tokens: int | None, cost: CostModel | None
) -> RankLengths:
    """Return the samples of a rank by their distinct lengths, with the limits of a microbatch."""
    distinct, counts = np.unique(np.asarray(lengths, dtype=np.int64), return_counts=True)
    return RankLengths(distinct.tolist(), counts.tolist(), micro_batch_size, max_microbatch_tokens, cost)


def plan_steps(
    lengths: Sequence[Sequence[int]], schedule: str, num_ranks: int, per_rank: int, *,
    micro_batch_size: int | None = None, max_microbatch_tokens: int | None = None,
) -> list[ScheduleStep]:  # fmt: skip
    """Return the schedule steps of an update, as a `Pipeline` runs them.

    Args:
        lengths: The lengths of the samples of each data rank.
        schedule: A name in `SCHEDULES`.
        num_ranks: Ranks along "pp".
        per_rank: Stages of each.
        micro_batch_size: As for `GradientAccumulator`; this or ``max_microbatch_tokens``.
        max_microbatch_tokens: As for `GradientAccumulator`.
    """
    ranks = [_count_lengths(length, micro_batch_size, max_microbatch_tokens, None) for length in lengths]

    def runnable(number: int) -> int:
        return number and SCHEDULES[schedule].runnable(number, num_ranks, num_ranks * per_rank)

    return choose_steps(ranks, runnable, (num_ranks - 1) / per_rank)


def choose_steps(ranks: Sequence[RankLengths], runnable: Callable[[int], int], bubble: float) -> list[ScheduleStep]:
    """Return the cheapest schedule steps for the samples of all data ranks, the longest first.

    Args:
        ranks: The samples of each data rank, and their limits. The smallest limit counts.
        runnable: `Pipeline.runnable`.
        bubble: `Pipeline.bubble`.
    """
    of_ranks = [np.asarray(rank_lengths.lengths, dtype=np.int64) for rank_lengths in ranks]
    lengths = np.unique(np.concatenate(of_ranks))[::-1]
    if not len(lengths):
        return []
    if len(lengths) > MOST_LENGTHS:
        lengths = lengths[np.linspace(0, len(lengths) - 1, MOST_LENGTHS).astype(np.int64)]
    before = np.zeros((len(ranks), len(lengths) + 1), dtype=np.int64)  # samples of each rank that are longer
    for rank, rank_lengths in enumerate(ranks):
        place = len(lengths) - 1 - np.searchsorted(lengths[::-1], rank_lengths.lengths)
        np.add.at(before[rank], place + 1, rank_lengths.counts)
    before = before.cumsum(axis=1)
    rows_of = [max(1, min(_rows(rank_lengths, length) for rank_lengths in ranks)) for length in map(int, lengths)]
    # As for microbatches that run one by one: without a given cost, a launch costs a share of the largest microbatch.
    cost = ranks[0].cost or CostModel(seconds_per_microbatch=rows_of[0] * int(lengths[0]) / LAUNCH_SHARE)
    max_number = -(-int(before[:, -1].max()) // min(rows_of))
    runnable_numbers = np.array([runnable(number) for number in range(max_number + 1)])
    numbers, rows_in, prices = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for start, length in enumerate(map(int, lengths)):
        samples = (before[:, start + 1 :] - before[:, start : start + 1]).max(axis=0)  # [ends], of the rank with most
        number = runnable_numbers[-(-samples // rows_of[start])]
        rows = -(-samples // number)
        numbers.append(number)
        rows_in.append(rows)
        prices.append((number + bubble) * cost.seconds(rows, max(1, length)))
    steps, start = list[ScheduleStep](), 0
    for end in group_neighbors(prices):
        above = int(lengths[end]) if end < len(lengths) else -1
        place = end - start - 1
        steps.append(ScheduleStep(above, int(numbers[start][place]), int(rows_in[start][place]), int(lengths[start])))
        start = end
    return steps


def deal_into_steps(lengths: Sequence[int], steps: Sequence[ScheduleStep]) -> tuple[tuple[int, ...], ...]:
    """Return this rank's microbatches, the longest samples first. Those of a step have almost equal numbers of samples.

    A step with fewer long samples than microbatches gets shorter ones, too, so that only the last microbatches of the
    last steps may be missing.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    falling = -np.asarray(lengths, dtype=np.int64)[order]
    microbatches: list[tuple[int, ...]] = []
    start = 0
    for above, number, _, _ in steps:
        end = int(np.searchsorted(falling, -above))
        end = max(end, min(start + number, len(order)))
        size, longer = divmod(end - start, number)
        for index in range(min(number, end - start)):
            rows = size + (index < longer)
            microbatches.append(tuple(order[start : start + rows]))
            start += rows
    return tuple(microbatches)


def group_microbatches(
    shapes: Sequence[tuple[int, int]], runnable: Callable[[int], int], bubble: float
) -> list[list[int]]:
    """Return the cheapest schedule steps for microbatches of so many rows and columns, as their indices.

    Where the schedule needs more microbatches, the last of a step is repeated. The arguments are as in `choose_steps`.
    """
    order = sorted(range(len(shapes)), key=lambda index: -shapes[index][1])
    rows = np.array([shapes[index][0] for index in order])
    numbers = np.array([runnable(number) for number in range(1, len(order) + 1)])
    cost = CostModel(seconds_per_microbatch=max(num_rows * columns for num_rows, columns in shapes) / LAUNCH_SHARE)
    prices = [
        (numbers[: len(order) - start] + bubble)
        * cost.seconds(cast(Any, np.maximum.accumulate(rows[start:])), max(1, shapes[first][1]))
        for start, first in enumerate(order)
    ]
    groups, start = list[list[int]](), 0
    for end in group_neighbors(prices):
        group = order[start:end]
        groups.append(group + group[-1:] * (runnable(len(group)) - len(group)))
        start = end
    return groups


def _rows(rank: RankLengths, length: int) -> int:
    """Return the samples of a microbatch that a rank's limit allows at a length."""
    if rank.micro_batch_size is not None:
        return rank.micro_batch_size
    return cast(int, rank.max_microbatch_tokens) // max(1, length)


def group_neighbors(prices: Sequence[np.ndarray]) -> list[int]:
    """Return where each group ends in the cheapest grouping of neighbors into 1 to `MOST_STEPS` groups.

    Args:
        prices: ``prices[start][number - 1]`` is the price of a group of ``number`` items whose first is ``start``.
    """
    num = len(prices)
    table = np.full((num, num + 1), np.inf)  # [start, end]
    for start, row_prices in enumerate(prices):
        table[start, start + 1 :] = row_prices
    best = np.full(num + 1, np.inf)  # [end], of the items before it in `len(starts)` groups
    best[0], starts, totals = 0.0, list[np.ndarray](), list[float]()
    for _ in range(min(MOST_STEPS, num)):
        reached = best[:num, None] + table
        starts.append(reached.argmin(axis=0))
        best = reached.min(axis=0)
        totals.append(float(best[num]))
    ends, end = list[int](), num
    for start_of in reversed(starts[: 1 + totals.index(min(totals))] if totals else []):
        ends.append(end)
        end = int(start_of[end])
    return ends[::-1]
