"""Load: from a recipe to the samples that are trained on, in which order, and those that never are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.errors import MegabatchError
from megabatch.train.config import HELD_OUT, Config, SourceConfig
from megabatch.train.data.cache import tokenize_once
from megabatch.train.data.checks import check_config, check_fit, check_fits, check_new_sets
from megabatch.train.data.custom_dataset import TRAIN, Repeatable, own_samples
from megabatch.train.data.mixture import Joined, Measured, Mixture, Part, Tokenized, TokenizedPart, counts_of, split_off
from megabatch.train.data.pack import PackedSamples
from megabatch.train.data.sources import place_of
from megabatch.train.data.stream import Stream
from megabatch.train.data.tokens import Tokens
from megabatch.train.model.architecture import architecture_of, positions_of
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks


@dataclass(frozen=True)
class Data:
    """What a run trains on, and what it never does."""

    train: Measured | Stream
    order: Callable[[int], np.ndarray] | None  # sample ids of an epoch; None: all of them, shuffled
    sets: dict[str, Sequence[Any]]  # to evaluate on, by name: "held-out" and those of eval.sets
    identity: dict[str, object]  # as JSON: where it differs, it is another data set
    words: list[str]  # what a user should hear of it
    longest_tokens: int | None = None  # of all samples; None: a stream, or samples that need not be of tokens
    is_told: bool = False  # whether data.function says the lengths, of whatever is counted, so that none is measured

    @property
    def lengths(self) -> np.ndarray | None:  # [N]
        """Tokens of each sample; None: a stream does not know."""
        return None if isinstance(self.train, Stream) else self.train.lengths

    @property
    def epoch_size(self) -> int | None:
        """Samples of an epoch; None: a stream does not know."""
        if self.lengths is None:
            return None
        return len(self.lengths) if self.order is None else len(self.order(0))

    @cached_property
    def counts_tokens(self) -> bool:
        """Whether the samples are of tokens, so that their lengths count them."""
        return isinstance(self.train, Stream) or "input_ids" in self.train[0]


def load_data(config: Config, tokenizer: Any, ranks: Ranks, console: Console) -> Data:
    """The samples of a recipe, checked. Collective; raises `MegabatchError` on every rank alike."""
    check_config(config)
    read = Reading(config, tokenizer, ranks, console)
    if config.data.function is not None:
        return of_function(read)
    return of_stream(read) if config.data.streaming else of_text(read)


@dataclass(frozen=True)
class Reading:
    """What it takes to read a source."""

    config: Config
    tokenizer: Any
    ranks: Ranks
    console: Console

    def tokenized(self, source: SourceConfig, key: str) -> Tokenized:
        """The samples of a source."""
        return tokenize_once(source, key, self.config.data, self.tokenizer, self.ranks, self.console)

    def sets(self) -> dict[str, Sequence[Any]]:
        """Those of eval.sets."""
        return {
            name: alone(self.tokenized(with_fields(source, self.config.data), f"eval.sets.{name}"), self.config)
            for name, source in self.config.eval.sets.items()
        }


def of_text(read: Reading) -> Data:
    """Text that is tokenised once."""
    config, sources = read.config, sources_of(read.config)
    whole = [read.tokenized(source, key) for key, source in sources.items()]
    held_out_ids = split_off([len(samples) for samples in whole], config.eval.num_samples, config.run.seed)
    documents = [TokenizedPart(samples, left(samples, ids)) for samples, ids in zip(whole, held_out_ids, strict=True)]
    row_tokens = config.data.pack_tokens
    parts = documents if row_tokens is None else [PackedSamples(each, row_tokens) for each in documents]
    order = order_of(parts, sources, config)
    held_out = [alone(TokenizedPart(samples, ids), config) for samples, ids in zip(whole, held_out_ids, strict=True)]
    identity: dict[str, object] = {
        "sources": list(sources),
        **{f"fingerprint of {key}": samples.fingerprint for key, samples in zip(sources, whole, strict=True)},
        **{f"{key}.weight": source.weight for key, source in sources.items() if source.weight is not None},
        "data.pack_tokens": row_tokens,
    }
    words = [samples_text(documents)] if row_tokens is None else []
    words += [
        packing_text(key, part) for key, part in zip(sources, parts, strict=True) if isinstance(part, PackedSamples)
    ]
    words += [] if order is None else [mixture_text(sources, order)]
    return checked(Joined(parts), order, Joined(held_out), read, identity, words)


def of_function(read: Reading) -> Data:
    """What a function of the user's returns."""
    config = read.config
    own = own_samples(config, read.ranks, read.console)
    seed = config.run.seed
    (ids,) = split_off([len(own[TRAIN])], config.eval.num_samples, seed)
    train, held_out = Part(own[TRAIN], left(own[TRAIN], ids)), Repeatable(Part(own[TRAIN], ids), seed)
    others = {name: Repeatable(samples, seed) for name, samples in own.items() if name != TRAIN}
    check_new_sets([*others], config.eval.sets, config)
    identity: dict[str, object] = {
        "data.function": config.data.function,
        "data.options": config.data.options,
        "lengths of samples": own[TRAIN].fingerprint,
    }
    data = checked(train, None, held_out, read, identity, [], others)
    return replace(data, longest_tokens=None, is_told=own[TRAIN].is_told)


