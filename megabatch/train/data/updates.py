"""Updates: this rank's samples, update by update, read here or by processes that run ahead of the training.

With every update comes the state after it, so that a run resumes after the last one it was given, however far ahead
others have been read; neither their number nor that of ranks changes what is trained on.
`docs/decisions/0041-who-reads-ahead.md` says why this is not torchdata's `StatefulDataLoader`.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from megabatch import CostModel, UpdateSampler
from megabatch.batching import Deferred
from megabatch.errors import MegabatchError, PlanError
from megabatch.planning import Consumed
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.custom_dataset import Form, check_form, drawing
from megabatch.train.data.encode import Skipped
from megabatch.train.data.load import Data
from megabatch.train.data.samples import View
from megabatch.train.data.stream import Stream, StreamPosition, StreamUpdate
from megabatch.train.runtime.exit import end_with_parent, ignore_signals_in_worker
from megabatch.train.runtime.ranks import Ranks

# A state as JSON.
State = dict[str, Any]
Sampler = TypeVar("Sampler", bound=UpdateSampler)
# Sample ids of an update, and the state after it.
Share = tuple[list[int], State]


@dataclass(frozen=True)
class Delivery:
    """This rank's samples of an update, as they travel from one process to another."""

    samples: Sequence[Any]
    state: State  # after the update
    problem: str | None = None  # an error of the process that reads, raised in the one that trains
    stated_lengths: Sequence[int] | None = None  # by data.function; None: measured from the samples
    ids: Sequence[int | str] = ()  # of the samples: their numbers in the data, or a stream's names


# The next update, read, and those after it.
Ahead = tuple[Delivery, Iterator[Delivery]]


@dataclass(frozen=True)
class Dealing:
    """Measured numbers by which updates are dealt over ranks. None: not measured."""

    cost: CostModel | None = None
    max_microbatch_tokens: int | None = None  # the limit, where the recipe states none
    speeds: tuple[float, ...] | None = None  # of the data ranks, relative to the fastest


UNMEASURED = Dealing()


def balancing_cost(even_tokens: int, launch_tokens: int = 0) -> CostModel:
    """Return costs in units of a token without attention. Powers of two make their sums exact."""
    return CostModel(launch_tokens, seconds_per_token=1.0, seconds_per_pair=1 / even_tokens)


