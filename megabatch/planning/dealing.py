"""Microbatches of a whole update, dealt over ranks so that all ranks finish together.

Samples of similar length belong into one microbatch, whichever rank runs it. So the update is grouped before it
is dealt: its samples, sorted by length, are cut into neighbors of equal cost, and ranks are dealt whole groups. Lengths
are known before, so ranks need no message: all compute the same answer.
"""

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megabatch.errors import require_count
from megabatch.planning.finer_cut import split_into
from megabatch.planning.partition import balance_lengths, split
from megabatch.planning.plan import (
    LAUNCH_SHARE,
    CostModel,
    Plan,
    check_cost,
    check_lengths,
    pad_with_dummies,
    plan_share,
    priced,
    require_one_limit,
)

MORE_ROUNDS = 6  # numbers of microbatches a rank that are tried, from the smallest on
FEW_SAMPLES = 4096  # with more, one answer is made and not priced: the last microbatches matter little
NEAR = 1.003  # the budget of a group is found up to this factor


class _Groups(NamedTuple):
    """Neighbors in the falling order of length: where each group begins, and its price."""

    starts: list[int]
    prices: list[float]


def deal(
    lengths: np.ndarray,
    num_ranks: int,
    cost: CostModel | None = None,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    speeds: Sequence[float] | None = None,
) -> np.ndarray:
    """Return the rank of each sample of an update.

    Groups of equal cost are tried for several numbers of microbatches a rank. Few samples are also dealt one by one,
    and each answer is priced as ranks then run it. The one whose slowest rank takes the least time wins.

    Args:
        lengths: [samples], tokens of each.
        num_ranks: Number of ranks.
        cost: Seconds of a microbatch. None: relative costs. Without a launch in it, a launch costs as much as a
            sixteenth of the limit's tokens.
        max_rows: Samples of a microbatch. This or
        max_tokens: padded tokens of a microbatch.
        speeds: Relative speed of each rank. None: all are as fast.

    Returns:
        [samples], from 0 to ``num_ranks - 1``.
    """
    if num_ranks == 1 or not len(lengths):
        return np.zeros(len(lengths), dtype=np.int64)
    price = cost or CostModel()
    if not price.seconds_per_microbatch and max_tokens is not None:
        launch = max_tokens * price.seconds_per_token / LAUNCH_SHARE
        price = replace(price, seconds_per_microbatch=launch)
    dealer = _Dealer(lengths, num_ranks, price, max_rows, max_tokens, speeds)
    answers = dealer.deal_groups()
    if len(lengths) > FEW_SAMPLES:
        return answers[0]
    if speeds is None:
        answers.append(dealer.deal_samples())
    return min(answers, key=dealer.price)


def plan(
    lengths: Sequence[int],
    *,
    dp_degree: int = 1,
    micro_batch_size: int | None = None,
    max_microbatch_tokens: int | None = None,
    cost: CostModel | None = None,
) -> list[Plan]:
    """Deal an update's samples over ``dp_degree`` ranks and split each share into microbatches.

    This function runs no model and needs no process group. Give exactly one of the two limits.

    Args:
        lengths: Tokens of each sample of the update.
        dp_degree: Number of data ranks.
        micro_batch_size: Largest number of samples in a microbatch.
        max_microbatch_tokens: Largest number of padded tokens in a microbatch, a hard limit.
        cost: Seconds and bytes of a microbatch. None uses relative costs, and predicts no time.

    Returns:
        A plan for each rank. All have the same number of microbatches: shorter shares are cut smaller, and end with
        dummy microbatches if they have too few samples.

    Raises:
        PlanError: A length or a setting is not a positive count, both or neither limit are given, or a sample is
            longer than ``max_microbatch_tokens``.
    """
    require_one_limit(micro_batch_size, max_microbatch_tokens)
    check_cost(cost)
    require_count("dp_degree", dp_degree)
    check_lengths(lengths, max_microbatch_tokens)
    counts = np.asarray(lengths, dtype=np.int64)
    ranks = deal(counts, dp_degree, cost, max_rows=micro_batch_size, max_tokens=max_microbatch_tokens)
    shares = [np.flatnonzero(ranks == rank).tolist() for rank in range(dp_degree)]
    plans = [
        replace(
            plan_share([lengths[sample] for sample in share], micro_batch_size, max_microbatch_tokens, cost),
            samples=tuple(share),
        )
        for share in shares
    ]
    num_microbatches = max(each.num_microbatches for each in plans)
    price = (cost or CostModel()).seconds
    for rank, share in enumerate(plans):
        cut = split_into(share.lengths, share.microbatches, num_microbatches, price)
        share = replace(share, microbatches=pad_with_dummies(cut, num_microbatches))
        plans[rank] = share if cost is None else priced(share, cost)
    return plans


