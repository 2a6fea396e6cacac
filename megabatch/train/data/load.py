"""Load: from a recipe to the samples that are trained on, in which order, and those that never are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megabatch.errors import MegabatchError
from megabatch.train.config import HELD_OUT, OWN, Config, SourceConfig
from megabatch.train.data.custom_dataset import TRAIN, Repeatable, own_samples
from megabatch.train.data.encode import Tokens
from megabatch.train.data.samples import Joined, Mixture, PackedSamples, Subset, View, counts_of, split_off
from megabatch.train.data.sources import find_files
from megabatch.train.data.stream import Stream, check_fit
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks


@dataclass(frozen=True)
class Data:
    """The samples that a run trains on, and the sets that it is evaluated on."""

    train: View | Stream
    order: Callable[[int], np.ndarray] | None  # sample ids of an epoch; None: all of them, shuffled
    sets: dict[str, Sequence[Any]]  # to evaluate on, by name: "held-out" and those of eval.sets
    identity: dict[str, object]  # as JSON: where it differs, it is another data set
    words: list[str]  # what a user should hear of it
    longest_tokens: int | None = None  # of all samples; None: a stream, or samples that need not be of tokens
    is_told: bool = False  # True: data.function states the lengths, so none is measured

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
        """True if the samples are of tokens, so that their lengths count them."""
        return isinstance(self.train, Stream) or "input_ids" in self.train[0]


def load_data(
    config: Config, tokenizer: Any, ranks: Ranks, console: Console, positions: int | None = None,
    vocabulary: int | None = None,
) -> Data:  # fmt: skip
    """Return the samples of a recipe, checked. Collective; raises `MegabatchError` on every rank alike.

    Args:
        config: Its data, eval and update sections.
        tokenizer: Of transformers; None where no source is text.
        ranks: Of which the main one tokenizes.
        console: Shows how far it is.
        positions: Most tokens of a sample that the model can tell apart; asked of a stream, whose longest sample is not
            known beforehand.
        vocabulary: Tokens that the model knows; asked of samples of data.function, which no tokenizer makes.
    """
    loader = Loader(config, tokenizer, ranks, console)
    if config.data.function is not None:
        return loader.of_function(vocabulary)
    return loader.of_stream(positions) if config.data.streaming else loader.of_text()


class Loader:
    """Reads what a recipe names."""

    def __init__(self, config: Config, tokenizer: Any, ranks: Ranks, console: Console) -> None:
        self._config, self._tokenizer, self._ranks, self._console = config, tokenizer, ranks, console
        mixture = {f"data.mixture.{name}": source for name, source in config.data.mixture.items()}
        self._sources: dict[str, SourceConfig] = mixture or {"data": config.data}

    def of_text(self) -> Data:
        """Return text that is tokenized once."""
        config, keys, row_tokens = self._config, list(self._sources), self._config.data.pack_tokens
        tokenized = [self._tokenized(source, key) for key, source in self._sources.items()]
        held_out_ids = split_off([len(samples) for samples in tokenized], config.eval.num_samples, config.run.seed)
        train_ids = [left(samples, ids) for samples, ids in zip(tokenized, held_out_ids, strict=True)]
        documents = [Subset(samples, ids) for samples, ids in zip(tokenized, train_ids, strict=True)]
        held_out = [self._alone(Subset(samples, ids)) for samples, ids in zip(tokenized, held_out_ids, strict=True)]
        if row_tokens is None:
            parts: list[Any] = documents
            num_targets = sum(
                int(samples.num_targets[ids].sum()) for samples, ids in zip(tokenized, train_ids, strict=True)
            )
            words = [samples_text(documents, num_targets)]
        else:
            parts = [PackedSamples(subset, row_tokens) for subset in documents]
            words = [packing_text(key, part) for key, part in zip(keys, parts, strict=True)]
        weights = [source.weight for source in self._sources.values() if source.weight is not None]
        order = None
        if weights:
            sizes = tuple(len(part) for part in parts)
            order = Mixture(sizes, counts_of(sizes, weights), config.run.seed)
            words.append(mixture_text(keys, order))
        identity: dict[str, object] = {
            "sources": keys,
            **{f"fingerprint of {key}": samples.fingerprint for key, samples in zip(keys, tokenized, strict=True)},
            **{f"{key}.weight": source.weight for key, source in self._sources.items() if source.weight is not None},
            "data.pack_tokens": row_tokens,
        }
        train = Joined(parts)
        sets, counts = self._checked(train, Joined(held_out), {})
        longest_tokens = max(int(samples.lengths.max()) for samples in (train, *sets.values()))
        return Data(train, order, sets, {**identity, **counts}, words, longest_tokens)

    def of_function(self, vocabulary: int | None) -> Data:
        config, seed = self._config, self._config.run.seed
        samples_by_set = own_samples(config, self._ranks, self._console, vocabulary)
        train_samples = samples_by_set[TRAIN]
        (ids,) = split_off([len(train_samples)], config.eval.num_samples, seed)
        train, held_out = Subset(train_samples, left(train_samples, ids)), Repeatable(Subset(train_samples, ids), seed)
        more_sets = {name: Repeatable(samples, seed) for name, samples in samples_by_set.items() if name != TRAIN}
        check_new_sets([*more_sets], config)
        identity: dict[str, object] = {
            "data.function": config.data.function,
            "data.options": config.data.options,
            "lengths of samples": train_samples.fingerprint,
        }
        sets, counts = self._checked(train, held_out, more_sets)
        words = [
            f"{len(train):,} samples of {config.data.function}; the longest has length {int(train.lengths.max()):,}"
        ]
        return Data(train, None, sets, {**identity, **counts}, words, is_told=train_samples.is_told)

    def of_stream(self, positions: int | None) -> Data:
        """Return text that is read while training."""
        config = self._config
        stream = Stream(self._sources, config, self._tokenizer, positions)
        held_out = stream.held_out()
        for name, sample in held_out:
            check_fit(name, len(sample["input_ids"]), config, positions)
        sets: dict[str, Sequence[Any]] = {HELD_OUT: [sample for _, sample in held_out]} if held_out else {}
        more_sets = self._sets()
        for samples in more_sets.values():
            check_longest(samples, config, positions)
        identity: dict[str, object] = {
            "sources": list(self._sources),
            **{key: source_identity(source, key) for key, source in self._sources.items()},
            **{
                f"data.{key}": getattr(config.data, key)
                for key in ("shuffle_window", "max_sample_tokens", "pack_tokens")
            },
            "tokenizer": Tokens(self._tokenizer).fingerprint(),
            "num_held_out": len(held_out),
        }
        return Data(stream, None, {**sets, **more_sets}, identity, stream_texts(self._sources, config))

    def _checked(
        self, train: View, held_out: View, more_sets: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, object]]:
        """Return the sets that have samples, and the counts that are part of the identity; every sample can be run."""
        sets: dict[str, Any] = {HELD_OUT: held_out, **more_sets, **self._sets()}
        sets = {name: samples for name, samples in sets.items() if len(samples)}
        for samples in (train, *sets.values()):
            check_longest(samples, self._config)
        num_tokens = int(train.lengths.sum())
        return sets, {"num_samples": len(train), "num_tokens": num_tokens, "num_held_out": len(held_out)}

    def _sets(self) -> dict[str, Any]:
        """Return those of eval.sets; one that names no field has those of the data that is trained on."""
        fields = [key for key in SourceConfig.model_fields if key.endswith("_field")]
        sets: dict[str, Any] = {}
        for name, source in self._config.eval.sets.items():
            if all(getattr(source, key) is None for key in fields):
                source = source.model_copy(update={key: getattr(self._config.data, key) for key in fields})
            sets[name] = self._alone(self._tokenized(source, f"eval.sets.{name}"))
        return sets

    def _tokenized(self, source: SourceConfig, key: str) -> Any:
        from megabatch.train.data.cache import tokenize_once

        return tokenize_once(source, key, self._config.data, self._tokenizer, self._ranks, self._console)

    def _alone(self, samples: View) -> Any:
        """Return samples to evaluate on: where documents are packed, a row of its own for each piece of them."""
        row_tokens = self._config.data.pack_tokens
        return samples if row_tokens is None else PackedSamples(samples, row_tokens, together=False)


def left(samples: View, held_out_ids: np.ndarray) -> np.ndarray:
    return np.setdiff1d(np.arange(len(samples)), held_out_ids)


def check_longest(samples: Any, config: Config, positions: int | None = None) -> None:
    """Raise `MegabatchError` where the longest of measured samples fits into no microbatch or not into the model."""
    longest = int(samples.lengths.argmax())
    check_fit(samples.name(longest), int(samples.lengths[longest]), config, positions)


def source_identity(source: SourceConfig, key: str) -> dict[str, object]:
    """Return a stream's source as JSON: its settings, the names of its files without their folders, and their sizes."""
    paths = [source.path] if isinstance(source.path, str) else source.path or []
    settings = source.model_dump(mode="json", include={*SourceConfig.model_fields} - {"path"})
    sizes = [path.stat().st_size for path in find_files(source, key).files()]
    return {**settings, "path": [Path(path).name for path in paths], "sizes_bytes": sizes}