class Updates:
    """This rank's samples of every update that is left; it resumes wherever a state of it was taken."""

    def __init__(self, data: Data, config: Config, ranks: Ranks) -> None:
        self._config, self._dp_degree = config, ranks.dp_degree
        self._epoch_size, self._sizes = data.epoch_size, sizes_of(config.update)
        check_points(config, data)
        if config.parallel.replicas is not None:
            # Replicas share each update among themselves.
            ranks = Ranks(0, 1, ranks.device)
            self._dp_degree = 1
        sampler = None if isinstance(data.train, Stream) else sampler_of(data, config, ranks)
        self.num_updates = count_updates(config, self._epoch_size, sampler)
        if self.num_updates.of_run == 0:
            raise MegabatchError(no_update(config))
        if isinstance(data.train, Stream):
            self._source = Streamed(data.train, ranks, self.num_updates.of_run)
        else:
            self._source = Shares(data, config, cast(UpdateSampler, sampler), cast(int, self.num_updates.of_run))
        self._state = self._before = self._source.start()
        # The next update, which peek() has read, and those after it.
        self._ahead: Ahead | None = None
        self._rest: Iterator[Delivery] = iter(())
        # The update that was read ahead, or the error of reading it.
        self._next: Delivery | Exception | None = None
        # This rank's samples of the update that was handed out last: numbers in the data, or a stream's names.
        self.ids: Sequence[int | str] = ()
        self.dealing = UNMEASURED
        self._is_under_way = False
        # Changes each sample before it is trained on.
        self.change: Callable[[Any], Any] | None = None
        # Adds a key with the number of the update and the id of the sample.
        self.add_key: Callable[[Any, int, int | str], Any] | None = None

    @property
    def epochs(self) -> float | None:
        """Passes over the data so far; None: a stream does not know."""
        return None if self._epoch_size is None else self._state["samples"] / self._epoch_size

    @property
    def size(self) -> int:
        """Samples, over all ranks, that the update should have that was handed out last."""
        return self._sizes(seen_of(self._before))

    @property
    def skipped(self) -> Skipped:
        """Counts of what a stream has left out of its present pass; of other data `load_data` has said it."""
        return Skipped(**self._state.get("skipped", {}))

    @property
    def names(self) -> list[str]:
        """The row that each of this rank's samples comes from, of the update that was handed out last."""
        return [self._source.name(sample_id) for sample_id in self.ids]

    def deal_by(self, dealing: Dealing) -> None:
        """Deal the updates to come over ranks by what was measured. Their samples stay the same.

        All ranks call this between the same two updates. Updates that were read ahead are read again.
        """
        if dealing == self.dealing or self._dp_degree == 1:
            return
        self.dealing, self._ahead = dealing, self._source.deal_by(dealing, self._ahead)
        if self._is_under_way:
            self._rest, self._next = self._deliveries(), None

    def peek(self) -> Sequence[Any]:
        """Return this rank's samples of the next update, which is still to come; none at the end of the run."""
        if self._ahead is None:
            deliveries = self._source.deliveries(self._state)
            first = next(deliveries, None)
            if first is None and not self._state["updates"]:
                raise MegabatchError(no_update(self._config))
            if first is None:
                return []
            self._ahead = (received(first), deliveries)
        return self._changed(self._ahead[0])

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self._rest, self._next, self._is_under_way = self._deliveries(), None, True
        while (delivery := self._read()) is not None:
            self._next = None
            if isinstance(delivery, Exception):
                raise delivery
            self._before, self._state = self._state, delivery.state
            self._ahead, self.ids = None, delivery.ids
            yield delivery.samples

    @property
    def may_read_ahead(self) -> bool:
        """True unless `data.function` makes the samples in this process, where a callback may change them."""
        return self._config.data.function is None or self._config.data.num_workers > 0

    def read_ahead(self) -> Sequence[Any]:
        """Return this rank's samples of the update to be handed out next; none at the end of the run.

        An error is raised when that update is handed out.
        """
        delivery = self._read()
        return delivery.samples if isinstance(delivery, Delivery) else []

    def put_ahead(self, samples: Sequence[Any]) -> None:
        """Hand out this batch of the same samples in the next update, in place of what `read_ahead` returned."""
        assert isinstance(self._next, Delivery)
        self._next = replace(self._next, samples=samples)

    def load(self, ids: list[int]) -> Sequence[Any]:
        """Return samples of the update to come, by their numbers in the data."""
        assert isinstance(self._source, Shares)
        share = (ids, {"updates": self._state["updates"] + 1})
        return self._changed(received(self._source[share]))

    def go_on(self, ids: list[int], state: State) -> None:
        """Take note of an update that replicas have shared: its samples, and the state after it."""
        self._before, self._state, self._ahead, self.ids = self._state, state, None, ids

    def state_dict(self) -> State:
        """Return where the run stands after the last update that was handed out, as JSON, for any number of ranks."""
        return self._state

    def load_state_dict(self, state: State) -> None:
        """Resume where ``state`` was taken. Raises `PlanError` where it is of other data or another seed."""
        self._source.check(state)
        self._state, self._ahead = state, None

    def _read(self) -> Delivery | Exception | None:
        """Return the update to be handed out next, or the error in its place; None at the end of the run."""
        if self._next is None:
            try:
                delivery = next(self._rest, None)
                self._next = None if delivery is None else replace(delivery, samples=self._changed(delivery))
            except Exception as error:
                self._next = error
        return self._next

    def _changed(self, delivery: Delivery) -> Sequence[Any]:
        batch, change, add_key = delivery.samples, self.change, self.add_key
        places = range(len(batch))
        if change is not None:
            batch = mapped(batch, places, lambda sample, _: change(sample))
        if add_key is not None:
            ids, update = delivery.ids, delivery.state["updates"]
            batch = mapped(batch, places, lambda sample, place: add_key(sample, update, ids[place]))
        return batch

    @property
    def max_workers(self) -> int:
        """The most processes that can read."""
        return self._source.max_workers

    def _deliveries(self) -> Iterator[Delivery]:
        num_workers = min(self._config.data.num_workers, self.max_workers)
        if num_workers:
            self._ahead = None
            return map(received, from_workers(self._source.loader(self._state, num_workers), self._config))
        first, later = self._ahead or (None, self._source.deliveries(self._state))
        return chain([] if first is None else [first], map(received, later))