class _Dealer:
    """The samples of one update, sorted, and the ranks that they are dealt to."""

    def __init__(
        self,
        lengths: np.ndarray,
        num_ranks: int,
        cost: CostModel,
        max_rows: int | None,
        max_tokens: int | None,
        speeds: Sequence[float] | None,
    ) -> None:
        self._cost, self._max_rows, self._max_tokens = cost, max_rows, max_tokens
        self._lengths = np.maximum(lengths.astype(np.int64), 1)
        self._num_ranks = num_ranks
        self._speeds = [1.0] * num_ranks if speeds is None else [speed / max(speeds) for speed in speeds]
        self._is_even = len(set(self._speeds)) == 1
        longest = int(self._lengths.max())
        keys = (longest - self._lengths).astype(np.min_scalar_type(longest))  # numpy sorts 16 bits in linear time
        self._order = np.argsort(keys, kind="stable")
        counts = np.bincount(self._lengths)
        distinct = np.flatnonzero(counts)[::-1]
        self._num_samples = len(lengths)
        # Runs of one length in the sorted order: the number of samples, the price of each, the most in a microbatch.
        self._runs: list[tuple[int, float, int]] = [
            (int(counts[length]), cost.sample_seconds(length), self._rows_at(length)) for length in distinct.tolist()
        ]

    def _rows_at(self, length: int) -> int:
        """Return the samples of this length that one microbatch may hold."""
        by_rows = self._max_rows or self._num_samples
        by_tokens = self._num_samples if self._max_tokens is None else self._max_tokens // length
        return max(1, min(by_rows, by_tokens))

    def deal_groups(self) -> list[np.ndarray]:
        """Deal groups of equal cost, once for each number of microbatches a rank that is tried."""
        largest = self._cut([float("inf")])
        fewest = -(-len(largest.starts) // self._num_ranks)
        counts_samples = self._max_tokens is None  # who counts samples expects the fewest microbatches
        more = 1 if counts_samples or self._num_samples > FEW_SAMPLES else MORE_ROUNDS
        rounds = range(fewest, min(fewest + more, max(fewest + 1, self._num_samples)))
        most = fewest if counts_samples else None
        answers: list[np.ndarray] = []
        for number in rounds:
            answers += self._deal(self._equal_groups(number * self._num_ranks), most)
        return answers

    def deal_samples(self) -> np.ndarray:
        """Deal single samples by cost. Each rank then cuts its own."""
        return balance_lengths(self._lengths, self._cost.sample_seconds, self._num_ranks).astype(np.int64)

    def price(self, ranks: np.ndarray) -> float:
        """Return the seconds of the slowest rank, if each cuts its share by itself.

        A rank with fewer microbatches than another cuts its own smaller. One with fewer samples repeats its last.
        """
        shares: list[list[int]] = [self._lengths[ranks == rank].tolist() for rank in range(self._num_ranks)]
        limits = {"max_rows": self._max_rows, "max_tokens": self._max_tokens}
        cuts = [split(lengths, self._cost.seconds, **limits) for lengths in shares]
        most = max(map(len, cuts))
        slowest = 0.0
        for lengths, cut, speed in zip(shares, cuts, self._speeds, strict=True):
            groups = split_into(lengths, cut, most, self._cost.seconds)
            prices = [self._cost.seconds(len(group), lengths[group[0]]) for group in groups]
            dummies = (most - len(prices)) * (prices[-1] if prices else self._shortest)
            slowest = max(slowest, (sum(prices) + dummies) / speed)
        return slowest

    @property
    def _shortest(self) -> float:
        """The price of the shortest sample alone, which a rank without samples is sent."""
        return self._cost.seconds(1, int(self._lengths.min()))

    def _cut(self, budgets: Sequence[float], most: int | None = None) -> _Groups:
        """Cut the sorted samples into groups, each within the next of the budgets, which repeat, and the limits.

        A sample over the budget goes alone. Stop early with more than ``most`` groups.
        """
        launch, num_budgets = self._cost.seconds_per_microbatch, len(budgets)
        starts: list[int] = []
        prices: list[float] = []
        start, missing = 0, 0  # samples that the last group still takes
        for count, price, most_rows in self._runs:
            left = count - min(missing, count)
            missing -= count - left
            while left:
                rows = most_rows
                room = budgets[len(starts) % num_budgets] - launch
                if room < rows * price:
                    rows = max(1, int(room / price))
                groups = max(1, left // rows) if num_budgets == 1 else 1
                starts += range(start, start + groups * rows, rows)
                prices += [launch + rows * price] * groups
                start += groups * rows
                missing = max(0, groups * rows - left)
                left = max(0, left - groups * rows)
            if most is not None and len(starts) > most:
                break
        if missing and starts:  # the last group is not full
            prices[-1] = launch + (prices[-1] - launch) * (self._num_samples - starts[-1]) / (start - starts[-1])
        return _Groups(starts, prices)

    def _equal_groups(self, most: int) -> _Groups:
        """Return at most so many groups of the least budget, up to the factor `NEAR`."""
        launch = self._cost.seconds_per_microbatch
        weights = self._budget_weights()
        low = launch + sum(count * price for count, price, _ in self._runs) / most
        high = low * 1.02
        while len((groups := self._cut([high * weight for weight in weights], most)).starts) > most:
            low, high = high, high + 2 * (high - low)
        while high > low * NEAR:
            middle = (low + high) / 2
            tried = self._cut([middle * weight for weight in weights], most)
            if len(tried.starts) > most:
                low = middle
            else:
                high, groups = middle, tried
        return groups

    def _budget_weights(self) -> list[float]:
        """Return the share of the budget of each next group: by the speed of its rank, in turns from both ends."""
        if self._is_even:
            return [1.0]
        return [self._speeds[rank] for rank in self._turns()]

    def _turns(self) -> list[int]:
        """Return the ranks of two rounds of groups, the second in reverse."""
        ranks = list(range(self._num_ranks))
        return [*ranks, *reversed(ranks)]

    def _deal(self, groups: _Groups, most: int | None) -> list[np.ndarray]:
        """Deal groups, at most so many to a rank: the costliest first. Ranks of other speeds take turns.

        Where a rank has few samples, there is a second answer without those that others lend it.
        """
        if self._is_even:
            rank_of = _deal_by_cost(groups.prices, self._num_ranks, most)
        else:
            turns = self._turns()
            rank_of = [turns[index % len(turns)] for index in range(len(groups.starts))]
        sizes = np.diff([*groups.starts, self._num_samples])
        ranks = np.empty(self._num_samples, dtype=np.int64)
        ranks[self._order] = np.repeat(rank_of, sizes)
        # A rank may cut its groups again into smaller ones.
        lent = self._lend_shortest(ranks, 2 * int(np.bincount(rank_of).max()))
        return [ranks] if lent is None else [lent, ranks]

    def _lend_shortest(self, ranks: np.ndarray, num_samples: int) -> np.ndarray | None:
        """Return a deal in which each rank has so many samples, which would run dummies otherwise.

        Ranks get the shortest samples of others. None if all have enough.
        """
        sizes = np.bincount(ranks, minlength=self._num_ranks)
        if sizes.min() >= num_samples:
            return None
        borrowers = np.repeat(np.arange(self._num_ranks), np.maximum(num_samples - sizes, 0))
        rising = self._order[::-1]
        by_rank = rising[np.argsort(ranks[rising], kind="stable")]
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = np.arange(self._num_samples) - first  # in its rank, the shortest first
        is_spare = np.zeros(self._num_samples, dtype=np.bool_)
        is_spare[by_rank] = place < np.repeat(sizes - num_samples, sizes)
        lent = rising[is_spare[rising]][: len(borrowers)]
        dealt = ranks.copy()
        dealt[lent] = borrowers[: len(lent)]
        return dealt


def _deal_by_cost(prices: Sequence[float], num_ranks: int, most: int | None) -> list[int]:
    """Return the rank of each group: longest processing time first (Graham 1969), at most so many to a rank."""
    ranks = [0] * len(prices)
    room = [len(prices) if most is None else most] * num_ranks
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for group in sorted(range(len(prices)), key=lambda group: -prices[group]):
        load, rank = heapq.heappop(loads)
        ranks[group] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(loads, (load + prices[group], rank))
    return ranks
