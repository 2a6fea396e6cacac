"""UpdateSampler: the samples of each update, and this rank's share of them.

The samples of an update follow from (seed, epoch, position) alone. The number of ranks decides only which rank runs
them, so a run may resume with another number of ranks.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megabatch.errors import PlanError, require_count, require_positive
from megabatch.planning.balancing import balance_lengths, deal_microbatches
from megabatch.planning.dealing import deal
from megabatch.planning.plan import CostModel, check_lengths
from megabatch.planning.settings import check_cost, require_one_limit
from megabatch.torch_private.data_workers import is_asked_by_workers

TAILS = ("step", "drop", "carry")
MAX_POSITIONS = 2**16  # of updates that were handed out; readers ahead of the training are far closer


class Consumed(NamedTuple):
    """Updates, samples and tokens that were handed out before an update, over all ranks.

    `UpdateSampler` calls its ``global_batch_size`` with one, where that is a function.
    """

    updates: int = 0
    samples: int = 0
    tokens: int = 0

    def after(self, num_samples: int, num_tokens: int) -> "Consumed":
        """Return the counts after one more update of ``num_samples`` samples and ``num_tokens`` tokens."""
        return Consumed(self.updates + 1, self.samples + num_samples, self.tokens + num_tokens)


class Position(NamedTuple):
    """A place in the stream: the updates of the run before it, the samples of the stream, and what was handed out."""

    updates: int = 0
    samples: int = 0
    consumed: Consumed = Consumed()


class UpdateSampler(torch.utils.data.Sampler[list[int]]):
    """Yields this rank's sample ids of each update, for one epoch; use it as a DataLoader's ``batch_sampler``.

    The shares of all ranks are disjoint, make up the update, and are balanced by cost. With the accumulator's limit
    they are dealt in groups of similar length, without it one by one, in shares that differ in size by at most one. A
    share may be empty, so give the DataLoader ``collate_fn=list``.

    Its position is what was trained, if you say how many updates were: ``state_dict(updates=learner.step)``. A
    DataLoader with workers asks for updates long before they are trained.

    Where every rank of the process group has a share, the first iteration is collective: the ranks compare their first
    update, once.

    Args:
        lengths: Tokens of each sample of the data set.
        global_batch_size: Samples of an update over all ranks; it need not divide by anything. Or a function that
            returns them for each update from the totals before it: ``lambda seen: 64 if seen.tokens < 50e6 else 256``.
        seed: With the epoch, decides the order of the samples.
        dp_rank: Index of this rank's share. None: the rank in the process group, or 0 without one.
        dp_degree: Number of ranks that see different samples; give it with ``dp_rank`` where the model is sharded over
            ranks too (cp, tp or pp). None: all ranks of the process group, or 1 without one.
        tail: Handling of an epoch's last samples that do not fill an update: "step" makes a short update of them,
            "drop" leaves them out, "carry" begins the next epoch's first update with them.
        cost: Balances shares by seconds; None balances by length. It must be the same on all ranks, to the bit.
        order: Returns the sample ids of an epoch, in order, by the epoch's number: any ids of the data set, the same in
            every process, and equally many in every epoch. By default all of them, shuffled by seed and epoch.
        same_bits: Cut each update into microbatches whatever the number of ranks, and deal whole microbatches. Give it
            together with the limit of the accumulator, whose planner is `SameBits`.
        micro_batch_size: Samples of a microbatch, as the accumulator has it. This or
        max_microbatch_tokens: padded tokens of a microbatch. With a limit, samples of similar length are grouped before
            they are dealt, so that ranks have little padding. Shares then differ in size. Leave both out for samples
            that are not padded.
        speeds: Relative speed of each rank, such as ``[1, 1, 0.5]``. A slow rank is dealt less, and the gradient stays
            the same. It needs a limit.

    `deal_by` changes cost, limit and speeds between updates.

    Raises `PlanError` for a size, a rank, a tail or an order that cannot be, and on all ranks where their first updates
    are not the same.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        global_batch_size: int | Callable[[Consumed], int],
        seed: int = 0,
        dp_rank: int | None = None,
        dp_degree: int | None = None,
        tail: str = "step",
        cost: CostModel | None = None,
        order: Callable[[int], Sequence[int]] | None = None,
        same_bits: bool = False,
        micro_batch_size: int | None = None,
        max_microbatch_tokens: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        self._given, self._seen = global_batch_size, Consumed()
        size = self._size
        if (dp_rank is None) != (dp_degree is None):
            raise PlanError(
                f"dp_rank is {dp_rank} and dp_degree is {dp_degree}; give both, or neither, to take them from the "
                "process group"
            )
        self._place: tuple[int, int] | None = None  # asked for when it is needed: the process group may come later
        if dp_rank is not None and dp_degree is not None:
            self._place = require_count("dp_rank", dp_rank, least=0), require_count("dp_degree", dp_degree)
        self._seed = require_count("seed", seed, least=0)
        if tail not in TAILS:
            raise PlanError(f"tail is {tail!r}; expected one of {', '.join(TAILS)}")
        if dp_rank is not None and dp_degree is not None and dp_rank >= dp_degree:
            raise PlanError(f"dp_rank is {dp_rank}; expected 0 to {dp_degree - 1} with dp_degree={dp_degree}")
        if not len(lengths):
            raise PlanError("the data set is empty; give at least one sample")
        check_lengths(lengths, None)
        check_cost(cost)
        self._same_bits = same_bits
        self._limits = _check_limits(lengths, micro_batch_size, max_microbatch_tokens, is_needed=same_bits)
        self._speeds = _check_speeds(speeds, dp_degree, takes_speeds=self._limits is not None and not same_bits)
        self._lengths = in_few_bytes(lengths)  # [number of ids]
        self.cost = cost
        self._order = order or self._shuffled
        self._latest = (0, np.asarray(self._order(0)))  # an epoch and its order, which is not made anew for each update
        self._epoch_size = len(self._latest[1])
        self._check_order(*self._latest)
        if tail == "drop" and self._epoch_size < size:
            raise PlanError(
                f"the data set has {self._epoch_size} samples, fewer than global_batch_size={size}, and "
                'tail="drop" would leave no update; use tail="step" or a smaller global_batch_size'
            )
        self._tail = tail
        self._compared: list[bool] = []  # with the other ranks; copies know it too
        self._consumed = 0  # samples since the first epoch began; a dropped tail counts as consumed
        self._positions = deque([Position()], MAX_POSITIONS)  # before the first update, and after each
        self._is_read_ahead = False  # by workers of a DataLoader
        self._is_under_way = False  # an epoch that they read has not come to its end

    def __iter__(self) -> Iterator[list[int]]:
        self._compare_ranks()
        if self._is_under_way:
            raise PlanError(
                "a loop over a DataLoader with workers was left before the end of its epoch, and its workers have read "
                "samples that were not trained; go back to them before the next loop: "
                "sampler.load_state_dict(sampler.state_dict(updates=...)), with the number of updates that were trained"
            )
        self._positions = self._positions.copy()  # a copy of this sampler goes its own way
        for start, stop in self._spans():
            self._positions.append(Position(self._positions[-1].updates + 1, self._consumed, self._seen))
            self._is_read_ahead = self._is_under_way = is_asked_by_workers()
            yield self.share(self._ids(start, stop))
        self._is_under_way = False

    def __len__(self) -> int:
        """Return the number of updates that the next iteration yields."""
        if callable(self._given):
            return sum(1 for _ in copy(self)._spans())
        remaining = self._end() - self._consumed
        return -(-remaining // self._size) if self._tail == "step" else remaining // self._size

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample of the data set, [number of ids]."""
        return self._lengths

    def sizes(self, num_epochs: int) -> Iterator[int]:
        """Yield the samples of each update still to come, over all ranks, in the first ``num_epochs`` epochs."""
        ahead, end = copy(self), num_epochs * self._epoch_size
        while ahead._consumed < end:
            for start, stop in ahead._spans():
                if stop > end:
                    return
                yield stop - start

    def share(self, samples: Sequence[int] | np.ndarray) -> list[int]:
        """Return this rank's share of an update's sample ids."""
        ids = np.asarray(samples, dtype=np.int64)
        return ids[self._ranks_of(ids) == self._dp_rank].tolist()

    def deal_by(
        self,
        *,
        cost: CostModel | None = None,
        max_microbatch_tokens: int | None = None,
        speeds: Sequence[float] | None = None,
    ) -> None:
        """Deal the updates to come by what was measured since. The samples of each update stay the same.

        All ranks call this between the same two updates, with the same values to the bit. None leaves a value as it is.

        Args:
            cost: See above.
            max_microbatch_tokens: The accumulator's limit, where it was measured.
            speeds: See above. Ones for all ranks take speeds back.

        Raises:
            PlanError: Values that cannot be.
        """
        limits, degree = self._limits, (self._place or (0, None))[1]
        if max_microbatch_tokens is not None:
            limits = _check_limits(self._lengths, limits and limits[0], max_microbatch_tokens, is_needed=False)
        if speeds is not None:
            takes_speeds = limits is not None and not self._same_bits
            self._speeds = _check_speeds(speeds, degree, takes_speeds=takes_speeds)
        self._limits, self.cost = limits, check_cost(cost) or self.cost

    def state_dict(self, updates: int | None = None) -> dict[str, Any]:
        """Return the position in the stream of samples, independent of the number of ranks.

        Args:
            updates: Updates of the run that were trained, such as `Learner.step`; of a run that was resumed, with those
                before. Each is one share that this sampler has yielded. None: all that it has yielded, which is right
                where nothing reads ahead of the training.

        Raises:
            PlanError: ``updates`` that were not yielded, and no number where workers of a DataLoader have read ahead.
        """
        if updates is None and self._is_read_ahead:
            raise PlanError(
                "workers of a DataLoader have read samples ahead of the training, and the state would leave them out; "
                "say how many updates were trained: state_dict(updates=learner.step), or a count of your own"
            )
        position = Position(self._positions[-1].updates, self._consumed, self._seen)
        if updates is not None:
            first, last = self._positions[0].updates, position.updates
            if not first <= require_count("updates", updates, least=0) <= last:
                raise PlanError(
                    f"updates is {updates} and this sampler has yielded those up to {last} (it knows back to {first}); "
                    "give the number of updates of the run that were trained"
                )
            position = self._positions[updates - first]
        seen_state = {"seen": list(position.consumed)} if callable(self._given) else {}
        counts = {"updates": position.updates, "samples": position.samples}
        return {**counts, "num_samples": self._epoch_size, "seed": self._seed, **seen_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at ``state``. Raises `PlanError` for a state of another data set or seed."""
        for key, expected in {"num_samples": self._epoch_size, "seed": self._seed}.items():
            if state[key] != expected:
                raise PlanError(
                    f"the sampler's state has {key}={state[key]} but this sampler has {expected}; "
                    "give the same data and seed"
                )
        if callable(self._given) and state["samples"] and "seen" not in state:
            raise PlanError(
                "the sampler's state does not say what was handed out before it, which a global_batch_size that is a "
                "function asks for; give a state of a sampler that has such a one"
            )
        self._consumed = int(state["samples"])
        self._seen = Consumed(*state.get("seen", ()))
        self._positions = deque([Position(int(state.get("updates", 0)), self._consumed, self._seen)], MAX_POSITIONS)
        self._is_read_ahead = self._is_under_way = False

    @property
    def _size(self) -> int:
        """Samples of the next update."""
        global_batch_size = self._given
        try:
            size = global_batch_size(self._seen) if callable(global_batch_size) else global_batch_size
            return require_count("global_batch_size", size)
        except StopIteration as error:  # which would end the loop that asks for the next update
            raise PlanError(
                "global_batch_size raised StopIteration: an iterator in it has ended; give next() a default"
            ) from error

    def _ranks_of(self, ids: np.ndarray) -> np.ndarray:
        """Return the rank of each sample of an update."""
        lengths = self._lengths[ids]
        if self._limits is None:
            price = float if self.cost is None else self.cost.sample_seconds
            return balance_lengths(lengths, price, self._dp_degree)
        rows, tokens = self._limits
        if self._same_bits:
            return self._ranks_of_microbatches(lengths.tolist(), rows, tokens)
        return deal(lengths, self._dp_degree, self.cost, max_rows=rows, max_tokens=tokens, speeds=self._speeds)

    def _ranks_of_microbatches(self, lengths: list[int], rows: int | None, tokens: int | None) -> np.ndarray:
        """Return the rank of each sample where ranks are dealt whole microbatches, which no rank decides."""
        price, ranks = (self.cost or CostModel()).seconds, np.zeros(len(lengths), dtype=np.int64)
        dealt = deal_microbatches(lengths, self._dp_degree, price, max_rows=rows, max_tokens=tokens)
        for rank, microbatches in enumerate(dealt):
            ranks[[index for microbatch in microbatches for index in microbatch]] = rank
        return ranks

    @property
    def _dp_rank(self) -> int:
        return (self._place or _place_in_group())[0]

    @property
    def _dp_degree(self) -> int:
        return (self._place or _place_in_group())[1]

    def _compare_ranks(self) -> None:
        """Raise on all ranks where their shares are not of one update, or two ranks have the same share."""
        _, num_ranks = _place_in_group()
        is_worker = torch.utils.data.get_worker_info() is not None  # which cannot speak for its rank
        if self._compared or num_ranks == 1 or num_ranks != self._dp_degree or is_worker:
            return
        self._compared.append(True)
        no_ids = np.empty(0, dtype=np.int64)
        ids = np.asarray(next((self._ids(*span) for span in copy(self)._spans()), no_ids), dtype=np.int64)
        first = repr(self._consumed).encode() + ids.tobytes() + self._ranks_of(ids).tobytes()
        local_checksum = zlib.crc32(first, zlib.crc32(self._lengths.tobytes()))
        rank_checksums: list[Any] = [None] * num_ranks
        dist.all_gather_object(rank_checksums, (self._dp_rank, local_checksum))
        dp_ranks = [int(dp_rank) for dp_rank, _ in rank_checksums]
        if sorted(dp_ranks) != list(range(num_ranks)):
            raise PlanError(f"the ranks have dp_rank {dp_ranks}; expected each of 0 to {num_ranks - 1} once")
        if other_updates := [rank for rank, (_, update) in enumerate(rank_checksums) if update != rank_checksums[0][1]]:
            raise PlanError(
                f"the first update of rank {other_updates[0]} is not that of rank 0; give every rank's UpdateSampler "
                "the same lengths, global_batch_size, seed, order, tail, cost and state"
            )

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield the start and stop of each update of this epoch in the endless stream, advancing the state first."""
        end = self._end()
        while (stop := self._stop(end)) is not None:
            start, self._consumed = self._consumed, stop
            if callable(self._given):
                self._seen = self._seen.after(stop - start, int(self._lengths[self._ids(start, stop)].sum()))
            if self._tail == "drop" and end - stop < self._size:
                self._consumed = end
            yield start, stop
        if self._tail == "drop":  # a state of another global_batch_size may have left less than one update
            self._consumed = end

    def _end(self) -> int:
        """Return the end in the stream of the next update's epoch; a carried update belongs to the epoch it ends in."""
        size = self._epoch_size
        last = self._consumed + (self._size if self._tail == "carry" else 1) - 1
        return (last // size + 1) * size

    def _stop(self, end: int) -> int | None:
        """Return the stop of the next update of this epoch, if there is one."""
        stop = self._consumed + self._size
        if stop <= end:
            return stop
        return end if self._tail == "step" and self._consumed < end else None

    def _ids(self, start: int, stop: int) -> np.ndarray:
        """Return the sample ids from ``start`` to ``stop`` of the endless stream of epochs."""
        size = self._epoch_size
        epochs = range(start // size, (stop - 1) // size + 1)
        parts = [self._order_of(epoch)[max(0, start - epoch * size) : stop - epoch * size] for epoch in epochs]
        return np.concatenate(parts)

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._latest[0] != epoch:
            self._latest = (epoch, np.asarray(self._order(epoch)))
            self._check_order(*self._latest)
        return self._latest[1]

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._lengths))

    def _check_order(self, epoch: int, ids: np.ndarray) -> None:
        if len(ids) != self._epoch_size or not self._epoch_size:
            raise PlanError(
                f"order({epoch}) gives {len(ids)} sample ids; expected {self._epoch_size or 'some'}, "
                "equally many in every epoch"
            )
        last = len(self._lengths) - 1
        if ids.min() < 0 or ids.max() > last:
            outside = ids[(ids < 0) | (ids > last)]
            raise PlanError(f"order({epoch}) gives the sample id {outside[0]}; the data set has the ids 0 to {last}")


def _check_limits(
    lengths: Any, rows: int | None, tokens: int | None, *, is_needed: bool
) -> tuple[int | None, int | None] | None:
    """Return the limits of a microbatch. None without one, unless it is needed."""
    if rows is None and tokens is None and not is_needed:
        return None
    require_one_limit(rows, tokens)
    check_lengths(lengths, tokens)
    return rows, tokens


def _check_speeds(speeds: Any, dp_degree: int | None, *, takes_speeds: bool) -> tuple[float, ...] | None:
    """Return the speeds of the ranks. Raises `PlanError` for speeds that cannot be, or that nothing uses."""
    if speeds is None:
        return None
    if not takes_speeds:
        raise PlanError(
            f"speeds is {speeds!r} and ranks are dealt single samples, or same_bits=True; give speeds together "
            "with micro_batch_size or max_microbatch_tokens, and without same_bits"
        )
    num_ranks = _place_in_group()[1] if dp_degree is None else dp_degree
    if not isinstance(speeds, Sequence | np.ndarray):
        raise PlanError(f"speeds is {speeds!r}; give a list with one number for each of {num_ranks} ranks")
    if len(speeds) != num_ranks:
        raise PlanError(f"speeds has {len(speeds)} numbers for {num_ranks} ranks; give one for each")
    return tuple(require_positive("a number of speeds", speed) for speed in speeds)


def _place_in_group() -> tuple[int, int]:
    """Return rank and number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def in_few_bytes(lengths: Sequence[int]) -> np.ndarray:
    """Copy the lengths into the narrowest type that holds them: 20 MB for ten million of up to 65,535 tokens."""
    counts = np.asarray(lengths, dtype=np.int64)
    return counts.astype(np.min_scalar_type(int(counts.max())))