class Shares(Dataset[Delivery]):
    """Deliveries of samples that can be had by number; `UpdateSampler` says which."""

    max_workers = 1024

    def __init__(self, data: Data, config: Config, sampler: UpdateSampler, num_updates: int) -> None:
        self._samples = cast(View, data.train)
        self._num_updates, self._seed, self._sampler = num_updates, config.run.seed, sampler
        self._is_own, self._is_told = config.data.function is not None, data.is_told
        self._look_ahead, self._config = config.data.look_ahead, config
        # Form of the user's first sample.
        self._form: Form | None = None

    def deal_by(self, dealing: Dealing, ahead: Ahead | None) -> Ahead | None:
        """Deal by what was measured from here on; return None, to read again what was read ahead."""
        tokens = limits_of(self._config, dealing).get("max_microbatch_tokens")
        self._sampler.deal_by(cost=dealing.cost, max_microbatch_tokens=tokens, speeds=dealing.speeds)
        return None

    def start(self) -> State:
        """Return the state before the first update."""
        return self._sampler.state_dict()

    def check(self, state: State) -> None:
        copy(self._sampler).load_state_dict(state)

    def deliveries(self, state: State) -> Iterator[Delivery]:
        """Yield every update after ``state``, read in this process."""
        return map(self.__getitem__ if self._look_ahead is None else self._deferred, self._shares(state))

    def loader(self, state: State, num_workers: int) -> "DataLoader[Delivery]":
        """Return every update after ``state``, read by others."""
        return DataLoader(self, sampler=cast(Any, self._shares(state)), **options(num_workers))

    def name(self, id: int | str) -> str:
        return self._samples.name(cast(int, id))

    def _shares(self, state: State) -> Iterator[Share]:
        """Yield the sample ids of every update after ``state``."""
        sampler = copy(self._sampler)
        sampler.load_state_dict(state)
        number = state["updates"]
        while number < self._num_updates:
            for ids in sampler:
                number += 1
                yield ids, sampler.state_dict(updates=number)
                if number == self._num_updates:
                    return

    def __getitem__(self, index: Share) -> Delivery:
        ids, state = index
        try:
            samples = [self._read(number, state["updates"]) for number in ids]
            return Delivery(samples, state, stated_lengths=self._lengths(ids) if self._is_told else None, ids=ids)
        except MegabatchError as error:
            return Delivery([], state, str(error))

    def _deferred(self, share: Share) -> Delivery:
        """Return an update whose samples are read when their microbatch comes."""
        ids, state = share

        def load(index: int) -> Any:
            return with_tensors(self._read(ids[index], state["updates"]))

        look_ahead = self._look_ahead or 0
        samples = Deferred(load, self._lengths(ids), look_ahead=look_ahead, measured=not self._is_own)
        return Delivery(samples, state, ids=ids)

    def _lengths(self, ids: list[int]) -> list[int]:
        return self._samples.lengths[ids].tolist()

    def _read(self, number: int, update: int) -> Any:
        """Return a sample; one that draws random numbers draws the same ones whichever process reads it."""
        if not self._is_own:
            return self._samples.at(number)
        with drawing(self._seed, update, number):
            sample = self._samples.at(number)
        self._form = check_form(sample, self._form)
        return sample


class Streamed(IterableDataset[Delivery]):
    """Deliveries of a stream, which is read from one end to the other, so by one process."""

    max_workers = 1

    def __init__(self, stream: Stream, ranks: Ranks, num_updates: int | None) -> None:
        self._stream, self._ranks, self._num_updates = stream, ranks, num_updates
        self._state = self.start()
        self._dealing = UNMEASURED
        # The update that was read last.
        self._latest: StreamUpdate | None = None

    def deal_by(self, dealing: Dealing, ahead: Ahead | None) -> Ahead | None:
        """Deal by what was measured from here on; return what was read ahead, dealt anew: reading it takes long."""
        self._dealing = dealing
        if ahead is None or self._latest is None:
            return None
        first, later = ahead
        return received(self._delivery(self._latest, first.state)), later

    def start(self) -> State:
        return {"updates": 0, **self._stream.start().to_json(), "skipped": asdict(Skipped()), "seen": list(Consumed())}

    def check(self, state: State) -> None:
        if len(state["offsets"]) != len(self._stream):
            raise PlanError(
                f"the stream's state is of {len(state['offsets'])} sources but data has {len(self._stream)}; give the "
                "same data"
            )

    def deliveries(self, state: State) -> Iterator[Delivery]:
        num_left = None if self._num_updates is None else max(0, self._num_updates - state["updates"])
        number, after = state["updates"], state
        try:
            for update in islice(self._stream.updates(StreamPosition.from_json(state), seen_of(state)), num_left):
                number += 1
                counts = {"skipped": asdict(update.skipped), "seen": list(update.seen)}
                after = {"updates": number, **update.after.to_json(), **counts}
                self._latest = update
                yield self._delivery(update, after)
        except MegabatchError as error:
            yield Delivery([], after, str(error))

    def loader(self, state: State, num_workers: int) -> "DataLoader[Delivery]":
        self._state, self._latest = state, None
        return DataLoader(self, **options(num_workers))

    def __iter__(self) -> Iterator[Delivery]:
        return self.deliveries(self._state)

    def name(self, id: int | str) -> str:
        return str(id)

    def _delivery(self, update: StreamUpdate, after: State) -> Delivery:
        settings = self._stream.config.update
        local_samples = update.share(
            self._ranks.dp_rank, self._ranks.dp_degree, limits_of(self._stream.config, self._dealing),
            same_bits=bool(settings.same_bits), cost=self._dealing.cost, speeds=self._dealing.speeds,
        )  # fmt: skip
        return Delivery([sample for _, sample in local_samples], after, ids=[name for name, _ in local_samples])


