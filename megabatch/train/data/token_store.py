"""Stored: tokenised samples in an Arrow file that every process maps into its memory, and reads without copies."""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import torch

from megabatch.batching import IGNORED_LABEL
from megabatch.train.data.samples import Sample, Skipped

TABLE, SUMMARY = "samples.arrow", "summary.json"
TOKENS_AT_ONCE = 2**20  # of a record batch; a batch is what is found by its first sample, and offsets in it are int32

SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32())), ("name", pa.string())]  # one row a sample
)


class TokenizedSamples(Sequence[Sample]):
    """The samples of a folder that `write_samples` has written. Sent to another process it is opened there anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = pa.memory_map(str(folder / TABLE))
        reader = pa.ipc.open_file(self._file)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        self._ids = [ListColumn(batch.column("input_ids")) for batch in batches]
        self._labels = [ListColumn(batch.column("labels")) for batch in batches]
        self._names = [batch.column("name") for batch in batches]
        self._starts = np.cumsum([0] + [batch.num_rows for batch in batches]).tolist()  # [B + 1]
        summary = json.loads((folder / SUMMARY).read_text())
        self.num_targets: int = summary["num_targets"]
        self.fingerprint: str = summary["fingerprint"]
        self.skipped = Skipped(**summary["skipped"])
        lengths = [np.diff(column.offsets) for column in self._ids]
        self.lengths: np.ndarray = np.concatenate([np.zeros(0, dtype=np.int64), *lengths])  # [N]

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenizedSamples, (self._folder,)

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        batch, row = self._find(index)
        return {"input_ids": self._ids[batch].tensor(row), "labels": self._labels[batch].tensor(row)}  # [T], [T]

    def name(self, index: int) -> str:
        """The row that a sample comes from: "gsm8k.jsonl:17"."""
        batch, row = self._find(index)
        return self._names[batch][row].as_py()

    def _find(self, index: int) -> tuple[int, int]:
        """The record batch of a sample, and its row there."""
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch = bisect_right(self._starts, at) - 1
        return batch, at - self._starts[batch]


class ListColumn:
    """A column of lists, as views of the file."""

    def __init__(self, column: Any) -> None:
        self.offsets: np.ndarray = column.offsets.to_numpy()  # [N + 1]
        self.values: np.ndarray = column.values.to_numpy()  # [all of them]

    def tensor(self, row: int) -> torch.Tensor:
        values = self.values[self.offsets[row] : self.offsets[row + 1]]
        return torch.from_numpy(values.astype(np.int64))  # [T]


def write_samples(folder: Path, named: Iterator[tuple[str, Sample]], skipped: Skipped) -> None:
    """Write samples and their names into an empty folder, and what is known of them when the last one is there."""
    content, num_targets = hashlib.sha256(), 0
    with pa.ipc.new_file(str(folder / TABLE), SCHEMA) as writer:
        for chunk in chunks_of(named):
            columns = [[sample[column].numpy().astype(np.int32) for _, sample in chunk] for column in SCHEMA.names[:2]]
            num_targets += sum(int((labels[1:] != IGNORED_LABEL).sum()) for labels in columns[1])
            for ids, labels in zip(*columns, strict=True):
                content.update(len(ids).to_bytes(8, "little") + ids.tobytes() + labels.tobytes())
            names = pa.array([utf8_name(name) for name, _ in chunk], pa.string())
            writer.write_batch(pa.record_batch([*map(list_array, columns), names], schema=SCHEMA))
    summary = {
        "num_bytes": (folder / TABLE).stat().st_size,
        "num_targets": num_targets,
        "fingerprint": content.hexdigest(),
        "skipped": asdict(skipped),
    }
    (folder / SUMMARY).write_text(json.dumps(summary))


def utf8_name(name: str) -> str:
    """The name as text that can be written: a file's may hold bytes that are no UTF-8, which are spelled out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def chunks_of(named: Iterator[tuple[str, Sample]]) -> Iterator[list[tuple[str, Sample]]]:
    """Samples in lots of about as many tokens."""
    chunk: list[tuple[str, Sample]] = []
    num_tokens = 0
    for name, sample in named:
        chunk.append((name, sample))
        num_tokens += len(sample["input_ids"])
        if num_tokens >= TOKENS_AT_ONCE:
            yield chunk
            chunk, num_tokens = [], 0
    if chunk:
        yield chunk


def list_array(rows: list[np.ndarray]) -> Any:
    offsets = np.cumsum([0] + [len(row) for row in rows]).astype(np.int32)  # [N + 1]
    return pa.ListArray.from_arrays(offsets, np.concatenate(rows))


def is_whole(folder: Path) -> bool:
    """Whether a folder holds samples that can be read, and the file of them has the size it was written with."""
    try:
        num_bytes = json.loads((folder / SUMMARY).read_text())["num_bytes"]
        return (folder / TABLE).stat().st_size == num_bytes and len(TokenizedSamples(folder)) >= 0
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return False