def samples_text(parts: Sequence[View], num_targets: int) -> str:
    num_tokens = sum(int(part.lengths.sum()) for part in parts)
    longest = max(int(part.lengths.max()) for part in parts if len(part))
    return (
        f"{sum(map(len, parts)):,} samples of {num_tokens:,} tokens, {num_targets:,} of them to be learned; "
        f"the longest has {longest:,}"
    )


def packing_text(key: str, rows: PackedSamples) -> str:
    cut = f", {rows.num_cut:,} of them cut," if rows.num_cut else ""
    return (
        f"{key}: packed {rows.num_documents:,} documents{cut} into {len(rows):,} rows of at most "
        f"{rows.row_tokens:,} tokens, {rows.fill:.1%} full"
    )


def mixture_text(keys: Sequence[str], order: Mixture) -> str:
    shares = [
        f"{count:,} of {key.rpartition('.')[2]}" + ("" if count == size else f" (of its {size:,})")
        for key, count, size in zip(keys, order.counts, order.sizes, strict=True)
    ]
    return f"an epoch has {sum(order.counts):,} samples: {', '.join(shares)}"


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


def check_new_sets(names: list[str], config: Config) -> None:
    """Raise `MegabatchError` where data.function returns a set whose name another has."""
    message = f"data.function {config.data.function} returns a set named"
    for name in names:
        if name == OWN and config.eval.function is not None:
            raise MegabatchError(f'{message} "{OWN}", which is the name of what eval.function finds; rename it')
        if name == HELD_OUT and config.eval.num_samples:
            raise MegabatchError(
                f'{message} "{name}", and there is another of that name (held out of the training data); set '
                "eval.num_samples to 0"
            )
        if name in config.eval.sets:
            raise MegabatchError(f'{message} "{name}", and there is another of that name (in eval.sets); rename one')
