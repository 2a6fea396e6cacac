"""Cache: a source tokenized once into an Arrow file, which every process maps into its memory.

An entry is a folder named by all that its samples depend on. It is written under another name and renamed when whole,
so that a run that is killed, or two at once, leave nothing that is later taken for whole.
"""

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter

from megabatch.batching import IGNORED_LABEL
from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.config import DataConfig, SourceConfig
from megabatch.train.data import stdlib
from megabatch.train.data.encode import Named, Sample, Skipped, Tokens, samples_of, sha256_of
from megabatch.train.data.samples import View
from megabatch.train.data.sources import expanded, find_files, hub_builder
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import (
    UNFINISHED,
    check_seal,
    new_folder,
    read_table,
    remove_path,
    sealed_text,
    sha256_of_file,
)
from megabatch.train.runtime.ranks import Ranks

# Raise it where the same rows give other samples.
FORMAT = 3
# An unfinished entry that is older was left by a killed run.
SECONDS_OF_WRITING = 7 * 24 * 3600.0
TABLE, SUMMARY = "samples.arrow", "summary.json"
FEATURES = Features(
    {"input_ids": List(Value("int32")), "labels": List(Value("int32")), "length": Value("int64"),
     "num_targets": Value("int64"), "name": Value("string")}
)  # fmt: skip
READ_KEYS = {"subset", "split", "text_field", "prompt_field", "response_field", "messages_field", "max_samples"}


