"""Cache: a source tokenised once, and found again by whoever asks for the same.

An entry is a folder named by all that its samples depend on. It is written under another name and renamed when whole,
so that a run that is killed, or two at once, leave nothing that is later taken for whole.
"""

import json
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.train.config import DataConfig, SourceConfig
from megabatch.train.data import stdlib
from megabatch.train.data.hub import hub_builder
from megabatch.train.data.samples import Sample, Skipped, samples_of
from megabatch.train.data.sources import expanded, place_of
from megabatch.train.data.token_store import TokenizedSamples, is_whole, write_samples
from megabatch.train.data.tokens import Tokens, sha256_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

FORMAT = 2  # raise it where the same rows give other samples
SECONDS_OF_WAITING = 60.0  # after which ranks that wait hear that all is well; a collective gives up after half an hour
SECONDS_OF_WRITING = 7 * 24 * 3600.0  # after which an unfinished entry is one that a killed run has left

READ_KEYS = {"subset", "split", "text_field", "prompt_field", "response_field", "messages_field", "max_samples"}


@dataclass(frozen=True)
class Request:
    """What is to be tokenised, and how."""

    source: SourceConfig
    key: str  # the source's table in the recipe
    config: DataConfig
    tokenizer: Any

    def samples(self, skipped: Skipped) -> Iterator[tuple[str, Sample]]:
        """Its samples, tokenised as they are asked for."""
        config = self.config
        return samples_of(
            self.source,
            self.key,
            self.tokenizer,
            broken_rows=config.broken_rows,
            max_sample_tokens=config.max_sample_tokens,
            skipped=skipped,
        )

    @cached_property
    def state(self) -> list[Any]:
        """That of its rows, when it was first asked for."""
        return state_of(self.source, self.key)

    def check_unchanged(self) -> None:
        """Raise where its files have changed since; beside a saved data set, datasets itself may write."""
        kind, *files = self.state
        if kind in ("stdlib", "hub", "saved") or any(Path(path).is_fifo() for path, _, _ in files):
            return
        if state_of(self.source, self.key) != self.state:
            raise MegabatchError(
                f"a file of {self.key} changed while it was read; start again when nothing writes to it any more"
            )

    @cached_property
    def folder(self) -> Path:
        """Its entry, named by all that the samples depend on: rows, what is read of them and left out, tokenizer."""
        read = self.source.model_dump(include=READ_KEYS)
        limits = [self.config.broken_rows, self.config.max_sample_tokens]
        parts = json.dumps([FORMAT, self.state, read, limits])
        return cache_folder(self.config) / sha256_of(parts, Tokens(self.tokenizer).fingerprint())[:32]


def tokenize_once(
    source: SourceConfig, key: str, config: DataConfig, tokenizer: Any, ranks: Ranks, console: Console
) -> TokenizedSamples:
    """The samples of a source, from the cache, into which the main rank has put them if they were not there.

    Every rank calls it, and waits for the main one however long that takes.
    """
    if tokenizer is None:
        raise MegabatchError(f"{key} is text, and the recipe has no tokenizer; set model.tokenizer")
    request = Request(source, key, config, tokenizer)
    main_rank_first(ranks, lambda pulse: put(request, console, pulse))
    return opened(request, console)


def main_rank_first(ranks: Ranks, work: Callable[[Callable[[], None]], None]) -> None:
    """Do ``work`` on the main rank while the others wait; what it finds wrong is raised on every rank.

    It must call what it is given now and then, which tells those who wait that all is well.
    """
    problem: str | None = None
    if ranks.is_main:
        try:
            work(Pulse(ranks))
        except MegabatchError as error:
            problem = str(error)
        ranks.sum([1.0])
    else:
        while ranks.sum([0.0])[0] == 0.0:
            pass
    ranks.agree(problem)


class Pulse:
    """Called often, it meets the ranks that wait once a minute, and so keeps their collective from giving up."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._last = ranks, time.monotonic()

    def __call__(self) -> None:
        if self._ranks.size > 1 and time.monotonic() - self._last > SECONDS_OF_WAITING:
            self._ranks.sum([0.0])
            self._last = time.monotonic()


def put(request: Request, console: Console, pulse: Callable[[], None]) -> None:
    """Tokenise what the cache does not hold."""
    folder = request.folder
    if is_whole(folder):
        return
    skipped = Skipped()
    named = request.samples(skipped)  # raises before anything is written where the source is not there
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(folder)
        unfinished = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.unfinished")
        unfinished.mkdir()  # readable for as many as the user lets, who may share it
        try:
            with console.progress(f"tokenising {request.key}", request.source.max_samples, "rows") as advance:
                write_unchanged(request, unfinished, counted(named, advance, pulse), skipped)
            take_over(unfinished, folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise MegabatchError(
            f"cannot write tokenised data to {folder.parent} ({error.strerror or error}); set data.cache to a folder "
            "that can be written and has room"
        ) from None


def write_unchanged(request: Request, folder: Path, named: Iterator[tuple[str, Sample]], skipped: Skipped) -> None:
    """Write the samples. Raises where their files changed meanwhile, whatever else that made of them."""
    try:
        write_samples(folder, named, skipped)
    except MegabatchError:
        request.check_unchanged()
        raise
    request.check_unchanged()


def counted(
    named: Iterator[tuple[str, Sample]], advance: Callable[[int], None], pulse: Callable[[], None]
) -> Iterator[tuple[str, Sample]]:
    for each in named:
        yield each
        advance(1)
        pulse()


def take_over(unfinished: Path, folder: Path) -> None:
    """Give a finished entry its name, unless another run was first."""
    try:
        unfinished.rename(folder)
    except OSError:
        if not is_whole(folder):
            raise


def remove_left_over(folder: Path) -> None:
    """Remove an entry that is damaged, and what runs that were killed have left of it."""
    shutil.rmtree(folder, ignore_errors=True)
    for left in folder.parent.glob(f"{folder.name}.*.unfinished"):
        if time.time() - left.stat().st_mtime > SECONDS_OF_WRITING:
            shutil.rmtree(left, ignore_errors=True)


def opened(request: Request, console: Console) -> TokenizedSamples:
    """The entry, and a word on what was left out of it."""
    folder = request.folder
    if not is_whole(folder):
        raise MegabatchError(
            f"the main process has put the tokenised data of {request.key} into {folder}, and this process finds none "
            "there; set data.cache to a folder that all processes share"
        )
    samples = TokenizedSamples(folder)
    for line in samples.skipped.words(request.key):
        console.say(line)
    return samples


def cache_folder(config: DataConfig) -> Path:
    """Where tokenised data lies: data.cache, else megabatch's folder in the user's cache folder."""
    if config.cache is not None:
        return expanded(config.cache, "data.cache")
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "megabatch"


def state_of(source: SourceConfig, key: str) -> list[Any]:
    """What changes when the rows do: of files their names, sizes and times."""
    place = place_of(source, key)
    if place.kind == "stdlib":
        return [place.kind, *place.paths, platform.python_version(), stdlib.VERSION]
    if place.kind == "hub":
        return [place.kind, *place.paths, hub_builder(place.paths[0], source.subset, key).hash]
    paths = [Path(path).resolve() for path in place.paths]
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    try:
        states = [(file, file.stat()) for file in files]
    except OSError as error:  # removed since it was found
        raise MegabatchError(
            f"cannot read {error.filename} ({error.strerror}); set {key}.path to what is there"
        ) from None
    return [place.kind, *([str(file), state.st_size, state.st_mtime_ns // 1_000_000] for file, state in states)]
