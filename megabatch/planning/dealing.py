"""Microbatches of a whole update, dealt over ranks so that all ranks finish together.

Samples of similar length belong into one microbatch, whichever rank runs it. So the update is grouped before it
is dealt: its samples, sorted by length, are cut into neighbors of equal cost, and ranks are dealt whole groups. Lengths
are known before, so ranks need no message: all compute the same answer.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megabatch.errors import require_count
from megabatch.planning.balancing import FEW_TOKENS, balance_lengths
from megabatch.planning.finer_cut import split_into
from megabatch.planning.partition import plan_share, split
from megabatch.planning.plan import LAUNCH_SHARE, CostModel, Plan, check_lengths, pad_with_dummies, priced
from megabatch.planning.settings import check_cost, require_one_limit

FEW_SAMPLES = 4096  # with more, answers are compared by their plans alone, which fit the better the more samples
# By samples of the update: numbers of microbatches a rank that are tried, from the fewest, and answers to price.
EFFORTS = ((1024, 6, 8), (FEW_SAMPLES, 4, 2), (2**16, 3, 1))
FEES = (None, 1.4, 0.7)  # padding of a group, over that of equal padding in all groups. None: any
LEVEL_ROUNDS = 5  # the last microbatches of each rank level its time; those before are filled to the limit
NEAR, SLACK = 1.003, 1.05  # precision of a level; and how much worse an answer's plan may be if it is priced
MAX_FEE_STEPS = 14


class _Answer(NamedTuple):
    """Leveled groups of neighbors in the falling order of length, and the rank of each."""

    seconds: float  # of the slowest rank
    starts: Sequence[int]
    ranks: Sequence[int]
    filled: "_Filled"  # has the full groups before them


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

    Groups are tried for several numbers of microbatches a rank. Of few samples, the best answers, and one in which
    samples are dealt one by one, are priced as ranks then run them. The one whose slowest rank takes the least time
    wins.

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
    return min([*answers, dealer.deal_samples()], key=dealer.price)


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
    num_microbatches = max(share.num_microbatches for share in plans)
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
        self._cost, self.max_rows, self._max_tokens = cost, max_rows, max_tokens
        self._lengths = np.maximum(lengths.astype(np.int64), 1)
        self.num_ranks, self.num_samples = num_ranks, len(lengths)
        self.speeds = [1.0] * num_ranks if speeds is None else [speed / max(speeds) for speed in speeds]
        self._is_even = min(self.speeds) == 1.0
        longest = int(self._lengths.max())
        keys = (longest - self._lengths).astype(np.min_scalar_type(longest))  # numpy sorts 16 bits in linear time
        self._order = np.argsort(keys, kind="stable")
        # Runs of one length in the sorted order: the end, the price of a sample, and the most in a microbatch.
        if longest < FEW_TOKENS:
            counts = np.bincount(self._lengths)
            distinct = np.flatnonzero(counts)[::-1]
            counts = counts[distinct]
        else:
            distinct, counts = (ascending[::-1] for ascending in np.unique(self._lengths, return_counts=True))
        self.ends: list[int] = np.cumsum(counts).tolist()
        smallest_price = 1e-12 * (cost.seconds_per_microbatch or 1.0)  # a cost may be launches alone
        self.prices = [max(smallest_price, cost.sample_seconds(length)) for length in distinct.tolist()]
        self.rows = [self._rows_at(length) for length in distinct.tolist()]
        self.launch = cost.seconds_per_microbatch
        self.total = float(np.dot(counts, self.prices))

    def _rows_at(self, length: int) -> int:
        """Return the samples of this length that one microbatch may hold."""
        by_rows = self.max_rows or self.num_samples
        by_tokens = self.num_samples if self._max_tokens is None else self._max_tokens // length
        return max(1, min(by_rows, by_tokens))

    def deal_groups(self) -> list[np.ndarray]:
        """Deal groups, for several numbers of microbatches a rank. Return the best answers, at least one."""
        full = self._full_groups()
        fewest = -(-len(full) // self.num_ranks)
        tries, most_answers = next((effort[1:] for effort in EFFORTS if self.num_samples <= effort[0]), (1, 1))
        if self._max_tokens is None and self._is_even:  # who counts samples expects the fewest microbatches
            tries = 1
        # Where a slow rank runs less, others run more microbatches.
        enough = math.ceil(len(full) / sum(self.speeds))
        largest_number = max(fewest, min(enough + tries - 1, self.num_samples // self.num_ranks))
        answers: list[_Answer] = []
        level = min(enough, largest_number)
        stride = max(1, math.ceil((level - fewest) / tries))  # a very slow rank leaves many numbers below
        for number in (*range(fewest, level, stride), *range(level, largest_number + 1)):
            fees = FEES if number > 1 and self.num_samples <= FEW_SAMPLES else FEES[:1]
            num_rounds = number if self.num_samples <= FEW_SAMPLES else number - max(0, fewest - LEVEL_ROUNDS)
            filled = _Filled(self, full, number, num_rounds)
            base = self._equal_fee(number * self.num_ranks) if len(fees) > 1 else 0.0
            for fee in fees:
                best = min((answer.seconds for answer in answers), default=math.inf)
                answer = filled.level(None if fee is None else fee * base, best * (SLACK if most_answers > 1 else 1.0))
                if answer is not None:
                    answers.append(answer)
        answers.sort(key=lambda answer: answer.seconds)
        ranks: list[np.ndarray] = []
        for answer in answers[:most_answers]:
            ranks += self._with_enough_samples(answer)
        return ranks

    def deal_samples(self) -> np.ndarray:
        """Deal single samples by cost and speed. Each rank then cuts its own."""
        if not self._is_even:
            return self._deal_samples_by_speed()
        return balance_lengths(self._lengths, self._cost.sample_seconds, self.num_ranks).astype(np.int64)

    def _deal_samples_by_speed(self) -> np.ndarray:
        """Deal the costliest sample first, each to the rank that ends the earliest with it."""
        counts = np.diff([0, *self.ends])
        rates, loads = 1 / np.asarray(self.speeds), np.zeros(self.num_ranks)
        dealt: list[int] = []
        for price in np.repeat(self.prices, counts).tolist():
            rank = int((loads + price * rates).argmin())
            loads[rank] += price * rates[rank]
            dealt.append(rank)
        ranks = np.empty(self.num_samples, dtype=np.int64)
        ranks[self._order] = dealt
        return ranks

    def price(self, ranks: np.ndarray) -> float:
        """Return the seconds of the slowest rank, if each cuts its share by itself.

        A rank with fewer microbatches than another cuts its own smaller. One with fewer samples repeats its last.
        """
        shares: list[list[int]] = [self._lengths[ranks == rank].tolist() for rank in range(self.num_ranks)]
        limits = {"max_rows": self.max_rows, "max_tokens": self._max_tokens}
        cuts = [split(lengths, self._cost.seconds, **limits) for lengths in shares]
        num_microbatches = max(map(len, cuts))
        slowest = 0.0
        for lengths, cut, speed in zip(shares, cuts, self.speeds, strict=True):
            groups = split_into(lengths, cut, num_microbatches, self._cost.seconds)
            prices = [self._cost.seconds(len(group), lengths[group[0]]) for group in groups]
            dummies = (num_microbatches - len(prices)) * (prices[-1] if prices else self._shortest)
            slowest = max(slowest, (sum(prices) + dummies) / speed)
        return slowest

    @property
    def _shortest(self) -> float:
        """The price of the shortest sample alone, which a rank without samples is sent."""
        return self._cost.seconds(1, int(self._lengths.min()))

    def _full_groups(self) -> Sequence[int]:
        """Return where groups start that are filled to the limit."""
        if self._max_tokens is None:
            return range(0, self.num_samples, self.rows[0])
        starts: list[int] = []
        start = 0
        for end, rows in zip(self.ends, self.rows, strict=True):
            if start < end:
                num_groups = max(1, (end - start) // rows)
                starts += range(start, start + num_groups * rows, rows)
                start += num_groups * rows
                if start < end:
                    starts.append(start)
                    start += rows
        return starts

    def _equal_fee(self, num_groups: int) -> float:
        """Return the padding that groups may have, in seconds, so that so many groups take all samples.

        Groups of equal padding have the least padding together.
        """
        low, high = 1e-6 * self.total, self.total
        for _ in range(MAX_FEE_STEPS):
            fee = math.sqrt(low * high)
            run = start = count = 0
            while start < self.num_samples and count <= num_groups:
                while self.ends[run] <= start:
                    run += 1
                start = self.end_of_group(start, run, self.rows[run], fee)
                count += 1
            low, high = (fee, high) if start < self.num_samples or count > num_groups else (low, fee)
        return high

    def end_of_group(self, start: int, run: int, rows: int, fee: float) -> int:
        """Return the end of a group of at most so many rows, whose padding takes at most ``fee`` seconds."""
        price, stop = self.prices[run], min(self.num_samples, start + rows)
        end = self.ends[run]
        while end < stop:
            run += 1
            padding = price - self.prices[run]
            next_end = self.ends[run]
            if (next_end - end) * padding > fee:
                return min(stop, end + int(fee / padding))
            fee -= (next_end - end) * padding
            end = next_end
        return stop

    def turns(self, number: int) -> np.ndarray:
        """Return the ranks that take so many groups, in turns. A slow rank takes fewer."""
        speeds, ranks = np.asarray(self.speeds), np.arange(self.num_ranks)
        if self._is_even:
            return np.resize(np.concatenate([ranks, ranks[::-1]]), number)
        turn = np.arange(math.ceil(number * float(speeds.max() / speeds.sum())))[:, None]
        times = (turn + 0.5) / speeds
        return np.argsort(times, axis=None, kind="stable")[:number] % self.num_ranks

    def _with_enough_samples(self, answer: _Answer) -> list[np.ndarray]:
        """Return the rank of each sample. Where ranks have few, there is an answer before it in which others lend."""
        full = answer.filled
        starts = np.concatenate([full.starts, answer.starts, [self.num_samples]]).astype(np.int64)
        rank_of = np.concatenate([full.ranks, answer.ranks]).astype(np.int64)
        ranks = np.empty(self.num_samples, dtype=np.int64)
        ranks[self._order] = np.repeat(rank_of, np.diff(starts))
        # A rank may cut its groups again into smaller ones.
        lent = self._lend_shortest(ranks, 2 * int(np.bincount(rank_of).max()))
        return [ranks] if lent is None else [lent, ranks]

    def _lend_shortest(self, ranks: np.ndarray, num_samples: int) -> np.ndarray | None:
        """Return a deal in which each rank has so many samples, which would run dummies otherwise.

        Ranks get the shortest samples of others. None if all have enough.
        """
        sizes = np.bincount(ranks, minlength=self.num_ranks)
        if sizes.min() >= num_samples:
            return None
        borrowers = np.repeat(np.arange(self.num_ranks), np.maximum(num_samples - sizes, 0))
        rising = self._order[::-1]
        by_rank = rising[np.argsort(ranks[rising], kind="stable")]
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = np.arange(self.num_samples) - first  # in its rank, the shortest first
        is_spare = np.zeros(self.num_samples, dtype=np.bool_)
        is_spare[by_rank] = place < np.repeat(sizes - num_samples, sizes)
        lent = rising[is_spare[rising]][: len(borrowers)]
        dealt = ranks.copy()
        dealt[lent] = borrowers[: len(lent)]
        return dealt


class _Filled:
    """So many microbatches of each rank: the first are full, and the others level the time of ranks."""

    def __init__(self, dealer: _Dealer, full: Sequence[int], number: int, num_rounds: int) -> None:
        """``full`` are the starts of groups that fill the limit. The last ``num_rounds`` microbatches are leveled."""
        self._dealer, self._number, self._num_rounds = dealer, number, num_rounds
        num_full = (number - num_rounds) * dealer.num_ranks
        starts = np.asarray(full[: num_full + 1], dtype=np.int64)
        self.starts, self._start = starts[:num_full], int(starts[num_full])
        self.ranks = dealer.turns(num_full)
        runs = np.searchsorted(dealer.ends, self.starts, side="right")
        prices = np.diff(starts) * np.asarray(dealer.prices)[runs]
        launches = number * dealer.launch
        self._loads: list[float] = (
            np.bincount(self.ranks, weights=prices, minlength=dealer.num_ranks) + launches
        ).tolist()

    def level(self, fee: float | None, limit: float) -> _Answer | None:
        """Return the groups by which ranks finish together. None where the slowest takes longer than the limit."""
        dealer = self._dealer
        low = (dealer.total + self._number * dealer.launch * dealer.num_ranks) / sum(dealer.speeds)
        if not len(self.starts):  # the longest sample is still to be dealt
            low = max(low, self._number * dealer.launch + dealer.prices[0])
        if low > limit:
            return None
        high = min(limit, low * 1.02)
        while (answer := self._fill(high, fee)) is None:
            if high >= limit:
                return None
            low, high = high, min(limit, high + 2 * (high - low))
        while high > low * NEAR:
            middle = (low + high) / 2
            closer = self._fill(middle, fee)
            if closer is None:
                low = middle
            else:
                answer, high = closer, min(middle, closer.seconds)
        return answer

    def _fill(self, level: float, fee: float | None) -> _Answer | None:
        """Deal groups round by round, none of which lets its rank take longer than the level. None: samples are left.

        A rank's time is spread evenly over its microbatches. The rank with the most of it is the first of a round.
        """
        dealer, num_ranks = self._dealer, self._dealer.num_ranks
        ends, prices, most_rows, num_samples = dealer.ends, dealer.prices, dealer.rows, dealer.num_samples
        # Each microbatch to come, which may be cut in two, needs samples.
        shortest = prices[-1] if num_samples >= 2 * num_ranks * self._number else 0.0
        room = [level * speed - load for speed, load in zip(dealer.speeds, self._loads, strict=True)]
        starts: list[int] = []
        ranks: list[int] = []
        start, run, max_rows = self._start, 0, dealer.max_rows or 0
        while ends[run] <= start:
            run += 1
        num_places = num_ranks * self._num_rounds  # for groups to come
        for rounds_left in range(self._num_rounds, 0, -1):
            reserve = 2 * (rounds_left - 1) * shortest
            for rank in sorted(range(num_ranks), key=room.__getitem__, reverse=True):
                num_places -= 1
                price, rank_room = prices[run], room[rank]
                rows = int(min(rank_room / rounds_left, rank_room - reserve) / price)
                if max_rows:
                    rows = max(rows, num_samples - start - num_places * max_rows)
                if rows < 1:
                    if rank_room - reserve < price:
                        continue
                    rows = 1
                rows = min(rows, most_rows[run])
                end = start + rows
                if fee is not None and rounds_left > 1 and end > ends[run]:
                    end = dealer.end_of_group(start, run, rows, fee)
                end = min(end, num_samples)
                room[rank] = rank_room - (end - start) * price
                if room[rank] < 0:
                    return None
                starts.append(start)
                ranks.append(rank)
                start = end
                if start == num_samples:
                    spare = min(seconds / speed for seconds, speed in zip(room, dealer.speeds, strict=True))
                    return _Answer(level - spare, starts, ranks, self)
                while ends[run] <= start:
                    run += 1
        return None