def seen_of(state: State) -> Consumed:
    """Return what was handed out before a state; where no size asks for it, the updates alone."""
    return Consumed(*state.get("seen", (state["updates"],)))


def limits_of(config: Config, dealing: Dealing = UNMEASURED) -> dict[str, Any]:
    """Return the limit of a microbatch by which updates are grouped before they are dealt. Empty: samples are dealt.

    Samples that lie in one row have no padding. A pipeline pads the same lengths on all data ranks to one shape, so
    each of them needs samples of all lengths. An "auto" limit is known once it was measured. A sample that is cut is
    longer than the limit.
    """
    update = config.update
    if update.one_row or update.long_samples is not None or config.parallel.pp > 1:
        return {}
    if update.micro_batch_size is not None:
        return {"micro_batch_size": update.micro_batch_size}
    tokens = update.max_microbatch_tokens
    if not isinstance(tokens, int):
        tokens = dealing.max_microbatch_tokens
    return {} if tokens is None else {"max_microbatch_tokens": tokens}


def sampler_of(data: Data, config: Config, ranks: Ranks, kind: type[Sampler] = UpdateSampler) -> Sampler:
    """Return what deals the samples that can be had by number."""
    size, limits = config.update.global_batch_size, limits_of(config)
    return kind(
        cast(View, data.train).lengths.tolist(),
        same_bits=bool(config.update.same_bits),
        **limits,
        global_batch_size=size if isinstance(size, int) else sizes_of(config.update),
        seed=config.run.seed,
        dp_rank=ranks.dp_rank,
        dp_degree=ranks.dp_degree,
        tail=config.update.tail,
        order=data.order,  # pyright: ignore[reportArgumentType]  # an array of ids is a sequence of them
    )


def options(num_workers: int) -> dict[str, Any]:
    """Return those of a DataLoader whose items are whole updates.

    Its generator keeps the process's own random numbers as they are. Memory is not pinned: samples are padded into new
    tensors before they go to a device.
    """
    return {
        "batch_size": None,
        "num_workers": num_workers,
        "collate_fn": sent,
        "generator": torch.Generator(),
        "worker_init_fn": begin_worker,
    }


def begin_worker(number: int) -> None:
    """Keep a forked tokenizer from warning that it starts no threads, and signals for the process that trains."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    ignore_signals_in_worker()
    end_with_parent()


def from_workers(loader: "DataLoader[Delivery]", config: Config) -> Iterator[Delivery]:
    """Yield what a loader's processes send. Raises `MegabatchError`, here and nowhere else, where one is lost."""
    before = signal.getsignal(signal.SIGCHLD)
    deliveries = iter(loader)
    if before is not None:
        # torch's own handler would raise in the midst of whatever the trainer does.
        signal.signal(signal.SIGCHLD, before)
    try:
        yield from deliveries
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise MegabatchError(
            f"a process that loads samples has ended ({str(error).splitlines()[0]}), perhaps for want of memory; "
            f"data.num_workers is {config.data.num_workers}: lower it, or set it to 0 to see why"
        ) from None


def sent(delivery: Delivery) -> Delivery:
    """Return it with arrays in place of tensors, which would take a file descriptor each on their way."""

    def as_array(value: Any) -> Any:
        return value.detach().numpy() if isinstance(value, Tensor) and value.dtype != torch.bfloat16 else value

    return replace(delivery, samples=[with_values(sample, as_array) for sample in delivery.samples])


