"""Samples: rows as token ids and labels, checked, counted where they are left out, lazily."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from megabatch.batching import IGNORED_LABEL
from megabatch.errors import MegabatchError
from megabatch.train.config import SourceConfig
from megabatch.train.data.encode import Encoded, RowKind, kind_of_rows
from megabatch.train.data.rows import BrokenRowError, Row, Rows, rows_of

Sample = dict[str, Tensor]  # {"input_ids": [T], "labels": [T]}, int64, IGNORED_LABEL where nothing is learned
ROWS_AT_ONCE = 256  # that are tokenised together


@dataclass
class Skipped:
    """What was left out so far."""

    broken: int = 0
    long: int = 0
    first: str | None = None  # the text of the first broken row

    def words(self, key: str) -> list[str]:
        """What was left out of the source that the recipe names by ``key``, in a line each."""
        broken = f"{key}: left out {self.broken:,} broken rows, first {self.first}"
        long = f"{key}: left out {self.long:,} samples longer than data.max_sample_tokens"
        return [*([broken] if self.broken else []), *([long] if self.long else [])]


@dataclass
class Limits:
    """Which rows are refused, and which are left out and counted."""

    broken_rows: Literal["stop", "skip"]
    max_sample_tokens: int | None
    skipped: Skipped


def samples_of(
    source: SourceConfig,
    key: str,
    tokenizer: Any,
    *,
    broken_rows: Literal["stop", "skip"],
    max_sample_tokens: int | None,
    skipped: Skipped,
) -> Iterator[tuple[str, Sample]]:
    """The samples of a source with the names of their rows, in its order; what is left out is added to ``skipped``.

    Raises at once where the source is not there; at the first row where the recipe does not fit it; at a broken one
    with "stop"; and at the end where there was no sample at all.
    """
    rows = rows_of(source, key)
    return tokenised(rows, source, key, tokenizer, Limits(broken_rows, max_sample_tokens, skipped))


def tokenised(
    rows: Rows, source: SourceConfig, key: str, tokenizer: Any, limits: Limits
) -> Iterator[tuple[str, Sample]]:
    kind: RowKind | None = None
    num_samples = 0
    while chunk := list(islice(rows, ROWS_AT_ONCE)):
        first = next((row for row in chunk if isinstance(row, Row)), None)
        if kind is None and first is not None:
            kind = kind_of_rows(source, key, first, tokenizer)
        for name, encoded in encode_chunk(chunk, kind):
            if not isinstance(encoded, BrokenRowError) and fits(encoded, limits):
                num_samples += 1
                yield name, sample_of(encoded)
            elif isinstance(encoded, BrokenRowError):
                leave_out(encoded, limits)
    if num_samples == 0:
        raise MegabatchError(none_left(key, limits.skipped))


def encode_chunk(
    chunk: list[Row | BrokenRowError], kind: RowKind | None
) -> Iterator[tuple[str, Encoded | BrokenRowError]]:
    """What became of each row, in their order; without a kind there is no good row."""
    read = [read_row(row, kind) for row in chunk]
    good = [content for content in read if not isinstance(content, BrokenRowError)]
    encoded = iter(kind.encode(good) if kind is not None and good else [])
    for row, content in zip(chunk, read, strict=True):
        name = row.name if isinstance(row, Row) else ""
        yield name, content if isinstance(content, BrokenRowError) else with_target(name, next(encoded))


def read_row(row: Row | BrokenRowError, kind: RowKind | None) -> Any:
    if isinstance(row, BrokenRowError) or kind is None:
        return row
    try:
        return kind.read(row)
    except BrokenRowError as error:
        return error


def with_target(name: str, encoded: Encoded | BrokenRowError) -> Encoded | BrokenRowError:
    """A sample, or an error where no token of it is a target; the first token is one of none."""
    if not isinstance(encoded, BrokenRowError) and (encoded[1][1:] == IGNORED_LABEL).all():
        return BrokenRowError(f"{name} has no token to learn")
    return encoded


def leave_out(broken: BrokenRowError, limits: Limits) -> None:
    """Count a broken row, or stop at it."""
    if limits.broken_rows == "stop":
        raise MegabatchError(f'{broken}; mend it, or leave such rows out with data.broken_rows = "skip"')
    limits.skipped.broken += 1
    limits.skipped.first = limits.skipped.first or str(broken)


def fits(encoded: Encoded, limits: Limits) -> bool:
    """Whether a sample is short enough; counts it if not."""
    is_long = limits.max_sample_tokens is not None and len(encoded[0]) > limits.max_sample_tokens
    limits.skipped.long += is_long
    return not is_long


def sample_of(encoded: Encoded) -> Sample:
    ids, labels = encoded
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}  # [T], [T]


def none_left(key: str, skipped: Skipped) -> str:
    if skipped.broken == skipped.long == 0:
        return f"{key} names a source without rows; give at least one sample"
    reasons = [f"{skipped.broken} rows are broken (first: {skipped.first})"] * bool(skipped.broken)
    reasons += [f"{skipped.long} are longer than data.max_sample_tokens"] * bool(skipped.long)
    return f"no row of {key} can be used: {', '.join(reasons)}; set {key}.path, its fields, or data.max_sample_tokens"
