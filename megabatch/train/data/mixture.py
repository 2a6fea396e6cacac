"""Mixture: several sources as one, and how often each is seen.

Without weights every sample is seen once an epoch. With them an epoch has as many samples of each source as its weight
says, and what it leaves out comes in the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from megabatch.batching import IGNORED_LABEL
from megabatch.train.data.samples import Sample

ORDER, SPLIT = 1, 4  # what a random number is for; a stream's have 2 and 3


class Measured(Protocol):
    """Samples by their number, with the tokens of each known beforehand."""

    @property
    def lengths(self) -> np.ndarray: ...  # [N] int64
    @property
    def fingerprint(self) -> str: ...
    def name(self, index: int) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...


class Tokenized(Measured, Protocol):
    """Measured samples of text, whose targets are counted."""

    @property
    def num_targets(self) -> int: ...


class View(Sequence[Any], ABC):
    """Samples that are made of others when they are asked for; ``lengths`` says how many there are."""

    lengths: np.ndarray  # [N] int64

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.at(int(index) % len(self))

    @abstractmethod
    def at(self, index: int) -> Any:
        """The sample of that number."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Where it comes from, for messages."""


class Joined(View):
    """Sources one after another, as if they were one."""

    def __init__(self, sources: Sequence[Measured]) -> None:
        self._sources = list(sources)
        self._ends = np.cumsum([len(source) for source in self._sources])
        self.lengths = np.concatenate([source.lengths for source in self._sources])  # [N]
        self.fingerprint = "+".join(source.fingerprint for source in self._sources)

    def at(self, index: int) -> Any:
        source, local = self._find(index)
        return source[local]

    def name(self, index: int) -> str:
        source, local = self._find(index)
        return source.name(local)

    def _find(self, index: int) -> tuple[Measured, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        source = self._sources[number]
        return source, int(index - self._ends[number] + len(source))


class Part(View):
    """Some of the samples, by their numbers."""

    def __init__(self, samples: Measured, ids: np.ndarray) -> None:
        self._samples, self._ids = samples, ids
        self.lengths = samples.lengths[ids]  # [N]
        self.fingerprint = samples.fingerprint

    def at(self, index: int) -> Any:
        return self._samples[int(self._ids[index])]

    def name(self, index: int) -> str:
        return self._samples.name(int(self._ids[index]))


class TokenizedPart(Part):
    """Some of the samples of text."""

    def __init__(self, samples: Tokenized, ids: np.ndarray) -> None:
        super().__init__(samples, ids)
        self._whole = samples

    @property
    def num_targets(self) -> int:
        """Targets of the part, by reading it or what it leaves out, whichever is less."""
        left_out = np.setdiff1d(np.arange(len(self._whole)), self._ids)
        if len(left_out) < len(self._ids):
            return self._whole.num_targets - sum(count_targets(self._whole[int(index)]) for index in left_out)
        return sum(count_targets(sample) for sample in self)


def count_targets(sample: Sample) -> int:
    """Tokens that are learned; no position predicts the first."""
    return int((sample["labels"][1:] != IGNORED_LABEL).sum())


@dataclass(frozen=True)
class Mixture:
    """The order of a weighted mixture's samples in any epoch, as `UpdateSampler` asks for it.

    Each source is an endless stream of shuffled passes over it, of which every epoch takes the next ``counts``; so all
    samples of a source are seen equally often, to within one; an epoch in which a pass ends may have a sample twice. An
    epoch follows from its number and the seed alone.
    """

    sizes: tuple[int, ...]  # samples of each source, which lie one after another
    counts: tuple[int, ...]  # of them in an epoch
    seed: int

    def __call__(self, epoch: int) -> np.ndarray:
        starts = np.cumsum([0, *self.sizes[:-1]])
        picks = [start + self._picks(source, epoch) for source, start in enumerate(starts)]
        return np.random.default_rng([self.seed, epoch, 0, ORDER]).permutation(np.concatenate(picks))

    def _picks(self, source: int, epoch: int) -> np.ndarray:
        """What the epoch takes of a source: of one pass over it, or of the end of one and the beginning of the next."""
        size, count = self.sizes[source], self.counts[source]
        start, stop = epoch * count, (epoch + 1) * count
        passes = [self._pass(source, number) for number in range(start // size, (stop - 1) // size + 1)]
        first = start // size * size
        return np.concatenate(passes)[start - first : stop - first]

    def _pass(self, source: int, number: int) -> np.ndarray:
        return np.random.default_rng([self.seed, number, source + 1, ORDER]).permutation(self.sizes[source])


def counts_of(sizes: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each source in an epoch: in proportion to the weights, at least one, and as many as the sources have.

    The source that is used up first is seen once an epoch.
    """
    exact = [Fraction(str(weight)) for weight in weights]  # as they were written: 0.1 is a tenth
    scale = min(Fraction(size) / weight for size, weight in zip(sizes, exact, strict=True))
    return tuple(max(1, round(scale * weight)) for weight in exact)


def split_off(sizes: Sequence[int], num_samples: int, seed: int) -> list[np.ndarray]:
    """Numbers of ``num_samples`` samples, as the seed picks them, in each source; at most a tenth of any of them."""
    if not num_samples:
        return [np.zeros(0, dtype=np.int64) for _ in sizes]
    starts = np.cumsum([0, *sizes])
    drawn = np.random.default_rng([seed, 0, 0, SPLIT]).permutation(sum(sizes))
    owners = np.searchsorted(starts[1:], drawn, side="right")
    turns = np.concatenate([np.flatnonzero(owners == source)[: size // 10] for source, size in enumerate(sizes)])
    picked = np.sort(drawn[np.sort(turns)[:num_samples]])
    parts = np.split(picked, np.searchsorted(picked, starts[1:-1]))  # by source
    return [ids - start for ids, start in zip(parts, starts, strict=False)]
