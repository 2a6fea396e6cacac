"""Samples that a function of the user's makes, of any kind a loss understands."""

import hashlib
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from megabatch.batching import sample_length
from megabatch.errors import MegabatchError, PlanError
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.data.samples import View
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.plugins import blamed, load_function
from megabatch.train.runtime.ranks import Ranks

# Name of the training set, where a function returns several sets.
TRAIN = "train"


class OwnSamples(View):
    """A user's samples with their lengths; an error in reading one is told in one line."""

    def __init__(
        self, samples: Any, lengths: np.ndarray, key: str, *, is_told: bool, vocabulary: int | None = None
    ) -> None:
        self._samples, self._key, self._vocabulary = samples, key, vocabulary
        self.lengths, self.is_told = lengths, is_told
        self.fingerprint = hashlib.sha256(lengths.tobytes()).hexdigest()

    def at(self, index: int) -> Any:
        sample = read(self._samples, index, self._key)
        if self._vocabulary is not None:
            check_tokens(sample, self._vocabulary, f"sample {self.name(index)}")
        return sample

    def name(self, index: int) -> str:
        return f"{index} of {self._key}"


class Repeatable(View):
    """Samples to evaluate on: one that draws random numbers draws the same ones whenever it is read."""

    def __init__(self, samples: View, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self.lengths, self.fingerprint = samples.lengths, samples.fingerprint

    def at(self, index: int) -> Any:
        with drawing(self._seed, 0, index):
            return self._samples.at(index)

    def name(self, index: int) -> str:
        return self._samples.name(index)


@contextmanager
def drawing(*seed: int) -> Generator[None, None, None]:
    """Let random numbers that are drawn inside, as augmentations do, follow from the seed; change nobody else's."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def own_samples(config: Config, ranks: Ranks, console: Console, vocabulary: int | None) -> dict[str, OwnSamples]:
    """Return what data.function returns, by its names, the same number on every rank; "train" is among them."""
    name = str(config.data.function)
    function = load_function(name, "data.function")
    with blamed(f"data.function {name!r}", "mend it, or data.options"):
        samples = function(**config.data.options)
    sets: Mapping[str, Any] = samples if isinstance(samples, Mapping) else {TRAIN: samples}
    if TRAIN not in sets:
        raise MegabatchError(
            f'data.function {name} returned a mapping of {sorted(map(str, sets))}; name what is trained on "{TRAIN}"'
        )
    measured_sets = {
        str(set_name): measured(samples, str(set_name), config, console, vocabulary)
        for set_name, samples in sets.items()
    }
    fingerprints = ranks.gather({key: samples.fingerprint for key, samples in measured_sets.items()})
    if any(fingerprint != fingerprints[0] for fingerprint in fingerprints):
        raise MegabatchError(
            f"data.function {name} does not return the same samples on every process; draw with a seed of its own"
        )
    return measured_sets


def measured(samples: Any, name: str, config: Config, console: Console, vocabulary: int | None) -> OwnSamples:
    key = f'"{name}" of data.function {config.data.function}'
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        raise MegabatchError(
            f"{key} is a {type(samples).__name__}; return samples with len() and [number], such as a list"
        )
    if not len(samples):
        raise MegabatchError(f"{key} is empty; return at least one sample")
    first, stated_lengths = read(samples, 0, key), getattr(samples, "lengths", None)
    if stated_lengths is not None:
        with blamed(f"the attribute lengths of {key}"):
            lengths = np.asarray(stated_lengths)
        if lengths.shape != (len(samples),) or lengths.dtype.kind not in "iu" or (lengths < 0).any():
            raise MegabatchError(
                f"the attribute lengths of {key} is no list of {len(samples)} whole numbers; give one for each sample"
            )
        lengths = lengths.astype(np.int64)
        return OwnSamples(samples, lengths, key, is_told=True, vocabulary=vocabulary)
    counts = config.data.look_ahead is not None or sizes_of(config.update).unit == "tokens"
    if config.update.max_microbatch_tokens is None and not (counts and "input_ids" in first):
        lengths = np.ones(len(samples), dtype=np.int64)
    else:
        lengths = measured_lengths(samples, key, console)
    return OwnSamples(samples, lengths, key, is_told=False, vocabulary=vocabulary)


def measured_lengths(samples: Any, key: str, console: Console) -> np.ndarray:
    """Make every sample once and return its tokens.

    For images that would be long, so samples are measured where the recipe counts tokens; else updates are balanced by
    their number. With data.look_ahead nothing is measured later, so that those of text are measured here; and so they
    are where update.global_batch_size has points in tokens.
    """
    lengths = np.empty(len(samples), dtype=np.int64)
    with console.progress(f"measuring {key}", len(samples), "samples") as advance:
        for index in range(len(samples)):
            sample = read(samples, index, key)
            try:
                lengths[index] = sample_length(sample)
            except PlanError:
                raise MegabatchError(
                    f"sample {index} of {key} has no tensor as its first value, whose size would be its tokens; give "
                    "lengths as an attribute `lengths` of the samples, or set update.micro_batch_size in place of "
                    "max_microbatch_tokens"
                ) from None
            advance(1)
    return lengths


def check_tokens(sample: Mapping[str, Any], vocabulary: int, name: str) -> None:
    """Raise for a token that the model has no embedding for: torch's own index error names no sample."""
    for key in ("input_ids", "labels"):
        ids = sample.get(key)
        if isinstance(ids, torch.Tensor) and ids.numel() and not ids.is_floating_point():
            # A label may be negative: it is not learned.
            largest, smallest = int(ids.max()), 0 if key == "labels" else int(ids.min())
            if largest >= vocabulary or smallest < 0:
                raise MegabatchError(
                    f"{name} has the token {largest if largest >= vocabulary else smallest} in {key!r}, and the model "
                    f"has a vocabulary of {vocabulary}; mend the sample, or set model.config.vocab_size"
                )


def read(samples: Any, index: int, key: str) -> Any:
    """Return a sample of the user's, or raise one line that says why not."""
    with blamed(f"sample {index} of {key}"):
        sample = samples[index]
    if not isinstance(sample, Mapping) or not sample:
        kind = "empty" if isinstance(sample, Mapping) else f"a {type(sample).__name__}"
        raise MegabatchError(
            f'sample {index} of {key} is {kind}; expected a mapping of tensors, such as {{"inputs": ...}}'
        )
    return sample


# By key of a sample, the shape of a tensor, and None for another value.
Form = dict[str, tuple[int, ...] | None]


def check_form(sample: Mapping[str, Any], first: Form | None) -> Form:
    """Return the form of the first sample. Raise for a sample with other keys, or with sizes that are not padded."""
    form: Form = {key: tuple(value.shape) if isinstance(value, torch.Tensor) else None for key, value in sample.items()}
    if first is None:
        return form
    if form.keys() != first.keys():
        raise MegabatchError(
            f"samples of one batch have the keys {sorted(first)} and {sorted(form)}; give all samples the same keys"
        )
    for key, shape in form.items():
        before = first[key]
        if shape is None or before is None:
            continue
        if shape[1:] != before[1:] or len(shape) != len(before):
            raise MegabatchError(
                f"{key!r} has the shapes {sorted([before, shape])}; only dim 0 is padded, so give all samples the same "
                "other sizes"
            )
    return first