class TokenizedSamples(View):
    """The samples of an entry. Sent to another process it is opened there anew."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        rows = Dataset.from_file(str(folder / TABLE))
        self._columns = {key: rows.data.column(key) for key in ("input_ids", "labels")}
        self._names = rows.data.column("name")
        self.lengths = rows.data.column("length").to_numpy()  # [N]
        self.num_targets: np.ndarray = rows.data.column("num_targets").to_numpy()  # [N], of each sample
        summary = json.loads((folder / SUMMARY).read_text())
        self.fingerprint: str = summary["fingerprint"]
        self.skipped = Skipped(**summary["skipped"])

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenizedSamples, (self._folder,)

    def at(self, index: int) -> Sample:
        # Of pyarrow, since `datasets` takes a hundred times as long for a row.
        arrays = {key: column[index].values.to_numpy() for key, column in self._columns.items()}
        return {key: torch.from_numpy(array.astype(np.int64)) for key, array in arrays.items()}  # [T], [T]

    def name(self, index: int) -> str:
        return self._names[index].as_py()


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with an entry, of which every byte is read, about 1 GB/s; None for a whole one."""
    try:
        sealed = read_table(folder / SUMMARY)
        check_seal(sealed)
        if sha256_of_file(folder / TABLE) != sealed["table_sha256"]:
            return f"{TABLE} is not what was written: its SHA-256 is another"
        TokenizedSamples(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return in_one_line(error)
    return None


def tokenize_once(
    source: SourceConfig, key: str, config: DataConfig, tokenizer: Any, ranks: Ranks, console: Console
) -> TokenizedSamples:
    """Return the samples of a source, from the cache, into which the main rank puts them if they are not there.

    Every rank calls it, and waits for the main one however long that takes. One rank of each host checks the bytes.
    """
    if tokenizer is None:
        raise MegabatchError(f"{key} is text, and the recipe has no tokenizer; set model.tokenizer")
    entry = CacheEntry(source, key, config, tokenizer)
    ranks.on_main(lambda: put(entry, console), str(entry.folder))
    checks = not ranks.is_main and os.environ.get("LOCAL_RANK", "0") == "0"
    problem = find_damage(entry.folder) if checks else None
    if problem := ranks.first_problem(problem and f"a process on {platform.node()} does not find it ({problem})"):
        raise MegabatchError(
            f"the main process has put the tokenized data of {key} into {entry.folder}, and {problem}; set "
            "data.cache to a folder that all processes share"
        )
    samples = TokenizedSamples(entry.folder)
    for line in samples.skipped.words(key):
        console.say(line)
    return samples


@dataclass(frozen=True)
class CacheEntry:
    """A source, and how it is tokenized."""

    source: SourceConfig
    key: str  # the source's table in the recipe
    config: DataConfig
    tokenizer: Any

    @cached_property
    def state(self) -> list[Any]:
        """The state of its files, when it was first asked for."""
        return state_of(self.source, self.key)

    @cached_property
    def folder(self) -> Path:
        """Its entry, named by rows, by what is read of them and left out, and by the tokenizer."""
        read = self.source.model_dump(include=READ_KEYS)
        limits = [self.config.broken_rows, self.config.max_sample_tokens]
        parts = json.dumps([FORMAT, self.state, read, limits])
        return cache_folder(self.config) / sha256_of(parts, Tokens(self.tokenizer).fingerprint())[:32]

    def check_unchanged(self) -> None:
        """Raise where its files have changed since."""
        kind, *files = self.state
        if kind in ("stdlib", "hub") or any(Path(path).is_fifo() for path, _, _ in files):
            return
        if state_of(self.source, self.key) != self.state:
            raise MegabatchError(
                f"a file of {self.key} changed while it was read; start again when nothing writes to it any more"
            )


def cache_folder(config: DataConfig) -> Path:
    """Return the folder of tokenized data: data.cache, else megabatch's in the user's cache folder."""
    if config.cache is not None:
        return expanded(config.cache, "data.cache")
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "megabatch"


def state_of(source: SourceConfig, key: str) -> list[Any]:
    """Return what changes when the rows do: of files their names, sizes and times."""
    files = find_files(source, key)
    if files.kind == "stdlib":
        return [files.kind, *files.paths, platform.python_version(), stdlib.VERSION]
    if files.kind == "hub":
        return [files.kind, *files.paths, hub_builder(files.paths[0], source.subset, key).hash]
    try:
        states = [(file.resolve(), file.stat()) for file in files.files()]
    except OSError as error:
        raise MegabatchError(
            f"cannot read {error.filename} ({error.strerror}); set {key}.path to what is there"
        ) from None
    return [files.kind, *([str(file), state.st_size, state.st_mtime_ns // 1_000_000] for file, state in states)]


def put(entry: CacheEntry, console: Console) -> None:
    """Tokenize what the cache does not hold."""
    folder, skipped = entry.folder, Skipped()
    if folder.exists() and find_damage(folder) is None:
        return
    named = samples_of(entry.source, entry.key, entry.config, entry.tokenizer, skipped)
    progress = console.progress(f"tokenizing {entry.key}", entry.source.max_samples, "rows")
    try:
        # Asked anew, since another run may have made it meanwhile.
        if folder.exists() and (damage := find_damage(folder)):
            console.warn(f"the tokenized data in {folder} is damaged ({damage}); it is made anew")
            remove_path(folder)
        for unfinished in folder.parent.glob(f".{folder.name}.*{UNFINISHED}"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - unfinished.stat().st_mtime > SECONDS_OF_WRITING:
                    remove_path(unfinished)
        with new_folder(folder) as unfinished, progress as advance:
            try:
                write_samples(unfinished, named, skipped, advance)
            except MegabatchError:
                # A change of the files explains whatever else it made of the rows.
                entry.check_unchanged()
                raise
            entry.check_unchanged()
    except OSError as error:
        if find_damage(folder) is None:
            return
        raise MegabatchError(
            f"cannot write tokenized data to {folder.parent} ({error.strerror or error}); set data.cache to a folder "
            "that can be written and has room"
        ) from None


def write_samples(folder: Path, named: Iterator[Named], skipped: Skipped, advance: Callable[[int], None]) -> None:
    """Write samples and their names into an empty folder, and a summary when the last one is there."""
    content = hashlib.sha256()
    with ArrowWriter(path=str(folder / TABLE), features=FEATURES) as writer:
        for name, sample in named:
            ids, labels = (sample[key].numpy().astype(np.int32) for key in ("input_ids", "labels"))  # [T], [T]
            content.update(len(ids).to_bytes(8, "little") + ids.tobytes() + labels.tobytes())
            # Nothing predicts the first token.
            num_targets = int((labels[1:] != IGNORED_LABEL).sum())
            # A file's name may hold bytes that are no UTF-8.
            name = os.fsencode(name).decode("utf-8", "backslashreplace")
            row = {"input_ids": ids, "labels": labels, "length": len(ids), "num_targets": num_targets, "name": name}
            writer.write(row)
            advance(1)
        writer.finalize()
    summary = {
        "table_sha256": sha256_of_file(folder / TABLE),
        "fingerprint": content.hexdigest(),
        "skipped": asdict(skipped),
    }
    (folder / SUMMARY).write_text(sealed_text(summary))
