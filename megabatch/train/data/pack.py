"""Pack: documents into rows of so many tokens, as few as best fit finds.

A document that fits into a row is never split; a longer one is cut first. In a row, positions begin anew with each
document and its first token is no target, so that nothing is learned across a border. Whether attention keeps to the
borders is the model's matter. The answer to a prompt keeps its labels, so pairs and chats can be packed too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megabatch.batching import IGNORED_LABEL
from megabatch.planning import best_fit
from megabatch.train.data.mixture import Measured, View
from megabatch.train.data.samples import Sample


def cut(lengths: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pieces of at most ``row_tokens``: the document of each, where it starts in it, its length."""
    num_pieces = -(-lengths // row_tokens)  # [documents]
    document = np.repeat(np.arange(len(lengths)), num_pieces)  # [pieces]
    number = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = number * row_tokens
    return document, start, np.minimum(row_tokens, lengths[document] - start)


def piece_of(sample: Sample, start: int, length: int) -> Sample:
    """Some of a document's tokens, as a sample of its own; nothing predicts the first of them."""
    labels = sample["labels"][start : start + length].clone()  # [T]
    labels[:1] = IGNORED_LABEL
    return {
        "input_ids": sample["input_ids"][start : start + length],
        "labels": labels,
        "position_ids": torch.arange(length),
    }


def row_of(pieces: Sequence[Sample]) -> Sample:
    """Pieces one after another, as one sample."""
    return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}


def pack_samples(samples: Sequence[Sample], row_tokens: int) -> list[Sample]:
    """The rows of samples that lie in memory."""
    lengths = np.array([len(sample["input_ids"]) for sample in samples], dtype=np.int64)
    document, start, length = cut(lengths, row_tokens)
    pieces = [
        piece_of(samples[index], begin, size)
        for index, begin, size in zip(document.tolist(), start.tolist(), length.tolist(), strict=True)
    ]
    return [row_of([pieces[piece] for piece in row]) for row in best_fit(length.tolist(), row_tokens)]


class PackedSamples(View):
    """Rows of documents; a row is put together when it is asked for. ``together=False``: a piece a row."""

    def __init__(self, documents: Measured, row_tokens: int, *, together: bool = True) -> None:
        self._documents = documents
        self.row_tokens = row_tokens
        self.num_documents = len(documents)
        self._document, self._start, self._length = cut(documents.lengths, row_tokens)  # [pieces] each
        lengths = self._length.tolist()
        rows = best_fit(lengths, row_tokens) if together else [[piece] for piece in range(len(lengths))]
        self._pieces = np.fromiter((piece for row in rows for piece in row), np.int64, len(self._document))
        self._ends = np.cumsum([len(row) for row in rows], dtype=np.int64)  # [rows], into pieces
        totals = np.cumsum([0, *self._length[self._pieces]], dtype=np.int64)
        self.lengths = np.diff(totals[np.concatenate([[0], self._ends])])  # [rows]
        self.fingerprint = f"{documents.fingerprint} in rows of {row_tokens}"
        self.fill = float(self.lengths.sum()) / max(1, len(rows) * row_tokens)
        self.num_cut = int((documents.lengths > row_tokens).sum())

    def at(self, index: int) -> Any:
        return row_of(
            [
                piece_of(self._documents[int(self._document[piece])], int(self._start[piece]), int(self._length[piece]))
                for piece in self._row(index)
            ]
        )

    def name(self, index: int) -> str:
        row = self._row(index)
        first = self._documents.name(int(self._document[row[0]]))
        return first if len(row) == 1 else f"{first} and {len(row) - 1} more"

    def _row(self, index: int) -> np.ndarray:
        return self._pieces[self._ends[index - 1] if index else 0 : self._ends[index]]
