"""Samples by their number: some of them, several sources as one, documents packed into rows, and a mixture's order.

Without weights every sample is seen once an epoch. With them an epoch has as many samples of each source as its weight
says, and what it leaves out comes in the next. `datasets.interleave_datasets` cannot do that: it draws anew in every
epoch, so that some samples of a source are seen twice before others are seen at all.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megabatch.batching import IGNORED_LABEL
from megabatch.planning import best_fit

# Uses of a random number. Those of a stream have 2 and 3.
ORDER, SPLIT = 1, 4


class View(Sequence[Any], ABC):
    """Samples by their number, made when they are asked for, with the tokens of each known beforehand."""

    lengths: np.ndarray  # [N] int64
    fingerprint: str

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        places = range(len(self))[index]
        return self.at(places) if isinstance(places, int) else [self.at(place) for place in places]

    @abstractmethod
    def at(self, index: int) -> Any:
        """Return the sample of that number."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return where it comes from, for messages."""


class Joined(View):
    """Sources one after another, as if they were one."""

    def __init__(self, sources: Sequence[View]) -> None:
        self._sources = list(sources)
        self._ends: list[int] = np.cumsum([len(source) for source in self._sources]).tolist()
        self.lengths = np.concatenate([source.lengths for source in self._sources])  # [N]
        self.fingerprint = "+".join(source.fingerprint for source in self._sources)

    def at(self, index: int) -> Any:
        source, local = self._find(index)
        return source.at(local)

    def name(self, index: int) -> str:
        source, local = self._find(index)
        return source.name(local)

    def _find(self, index: int) -> tuple[View, int]:
        number = bisect_right(self._ends, index)
        source = self._sources[number]
        return source, index - self._ends[number] + len(source)


class Subset(View):
    """Some of the samples, by their numbers."""

    def __init__(self, samples: View, ids: np.ndarray) -> None:
        self._samples, self._ids = samples, ids
        self.lengths = samples.lengths[ids]  # [N]
        self.fingerprint = samples.fingerprint

    def at(self, index: int) -> Any:
        return self._samples.at(int(self._ids[index]))

    def name(self, index: int) -> str:
        return self._samples.name(int(self._ids[index]))


class PackedSamples(View):
    """Rows of documents, as few as best fit finds; a row is put together when it is asked for.

    A document that fits into a row is never split; a longer one is cut first. In a row, positions begin anew with each
    document and its first token is no target, so that nothing is learned across a border. ``together=False``: a piece
    a row.
    """

    def __init__(self, documents: View, row_tokens: int, *, together: bool = True) -> None:
        self._documents = documents
        self.row_tokens = row_tokens
        self.num_documents = len(documents)
        self._places = cut(documents.lengths, row_tokens)  # [pieces] each: document, start in it, length
        lengths = self._places[2].tolist()
        rows = best_fit(lengths, row_tokens) if together else [[piece] for piece in range(len(lengths))]
        self._pieces = np.fromiter((piece for row in rows for piece in row), np.int64, len(lengths))
        self._ends = np.cumsum([len(row) for row in rows], dtype=np.int64)  # [rows], into pieces
        self.lengths = np.array([sum(lengths[piece] for piece in row) for row in rows], dtype=np.int64)  # [rows]
        self.fingerprint = f"{documents.fingerprint} in rows of {row_tokens}"
        self.fill = float(self.lengths.sum()) / max(1, len(rows) * row_tokens)
        self.num_cut = int((documents.lengths > row_tokens).sum())

    def at(self, index: int) -> dict[str, Tensor]:
        pieces = ((int(place[piece]) for place in self._places) for piece in self._row(index))
        return row_of([piece_of(self._documents.at(document), start, length) for document, start, length in pieces])

    def name(self, index: int) -> str:
        row = self._row(index)
        first = self._documents.name(int(self._places[0][row[0]]))
        return first if len(row) == 1 else f"{first} and {len(row) - 1} more"

    def _row(self, index: int) -> np.ndarray:
        return self._pieces[self._ends[index - 1] if index else 0 : self._ends[index]]


def pack_samples(samples: Sequence[Any], row_tokens: int) -> list[dict[str, Tensor]]:
    document, start, length = cut(np.array([len(sample["input_ids"]) for sample in samples]), row_tokens)
    pieces = [
        piece_of(samples[index], begin, size)
        for index, begin, size in zip(document.tolist(), start.tolist(), length.tolist(), strict=True)
    ]
    return [row_of([pieces[piece] for piece in row]) for row in best_fit(length.tolist(), row_tokens)]


def cut(lengths: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return pieces of at most ``row_tokens``: the document of each, where it starts in it, its length; [pieces]."""
    num_pieces = -(-lengths // row_tokens)  # [documents]
    document = np.repeat(np.arange(len(lengths)), num_pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = number * row_tokens
    return document, start, np.minimum(row_tokens, lengths[document] - start)


def piece_of(sample: dict[str, Tensor], start: int, length: int) -> dict[str, Tensor]:
    """Return some of a document's tokens, as a sample of its own; nothing predicts the first of them."""
    labels = sample["labels"][start : start + length].clone()  # [T]
    labels[:1] = IGNORED_LABEL
    return {
        "input_ids": sample["input_ids"][start : start + length],
        "labels": labels,
        "position_ids": torch.arange(length),
    }


def row_of(pieces: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return pieces one after another, as one sample."""
    return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}


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
        """Return what the epoch takes of a source: of one pass, or of the end of one and the beginning of the next."""
        size, count = self.sizes[source], self.counts[source]
        start, stop = epoch * count, (epoch + 1) * count
        passes = [
            np.random.default_rng([self.seed, number, source + 1, ORDER]).permutation(size)
            for number in range(start // size, (stop - 1) // size + 1)
        ]
        first = start // size * size
        return np.concatenate(passes)[start - first : stop - first]


def counts_of(sizes: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the samples of each source in an epoch: in proportion to the weights, at least one, at most all.

    The source that is used up first is seen once an epoch.
    """
    # As they were written: 0.1 is a tenth.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = min(Fraction(size) / weight for size, weight in zip(sizes, exact, strict=True))
    return tuple(max(1, round(scale * weight)) for weight in exact)


def split_off(sizes: Sequence[int], num_samples: int, seed: int) -> list[np.ndarray]:
    """Return numbers of ``num_samples`` samples, as the seed picks them, in each source; at most a tenth of each."""
    if not num_samples:
        return [np.zeros(0, dtype=np.int64) for _ in sizes]
    starts = np.cumsum([0, *sizes])
    drawn = np.random.default_rng([seed, 0, 0, SPLIT]).permutation(sum(sizes))
    owners = np.searchsorted(starts[1:], drawn, side="right")
    turns = np.concatenate([np.flatnonzero(owners == source)[: size // 10] for source, size in enumerate(sizes)])
    picked = np.sort(drawn[np.sort(turns)[:num_samples]])
    parts = np.split(picked, np.searchsorted(picked, starts[1:-1]))
    return [ids - start for ids, start in zip(parts, starts, strict=False)]
