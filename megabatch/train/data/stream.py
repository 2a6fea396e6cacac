"""Stream: samples that are read while training, a window of them shuffled at a time.

Every rank reads the whole stream and keeps its share of each update, so that the updates are the same whatever the
number of ranks. A stream resumes from the beginning of a window: what lies before it is read again and passed over.
`docs/decisions/0041-who-reads-ahead.md` says why this is not the shuffle of `datasets`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np

from megabatch import CostModel, UpdateSampler
from megabatch.errors import MegabatchError
from megabatch.planning import Consumed
from megabatch.train.config import Config, SourceConfig
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.encode import Named, Skipped, samples_of
from megabatch.train.data.samples import pack_samples

# Uses of a random number. `Mixture` has others.
DRAW, SHUFFLE = 2, 3


def check_fit(name: str, length_tokens: int, config: Config, positions: int | None = None) -> None:
    """Raise `MegabatchError` where a sample fits into no microbatch, or not into the model's ``positions``."""
    check_positions(f"the sample {name}", length_tokens, positions)
    cap, row_tokens = config.update.max_microbatch_tokens, config.data.pack_tokens
    if isinstance(cap, int) and length_tokens > cap and config.update.long_samples is None:
        change = "leave such samples out with data.max_sample_tokens"
        raise MegabatchError(
            f"the sample {name} has {length_tokens} tokens, more than update.max_microbatch_tokens={cap}; raise it to "
            f"{length_tokens} or {change if row_tokens is None else 'lower data.pack_tokens'}"
        )


def check_positions(sample: str, length_tokens: int, positions: int | None) -> None:
    if positions is not None and length_tokens > positions:
        raise MegabatchError(
            f"{sample} has {length_tokens} tokens and the model {positions} positions; raise the positions in "
            "model.config (max_position_embeddings or n_positions), or leave such samples out with "
            "data.max_sample_tokens"
        )


