"""Stream: samples that are read while training, a window of them shuffled at a time.

Every rank reads the whole stream and keeps its share of each update, so that the updates are the same whatever the
number of ranks. A stream goes on from the beginning of a window: what lies before it is read again and passed over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from megabatch import CostModel
from megabatch.errors import MegabatchError
from megabatch.planning import Consumed, balance
from megabatch.train.config import Config, SourceConfig
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.checks import check_fit
from megabatch.train.data.pack import pack_samples
from megabatch.train.data.samples import Sample, Skipped, samples_of

DRAW, SHUFFLE = 2, 3  # what a random number is for; `Mixture` has others
Named = tuple[str, Sample]


@dataclass(frozen=True)
class Place:
    """Where a stream stands; a run goes on from here."""

    offsets: tuple[int, ...]  # samples read of each source before the window, in its present pass
    epoch: int = 0
    window: int = 0  # of the epoch
    consumed: int = 0  # samples of the window
    source: int | None = None  # one after another: whose turn it is; by weights: whose end is an epoch's, once known

    def to_json(self) -> dict[str, Any]:
        """What `place_of` makes a place of."""
        return {**asdict(self), "offsets": list(self.offsets)}


@dataclass(frozen=True)
class Window:
    """Samples that were read together, shuffled."""

    start: Place
    samples: list[Named]
    after: Place  # where the next window starts
    skipped: Skipped

    @property
    def ends_epoch(self) -> bool:
        """Whether the stream came to its end in it."""
        return self.after.epoch > self.start.epoch


@dataclass(frozen=True)
class StreamSource:
    """One source of a stream."""

    config: SourceConfig
    key: str  # of the recipe, for messages
    num_held_out: int  # its first samples, which are never trained on

    def read(self, stream: "Stream", skipped: Skipped) -> Iterator[Named]:
        """Its samples from the first on, those held out too."""
        data = stream.config.data
        return samples_of(
            self.config,
            self.key,
            stream.tokenizer,
            broken_rows=data.broken_rows,
            max_sample_tokens=data.max_sample_tokens,
            skipped=skipped,
        )


class Stream:
    """One source, or several: one after another, or drawn by weight.

    By weight, an epoch ends where the source that is the first to be used up ends; the others go on in the next.
    """

    def __init__(
        self, sources: dict[str, SourceConfig], config: Config, tokenizer: Any, positions: int | None = None
    ) -> None:
        self.config, self.tokenizer, self.positions = config, tokenizer, positions
        weights = [source.weight or 1.0 for source in sources.values()]
        self.shares = np.array(weights) / sum(weights)  # [sources]
        self.drawn = any(source.weight is not None for source in sources.values())
        held_out = np.diff(np.round(config.eval.num_samples * np.cumsum([0.0, *self.shares]))).astype(int).tolist()
        self.sources = [
            StreamSource(source, key, num_held_out)
            for (key, source), num_held_out in zip(sources.items(), held_out, strict=True)
        ]

    def held_out(self) -> list[Named]:
        """The first samples of each source. Raises `MegabatchError` where no more follow to be trained on."""
        found: list[Named] = []
        for source in self.sources:
            first = list(islice(source.read(self, Skipped()), source.num_held_out + 1))
            if len(first) <= source.num_held_out:
                raise MegabatchError(
                    f"{source.key}: the stream ends after {len(first)} samples, of which the first "
                    f"{source.num_held_out} are held out; give more, or lower eval.num_samples"
                )
            found += first[:-1]
        row_tokens = self.config.data.pack_tokens
        return [piece for named in found for piece in pack([named], row_tokens)]

    def start(self) -> Place:
        """Its beginning."""
        return Place((0,) * len(self.sources), source=None if self.drawn else 0)


class Reader:
    """Reads a stream's windows, from a place on."""

    def __init__(self, stream: Stream, place: Place) -> None:
        self._stream, self._place = stream, place
        self._offsets, self._source = list(place.offsets), place.source
        self._passes: dict[int, Iterator[Named]] = {}  # those that are open
        self._skipped = [Skipped() for _ in stream.sources]  # in the present pass over each
        self._size = stream.config.data.shuffle_window

    def windows(self) -> Iterator[Window]:
        """Every window up to the end of the last epoch."""
        config = self._stream.config
        while self._place.epoch < config.run.max_epochs:
            start = self._place
            named, ended = self._read_by_weight() if self._stream.drawn else self._read_in_turn()
            rows = pack(named, config.data.pack_tokens)
            for name, row in rows:
                check_fit(name, len(row["input_ids"]), config, self._stream.positions)
            order = self._random(SHUFFLE).permutation(len(rows))
            epoch, window = (start.epoch + 1, 0) if ended else (start.epoch, start.window + 1)
            self._place = Place(tuple(self._offsets), epoch, window, 0, self._source)
            yield Window(start, [rows[index] for index in order], self._place, self._all_skipped())

    def _read_in_turn(self) -> tuple[list[Named], bool]:
        """The next samples, and whether the last source has ended."""
        named: list[Named] = []
        for source in range(self._source or 0, len(self._stream.sources)):
            self._source = source
            while len(named) < self._size:
                if (found := self._next(source)) is None:
                    break
                named.append(found)
            else:
                return named, False
        self._source = 0
        return named, True

    def _read_by_weight(self) -> tuple[list[Named], bool]:
        """The next samples, and whether the source whose end is the epoch's has ended."""
        named: list[Named] = []
        shares = self._stream.shares
        for source in self._random(DRAW).choice(len(shares), size=self._size, p=shares).tolist():
            found = self._next(source)
            if found is None and self._source in (None, source):
                self._source = source
                return named, True
            found = found or self._next(source)  # from its beginning
            if found is None:
                raise MegabatchError(f"{self._stream.sources[source].key}: the stream has no sample any more; mend it")
            named.append(found)
        return named, False

    def _next(self, source: int) -> Named | None:
        """The next sample of a source; None at its end, after which it begins anew."""
        if source not in self._passes:
            before = self._stream.sources[source].num_held_out + self._offsets[source]
            self._skipped[source] = Skipped()
            named = self._stream.sources[source].read(self._stream, self._skipped[source])
            self._passes[source] = islice(named, before, None)
        found = next(self._passes[source], None)
        self._offsets[source] += 1
        if found is None:
            del self._passes[source]
            self._offsets[source] = 0
        return found

    def _all_skipped(self) -> Skipped:
        firsts = (skipped.first for skipped in self._skipped if skipped.first is not None)
        broken, long = (sum(getattr(skipped, key) for skipped in self._skipped) for key in ("broken", "long"))
        return Skipped(broken, long, next(firsts, None))

    def _random(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._stream.config.run.seed, self._place.epoch, self._place.window, purpose])


