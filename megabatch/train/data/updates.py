"""Updates: this rank's samples, update by update, read here or by processes that run ahead of the training.

With every update comes the state after it, so that a run goes on after the last one it was given, however far ahead
others have been read; neither their number nor that of ranks changes what is trained on.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict
from itertools import chain, islice
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset

from megabatch import CostModel, UpdateSampler
from megabatch.batching import Deferred
from megabatch.errors import MegabatchError, PlanError
from megabatch.planning import Consumed
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.custom_dataset import drawing
from megabatch.train.data.load import Data
from megabatch.train.data.mixture import Measured
from megabatch.train.data.num_updates import check_points, count_updates, no_update
from megabatch.train.data.samples import Skipped
from megabatch.train.data.stream import Stream, StreamUpdate, place_of, share_of, updates_of
from megabatch.train.data.worker_transfer import (
    Delivery,
    Once,
    Share,
    State,
    from_workers,
    options,
    received,
    with_tensors,
)
from megabatch.train.runtime.ranks import Ranks

Ahead = tuple[Delivery, Iterator[Delivery]]  # the next update, read, and those after it


def sampler_of(data: Data, config: Config, ranks: Ranks) -> UpdateSampler:
    """Deals the samples that can be had by number."""
    size = config.update.global_batch_size
    return UpdateSampler(
        cast(Measured, data.train).lengths.tolist(),
        global_batch_size=size if isinstance(size, int) else sizes_of(config.update),
        seed=config.run.seed,
        dp_rank=ranks.dp_rank,
        dp_degree=ranks.dp_degree,
        tail=config.update.tail,
        order=data.order,  # pyright: ignore[reportArgumentType]  # an array of ids is a sequence of them
    )


def balancing_cost(even_tokens: int) -> CostModel:
    """Return costs in units of a token without attention. A power of two makes their sums exact."""
    return CostModel(seconds_per_token=1.0, seconds_per_pair=1 / even_tokens)


class Shares(Dataset[Delivery]):
    """Deliveries of samples that can be had by number; `UpdateSampler` says which."""

    max_workers = 1024

    def __init__(self, data: Data, config: Config, sampler: UpdateSampler, num_updates: int) -> None:
        self._samples = cast(Measured, data.train)
        self._num_updates, self._seed, self._sampler = num_updates, config.run.seed, sampler
        self._is_own, self._is_told = config.data.function is not None, data.is_told
        self._look_ahead = config.data.look_ahead

    def deal_by(self, cost: CostModel, ahead: Ahead | None) -> Ahead | None:
        """Deal by what samples cost from here on; what was read ahead, dealt anew, or None to read it again."""
        self._sampler.cost = cost
        return None

    def start(self) -> State:
        """The state before the first update."""
        return {"updates": 0, **self._sampler.state_dict()}

    def check(self, state: State) -> None:
        """Raise `PlanError` where a state is of other data or another seed."""
        copy(self._sampler).load_state_dict(state)

    def shares(self, state: State) -> Iterator[Share]:
        """The sample ids of every update after ``state``."""
        sampler = copy(self._sampler)  # where it stands is its iterator's own matter
        sampler.load_state_dict(state)
        number = state["updates"]
        while number < self._num_updates:
            for ids in sampler:
                number += 1
                yield ids, {"updates": number, **sampler.state_dict()}
                if number == self._num_updates:
                    return

    def deliveries(self, state: State) -> Iterator[Delivery]:
        """Every update after ``state``, read in this process."""
        return map(self.__getitem__ if self._look_ahead is None else self._deferred, self.shares(state))

    def loader(self, state: State, num_workers: int) -> "DataLoader[Delivery]":
        """Every update after ``state``, read by others."""
        return DataLoader(self, sampler=Once(self.shares(state)), **options(num_workers))

    def __getitem__(self, index: Share) -> Delivery:
        ids, state = index
        try:
            samples = [self._read(number, state["updates"]) for number in ids]
            return Delivery(samples, state, told=self._lengths(ids) if self._is_told else None, ids=ids)
        except MegabatchError as error:
            return Delivery([], state, str(error))

    def _deferred(self, share: Share) -> Delivery:
        """An update whose samples are read when their microbatch comes."""
        ids, state = share

        def load(index: int) -> Any:
            return with_tensors(self._read(ids[index], state["updates"]))

        return Delivery(
            Deferred(load, self._lengths(ids), look_ahead=self._look_ahead or 0, measured=not self._is_own),
            state,
            ids=ids,
        )

    def name(self, id: int | str) -> str:
        """Where a sample comes from."""
        return self._samples.name(cast(int, id))

    def _lengths(self, ids: list[int]) -> list[int]:
        return self._samples.lengths[ids].tolist()

    def _read(self, number: int, update: int) -> Any:
        """A sample; one that draws random numbers draws the same ones whichever process reads it."""
        if not self._is_own:
            return self._samples[number]
        with drawing(self._seed, update, number):
            return self._samples[number]


class Streamed(IterableDataset[Delivery]):
    """Deliveries of a stream, which is read from one end to the other, so by one process."""

    max_workers = 1

    def __init__(self, stream: Stream, ranks: Ranks, num_updates: int | None) -> None:
        self._stream, self._ranks, self._num_updates = stream, ranks, num_updates
        self._state = self.start()  # where iteration starts
        self._cost: CostModel | None = None
        self._latest: StreamUpdate | None = None  # that was read

    def deal_by(self, cost: CostModel, ahead: Ahead | None) -> Ahead | None:
        """Deal by what samples cost from here on; what was read ahead, dealt anew, since reading it takes long."""
        self._cost = cost
        if ahead is None or self._latest is None:
            return None
        first, rest = ahead
        return received(self._delivery(self._latest, first.state)), rest

    def start(self) -> State:
        """The state before the first update."""
        return {"updates": 0, **self._stream.start().to_json(), "skipped": asdict(Skipped()), "seen": list(Consumed())}

    def check(self, state: State) -> None:
        """Raise `PlanError` where a state is of another number of sources."""
        expected = len(self._stream.sources)
        if len(state["offsets"]) != expected:
            raise PlanError(
                f"the stream's state is of {len(state['offsets'])} sources but data has {expected}; give the same data"
            )

    def deliveries(self, state: State) -> Iterator[Delivery]:
        """Every update after ``state``, read in this process."""
        number, after = state["updates"], state
        try:
            updates = updates_of(self._stream, place_of(state), seen_of(state))
            for update in islice(updates, self._num_left(state)):
                number += 1
                told = {"skipped": asdict(update.skipped), "seen": list(update.seen)}
                after = {"updates": number, **update.after.to_json(), **told}
                self._latest = update
                yield self._delivery(update, after)
        except MegabatchError as error:
            yield Delivery([], after, str(error))

    def _delivery(self, update: StreamUpdate, after: State) -> Delivery:
        mine = share_of(update.samples, self._ranks.dp_rank, self._ranks.dp_degree, self._cost)
        return Delivery([sample for _, sample in mine], after, ids=[name for name, _ in mine])

    def name(self, id: int | str) -> str:
        """Where a sample comes from."""
        return str(id)

    def _num_left(self, state: State) -> int | None:
        return None if self._num_updates is None else max(0, self._num_updates - state["updates"])

    def loader(self, state: State, num_workers: int) -> "DataLoader[Delivery]":
        """Every update after ``state``, read by another process."""
        self._state, self._latest = state, None
        return DataLoader(self, **options(num_workers))

    def __iter__(self) -> Iterator[Delivery]:
        return self.deliveries(self._state)


class Updates:
    """This rank's samples of every update that is left; it goes on wherever a state of it was taken."""

    def __init__(self, data: Data, config: Config, ranks: Ranks) -> None:
        self._config, self._dp_degree = config, ranks.dp_degree
        self._epoch_size, self._sizes = data.epoch_size, sizes_of(config.update)
        check_points(config, data)
        sampler = None if isinstance(data.train, Stream) else sampler_of(data, config, ranks)
        self.num_updates = count_updates(config, self._epoch_size, sampler)
        if self.num_updates.of_run == 0:
            raise MegabatchError(no_update(config))
        if isinstance(data.train, Stream):
            self._source = Streamed(data.train, ranks, self.num_updates.of_run)
        else:
            self._source = Shares(data, config, cast(UpdateSampler, sampler), cast(int, self.num_updates.of_run))
        self._state = self._before = self._source.start()
        self._ahead: Ahead | None = None  # read by peek(): the next one, and the rest
        self._ids: Sequence[int | str] = ()
        self.even_tokens: int | None = None  # by which they are dealt
        self.change: Callable[[Any], Any] | None = None  # what is done to each sample before it is trained on

    @property
    def epochs(self) -> float | None:
        """Passes over the data so far; None: a stream does not know."""
        return None if self._epoch_size is None else self._state["samples"] / self._epoch_size

    @property
    def size(self) -> int:
        """Samples that the update should have, over all ranks, that was handed out last."""
        return self._sizes(seen_of(self._before))

    @property
    def skipped(self) -> Skipped:
        """What a stream has left out of its present pass; of other data `load_data` has said it."""
        return Skipped(**self._state.get("skipped", {}))

    @property
    def ids(self) -> Sequence[int | str]:
        """This rank's samples of the update that was handed out last: numbers in the data, or a stream's names."""
        return self._ids

    @property
    def names(self) -> list[str]:
        """Where each of this rank's samples of the update comes from that was handed out last."""
        return [self._source.name(each) for each in self._ids]

    def deal_by(self, even_tokens: int | None) -> None:
        """Deal updates over ranks by what samples cost, see `dealing.py`, before the first is handed out; None: by
        length. The samples of an update stay the same."""
        if even_tokens is not None and self._dp_degree > 1:
            cost = balancing_cost(even_tokens)
            self.even_tokens, self._ahead = even_tokens, self._source.deal_by(cost, self._ahead)

    def peek(self) -> Sequence[Any]:
        """This rank's samples of the next update, which is still to come; none at the end of the run."""
        if self._ahead is None:
            deliveries = self._source.deliveries(self._state)
            first = next(deliveries, None)
            if first is None:
                return self._nothing_left()
            self._ahead = (received(first), deliveries)
        return self._changed(self._ahead[0].samples)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        for delivery in self._deliveries():
            self._before, self._state = self._state, delivery.state
            self._ahead, self._ids = None, delivery.ids
            yield self._changed(delivery.samples)

    def give_back(self) -> None:
        """Let the update that was handed out last be the next one still, for a run that goes on later."""
        self._state = self._before

    def state_dict(self) -> State:
        """Where the run stands after the last update that was handed out, as JSON; whatever the number of ranks."""
        return self._state

    def load_state_dict(self, state: State) -> None:
        """Go on where ``state`` was taken. Raises `PlanError` where it is of other data or another seed."""
        self._source.check(state)
        self._state, self._ahead = state, None

    def _deliveries(self) -> Iterator[Delivery]:
        num_workers = min(self._config.data.num_workers, self._source.max_workers)
        if num_workers:
            self._ahead = None
            return map(received, from_workers(self._source.loader(self._state, num_workers), self._config))
        if self._ahead is not None:
            first, rest = self._ahead
            return chain([first], map(received, rest))
        return map(received, self._source.deliveries(self._state))

    def _changed(self, batch: Sequence[Any]) -> Sequence[Any]:
        """The samples of an update, each changed; those that are loaded later, then."""
        if (change := self.change) is None:
            return batch
        if not isinstance(batch, Deferred):
            return [change(sample) for sample in batch]
        return Deferred(
            lambda index: change(batch[index]), batch.lengths, batch.weights, look_ahead=batch.look_ahead,
            measured=batch.measured,
        )  # fmt: skip

    def _nothing_left(self) -> list[Any]:
        if not self._state["updates"]:
            raise MegabatchError(no_update(self._config))
        return []


def seen_of(state: State) -> Consumed:
    """What was handed out before a state; of an earlier version, or where no size asks for it, the updates alone."""
    return Consumed(*state.get("seen", (state["updates"],)))