@dataclass(frozen=True)
class StreamPosition:
    """A position in a stream, from which a run resumes."""

    offsets: tuple[int, ...]  # samples read of each source before the window, in its present pass
    epoch: int = 0
    window: int = 0  # of the epoch
    consumed: int = 0  # samples of the window
    source: int | None = None  # one after another: whose turn it is; by weights: whose end is an epoch's, once known

    def to_json(self) -> dict[str, Any]:
        """Return the state of which `from_json` makes this position."""
        return {**asdict(self), "offsets": list(self.offsets)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "StreamPosition":
        """Return the position of a state, which may hold more."""
        return cls(tuple(state["offsets"]), *(state[key] for key in ("epoch", "window", "consumed", "source")))


@dataclass(frozen=True)
class StreamUpdate:
    """The samples of an update over all ranks."""

    samples: list[Named]
    after: StreamPosition
    seen: Consumed  # with it
    skipped: Skipped  # so far, in the present passes over the sources

    def share(
        self, rank: int, num_ranks: int, limits: Mapping[str, int] = MappingProxyType({}), *, same_bits: bool = False,
        cost: CostModel | None = None, speeds: Sequence[float] | None = None,
    ) -> list[Named]:  # fmt: skip
        lengths = [len(sample["input_ids"]) for _, sample in self.samples]
        group_limits: dict[str, Any] = dict(limits)
        # A stream may come to a sample that is longer than those measured.
        if "max_microbatch_tokens" in limits:
            group_limits["max_microbatch_tokens"] = max(limits["max_microbatch_tokens"], *lengths)
        sampler = UpdateSampler(
            lengths, global_batch_size=len(lengths), dp_rank=rank, dp_degree=num_ranks, same_bits=same_bits, cost=cost,
            speeds=speeds if limits else None, **group_limits,
        )  # fmt: skip
        return [self.samples[index] for index in sampler.share(range(len(lengths)))]


class Stream:
    """One source, or several: one after another, or drawn by weight.

    By weight, an epoch ends where the source that is the first to be used up ends; the others go on in the next.
    """

    def __init__(
        self, sources: dict[str, SourceConfig], config: Config, tokenizer: Any, positions: int | None = None
    ) -> None:
        self.config, self.positions = config, positions
        self._sources, self._tokenizer = list(sources.items()), tokenizer
        weights = [source.weight or 1.0 for source in sources.values()]
        self._shares = np.array(weights) / sum(weights)  # [sources]
        self._is_drawn = any(source.weight is not None for source in sources.values())
        ends = np.round(config.eval.num_samples * np.cumsum([0.0, *self._shares]))
        self._num_held_out: list[int] = np.diff(ends).astype(int).tolist()

    def __len__(self) -> int:
        """Return the number of sources."""
        return len(self._sources)

    def start(self) -> StreamPosition:
        """Return its beginning."""
        return StreamPosition((0,) * len(self), source=None if self._is_drawn else 0)

    def held_out(self) -> list[Named]:
        """Return the first samples of each source. Raises `MegabatchError` where no more follow to be trained on."""
        window: list[Named] = []
        for source, num_held_out in enumerate(self._num_held_out):
            first = list(islice(self._read(source, Skipped()), num_held_out + 1))
            if len(first) <= num_held_out:
                raise MegabatchError(
                    f"{self._sources[source][0]}: the stream ends after {len(first)} samples, of which the first "
                    f"{num_held_out} are held out; give more, or lower eval.num_samples"
                )
            window += first[:-1]
        return [piece for named in window for piece in pack([named], self.config.data.pack_tokens)]

    def updates(self, position: StreamPosition, consumed: Consumed) -> Iterator[StreamUpdate]:
        """Yield every update from a position on. ``consumed`` is what was handed out before."""
        sizes, tail = sizes_of(self.config.update), self.config.update.tail
        size, samples = sizes(consumed), list[Named]()
        for start, window, after, skipped in self._windows(position):
            for number in range(start.consumed, len(window)):
                samples.append(window[number])
                if len(samples) == size:
                    consumed = with_samples(consumed, samples)
                    is_last = number + 1 == len(window)
                    next_start = after if is_last else replace(start, consumed=number + 1)
                    yield StreamUpdate(samples, next_start, consumed, skipped)
                    samples, size = [], sizes(consumed)
            if after.epoch > start.epoch and tail != "carry":
                if samples and tail == "step":
                    consumed = with_samples(consumed, samples)
                    yield StreamUpdate(samples, after, consumed, skipped)
                samples, size = [], sizes(consumed)

    def _windows(
        self, position: StreamPosition
    ) -> Iterator[tuple[StreamPosition, list[Named], StreamPosition, Skipped]]:
        """Yield every window up to the end of the last epoch: its position, its samples, the next one's position."""
        passes, config = Passes(self, position.offsets), self.config
        while position.epoch < config.run.max_epochs:
            read = self._by_weight if self._is_drawn else self._in_turn
            named, source, is_end = read(passes, position)
            rows = pack(named, config.data.pack_tokens)
            for name, row in rows:
                check_fit(name, len(row["input_ids"]), config, self.positions)
            shuffled = [rows[index] for index in self._random(position, SHUFFLE).permutation(len(rows))]
            epoch, window = (position.epoch + 1, 0) if is_end else (position.epoch, position.window + 1)
            after = StreamPosition(tuple(passes.offsets), epoch, window, 0, source)
            yield position, shuffled, after, passes.skipped()
            position = after

    def _in_turn(self, passes: "Passes", position: StreamPosition) -> tuple[list[Named], int, bool]:
        """Return the next samples, the source of the last one, and whether the last source has ended."""
        named: list[Named] = []
        for source in range(position.source or 0, len(self)):
            while (sample := passes.next(source)) is not None:
                named.append(sample)
                if len(named) == self.config.data.shuffle_window:
                    return named, source, False
        return named, 0, True

    def _by_weight(self, passes: "Passes", position: StreamPosition) -> tuple[list[Named], int | None, bool]:
        """Return the next samples, the source whose end is the epoch's, if known, and whether it has ended."""
        named, ending = list[Named](), position.source
        window = self.config.data.shuffle_window
        for source in self._random(position, DRAW).choice(len(self), size=window, p=self._shares).tolist():
            sample = passes.next(source)
            if sample is None and ending in (None, source):
                return named, source, True
            sample = sample or passes.next(source)
            if sample is None:
                raise MegabatchError(f"{self._sources[source][0]}: the stream has no sample any more; mend it")
            named.append(sample)
        return named, ending, False

    def _random(self, position: StreamPosition, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.config.run.seed, position.epoch, position.window, purpose])

    def _read(self, source: int, skipped: Skipped) -> Iterator[Named]:
        """Return the samples of a source from the first on, those held out too."""
        key, config = self._sources[source]
        return samples_of(config, key, self.config.data, self._tokenizer, skipped)

    def read_from(self, source: int, offset: int, skipped: Skipped) -> Iterator[Named]:
        """Return the samples of a source that are trained on, without the first ``offset`` of them."""
        return islice(self._read(source, skipped), self._num_held_out[source] + offset, None)


class Passes:
    """The present pass over each source, and how far it has come."""

    def __init__(self, stream: Stream, offsets: Sequence[int]) -> None:
        self._stream, self.offsets = stream, list(offsets)
        self._open: dict[int, Iterator[Named]] = {}
        self._skipped = [Skipped() for _ in offsets]

    def next(self, source: int) -> Named | None:
        """Return the next sample of a source; None at its end, after which it begins anew."""
        if source not in self._open:
            self._skipped[source] = Skipped()
            self._open[source] = self._stream.read_from(source, self.offsets[source], self._skipped[source])
        sample = next(self._open[source], None)
        self.offsets[source] += 1
        if sample is None:
            del self._open[source]
            self.offsets[source] = 0
        return sample

    def skipped(self) -> Skipped:
        """Return what was left out of all of them."""
        broken, long = (sum(getattr(skipped, key) for skipped in self._skipped) for key in ("broken", "long"))
        first = next((skipped.first for skipped in self._skipped if skipped.first is not None), None)
        return Skipped(broken, long, first)


def pack(named: Sequence[Named], row_tokens: int | None) -> list[Named]:
    """Return the samples in rows of so many tokens, where they are to be packed."""
    if row_tokens is None or not named:
        return list(named)
    first, rows = named[0][0], pack_samples([sample for _, sample in named], row_tokens)
    if len(named) == 1:
        return [(first if len(rows) == 1 else f"row {number} of {first}", row) for number, row in enumerate(rows, 1)]
    return [(f"row {number} of the documents from {first} on", row) for number, row in enumerate(rows, 1)]


def with_samples(consumed: Consumed, samples: Sequence[Named]) -> Consumed:
    """Return what was handed out, after an update of these."""
    return consumed.after(len(samples), sum(len(sample["input_ids"]) for _, sample in samples))