def pack(named: Sequence[Named], row_tokens: int | None) -> list[Named]:
    """The samples in rows of so many tokens, where they are to be packed."""
    if row_tokens is None or not named:
        return list(named)
    first, rows = named[0][0], pack_samples([sample for _, sample in named], row_tokens)
    if len(named) == 1:
        return [(first if len(rows) == 1 else f"row {number} of {first}", row) for number, row in enumerate(rows, 1)]
    return [(f"row {number} of the documents from {first} on", row) for number, row in enumerate(rows, 1)]


@dataclass(frozen=True)
class StreamUpdate:
    """The samples of an update over all ranks."""

    samples: list[Named]
    after: Place
    seen: Consumed  # with it
    skipped: Skipped  # so far, in the present passes over the sources


def updates_of(stream: Stream, place: Place, seen: Consumed) -> Iterator[StreamUpdate]:
    """Every update from a place on, before which so much was handed out."""
    sizes, tail = sizes_of(stream.config.update), stream.config.update.tail
    size = sizes(seen)
    samples: list[Named] = []
    for window in Reader(stream, place).windows():
        for number in range(window.start.consumed, len(window.samples)):
            samples.append(window.samples[number])
            if len(samples) == size:
                at_end = number + 1 == len(window.samples)
                after = window.after if at_end else replace(window.start, consumed=number + 1)
                seen = with_samples(seen, samples)
                yield StreamUpdate(samples, after, seen, window.skipped)
                samples, size = [], sizes(seen)
        if window.ends_epoch and tail != "carry":
            if samples and tail == "step":
                seen = with_samples(seen, samples)
                yield StreamUpdate(samples, window.after, seen, window.skipped)
            samples, size = [], sizes(seen)


def with_samples(seen: Consumed, samples: Sequence[Named]) -> Consumed:
    """What was handed out, after an update of these."""
    return seen.after(len(samples), sum(len(sample["input_ids"]) for _, sample in samples))


def share_of(update: Sequence[Named], rank: int, num_ranks: int, cost: CostModel | None = None) -> list[Named]:
    """A rank's part of an update, as `UpdateSampler` shares it."""
    price = float if cost is None else cost.sample_seconds
    mine = balance([price(len(sample["input_ids"])) for _, sample in update], num_ranks)[rank]
    return [update[index] for index in mine]


def place_of(state: dict[str, Any]) -> Place:
    """The place of a state, which has been JSON."""
    return Place(tuple(state["offsets"]), *(state[key] for key in ("epoch", "window", "consumed", "source")))