def received(delivery: Delivery) -> Delivery:
    """Return it with tensors in place of arrays. Raises `MegabatchError` where there is a problem instead."""
    if delivery.problem is not None:
        raise MegabatchError(delivery.problem)
    if isinstance(delivery.samples, Deferred):
        return delivery
    samples: Sequence[Any] = [with_tensors(sample) for sample in delivery.samples]
    if delivery.stated_lengths is not None:
        samples = Deferred(samples.__getitem__, delivery.stated_lengths, look_ahead=0, measured=False)
    return replace(delivery, samples=samples)


def with_tensors(sample: Any) -> Any:
    return with_values(sample, as_tensor)


def with_values(sample: Any, change: Callable[[Any], Any]) -> Any:
    return {key: change(value) for key, value in sample.items()} if isinstance(sample, Mapping) else sample


def as_tensor(value: Any) -> Any:
    """Return an array of numbers as a tensor, on its own memory where it may not be written to or runs backwards."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        return value
    is_plain = value.flags.writeable and all(stride >= 0 for stride in value.strides)
    return torch.from_numpy(value if is_plain else value.copy())


def part_of(batch: Sequence[Any], places: Sequence[int]) -> Sequence[Any]:
    return mapped(batch, places, lambda sample, _: sample)


def mapped(batch: Sequence[Any], places: Sequence[int], change: Callable[[Any, int], Any]) -> Sequence[Any]:
    """Return some samples of an update, each changed, by its place too; those that are loaded later, then."""
    if not isinstance(batch, Deferred):
        return [change(batch[place], place) for place in places]
    return Deferred(
        lambda index: change(batch[places[index]], places[index]),
        [batch.lengths[place] for place in places],
        None if batch.weights is None else [batch.weights[place] for place in places],
        look_ahead=batch.look_ahead,
        measured=batch.measured,
        kept_bytes=batch.kept_bytes,
    )


@dataclass(frozen=True)
class NumUpdates:
    """Numbers of updates."""

    of_data: int | None  # that run.max_epochs passes over the data make; None: a stream does not know
    of_run: int | None  # that this run makes: fewer with run.max_steps; None: until the stream ends
    ends: np.ndarray | None = field(default=None, compare=False)  # [of_data] samples of it and all before; if scheduled

    def work(self, step: int) -> int:
        """Return what so many updates take, in samples where they have more and more of them."""
        return step if self.ends is None or not step else int(self.ends[min(step, len(self.ends)) - 1])


def count_updates(config: Config, num_samples: int | None, sampler: UpdateSampler | None = None) -> NumUpdates:
    """Return the updates of the whole run, from its first one on.

    Args:
        config: Says how large updates are, and how long the run lasts.
        num_samples: Of an epoch; None: a stream.
        sampler: At its beginning; asked where updates have more and more samples.
    """
    size, epochs, max_steps = config.update.global_batch_size, config.run.max_epochs, config.run.max_steps
    if num_samples is None:
        return NumUpdates(None, max_steps)
    if not isinstance(size, int):
        assert sampler is not None
        ends = np.cumsum(np.fromiter(sampler.sizes(epochs), np.int64))
        return NumUpdates(len(ends), min(len(ends), max_steps or len(ends)), ends)
    match config.update.tail:
        case "step":
            of_data = epochs * -(-num_samples // size)
        case "drop":
            of_data = epochs * (num_samples // size)
        case "carry":
            of_data = epochs * num_samples // size
    return NumUpdates(of_data, min(of_data, max_steps or of_data))


def check_points(config: Config, data: Data) -> None:
    """Raise `MegabatchError` for a schedule of update.global_batch_size that this data cannot follow."""
    sizes = sizes_of(config.update)
    if sizes.unit == "tokens" and not data.counts_tokens:
        raise MegabatchError(
            "update.global_batch_size has points in tokens, and the samples of data.function have no input_ids; give "
            "its points in samples or updates"
        )
    if config.update.tail == "drop" and data.epoch_size is not None and sizes.largest > data.epoch_size:
        if len(sizes.sizes) == 1:
            raise MegabatchError(no_update(config))
        raise MegabatchError(
            f"update.global_batch_size goes to {sizes.largest} samples, an epoch has {data.epoch_size}, and "
            'update.tail="drop" would leave no update of them; make it smaller, or set update.tail="step"'
        )


def no_update(config: Config) -> str:
    """Return why a run would be over before it began."""
    return (
        f"run.max_epochs={config.run.max_epochs} passes over the data make no update of update.global_batch_size="
        f'{config.update.global_batch_size} with update.tail="{config.update.tail}"; '
        'make it smaller, raise run.max_epochs, or set update.tail="step"'
    )