def of_stream(read: Reading) -> Data:
    """Text that is read while training."""
    config, sources = read.config, sources_of(read.config)
    if read.tokenizer is None:
        raise MegabatchError("data is text, and the recipe has no tokenizer; set model.tokenizer")
    positions = None if config.model.function is not None else positions_of(architecture_of(config.model))
    stream = Stream(sources, config, read.tokenizer, positions)
    held_out = stream.held_out()
    for name, sample in held_out:
        check_fit(name, len(sample["input_ids"]), config, stream.positions)
    sets = {HELD_OUT: [sample for _, sample in held_out]} if held_out else {}
    others = read.sets()
    for samples in others.values():
        check_fits(samples, config, stream.positions)
    keys = ("shuffle_window", "max_sample_tokens", "pack_tokens")
    identity: dict[str, object] = {
        "sources": list(sources),
        **{key: source_identity(source, key) for key, source in sources.items()},
        **{f"data.{key}": getattr(config.data, key) for key in keys},
        "tokenizer": Tokens(read.tokenizer).fingerprint(),
        "num_held_out": len(held_out),
    }
    return Data(stream, None, {**sets, **others}, identity, stream_texts(sources, config))


def checked(
    train: Measured,
    order: Mixture | None,
    held_out: Measured,
    read: Reading,
    identity: dict[str, object],
    words: list[str],
    others: Mapping[str, Sequence[Any]] | None = None,
) -> Data:
    """The data, when every sample of it can be run."""
    sets: dict[str, Any] = {HELD_OUT: held_out, **(others or {}), **read.sets()}
    sets = {name: samples for name, samples in sets.items() if len(samples)}
    for samples in (train, *sets.values()):
        check_fits(samples, read.config)
    counts = {"num_samples": len(train), "num_tokens": int(train.lengths.sum()), "num_held_out": len(held_out)}
    longest_tokens = max(int(samples.lengths.max()) for samples in (train, *sets.values()))
    return Data(train, order, sets, {**identity, **counts}, words, longest_tokens)


def with_fields(source: SourceConfig, data: SourceConfig) -> SourceConfig:
    """A set to evaluate on that names no field has those of the data that is trained on."""
    fields = [key for key in SourceConfig.model_fields if key.endswith("_field")]
    if any(getattr(source, key) is not None for key in fields):
        return source
    return source.model_copy(update={key: getattr(data, key) for key in fields})


def sources_of(config: Config) -> dict[str, SourceConfig]:
    """What is trained on, by the key of its table."""
    mixture = {f"data.mixture.{name}": source for name, source in config.data.mixture.items()}
    return mixture or {"data": config.data}


def left(samples: Measured, held_out_ids: np.ndarray) -> np.ndarray:
    """Numbers of the samples that are not held out."""
    return np.setdiff1d(np.arange(len(samples)), held_out_ids)


def alone(samples: Tokenized, config: Config) -> Any:
    """Samples to evaluate on: where documents are packed they are cut as they were, but lie in a row each."""
    row_tokens = config.data.pack_tokens
    return samples if row_tokens is None else PackedSamples(samples, row_tokens, together=False)


def order_of(parts: Sequence[Measured], sources: Mapping[str, SourceConfig], config: Config) -> Mixture | None:
    """The order of a mixture with weights."""
    weights = [source.weight for source in sources.values() if source.weight is not None]
    if not weights:
        return None
    sizes = tuple(len(part) for part in parts)
    return Mixture(sizes, counts_of(sizes, weights), config.run.seed)


def samples_text(parts: Sequence[Tokenized]) -> str:
    num_samples, num_targets = sum(map(len, parts)), sum(part.num_targets for part in parts)
    num_tokens = sum(int(part.lengths.sum()) for part in parts)
    longest = max(int(part.lengths.max()) for part in parts if len(part))
    return (
        f"{num_samples:,} samples of {num_tokens:,} tokens, {num_targets:,} of them to be learned; "
        f"the longest has {longest:,}"
    )


def packing_text(key: str, rows: PackedSamples) -> str:
    cut = f", {rows.num_cut:,} of them cut," if rows.num_cut else ""
    return (
        f"{key}: packed {rows.num_documents:,} documents{cut} into {len(rows):,} rows of at most "
        f"{rows.row_tokens:,} tokens, {rows.fill:.1%} full"
    )


def mixture_text(sources: Mapping[str, SourceConfig], order: Mixture) -> str:
    each = [
        f"{count:,} of {key.rpartition('.')[2]}" + ("" if count == size else f" (of its {size:,})")
        for key, count, size in zip(sources, order.counts, order.sizes, strict=True)
    ]
    return f"an epoch has {sum(order.counts):,} samples: {', '.join(each)}"


def stream_texts(sources: Mapping[str, SourceConfig], config: Config) -> list[str]:
    texts = [
        f"data is read while training, {config.data.shuffle_window:,} samples shuffled at a time; how many updates it "
        "makes is not known beforehand"
    ]
    if len(sources) > 1 and all(source.weight is None for source in sources.values()):
        texts.append("the sources of the stream are read one after another; give them weights to mix them")
    if config.data.num_workers > 1:
        texts.append(f"a stream is read by one process, and data.num_workers is {config.data.num_workers}")
    return texts


def source_identity(source: SourceConfig, key: str) -> dict[str, object]:
    """A source of a stream: its settings, the names of its files without their folders, and their sizes."""
    paths = [source.path] if isinstance(source.path, str) else source.path or []
    settings = source.model_dump(mode="json", include={*SourceConfig.model_fields} - {"path"})
    sizes = [path.stat().st_size for path in files_of(source, key)]
    return {**settings, "path": [Path(path).name for path in paths], "sizes_bytes": sizes}


def files_of(source: SourceConfig, key: str) -> list[Path]:
    """The files that hold a source's rows, in order; none of the hub and of the standard library."""
    place = place_of(source, key)
    if place.kind in ("hub", "stdlib"):
        return []
    if place.kind == "saved":  # beside its rows, datasets keeps what it has computed from them
        return sorted(path for path in Path(place.paths[0]).rglob("*.arrow") if not path.name.startswith("cache-"))
    return [Path(path) for path in place.paths]
