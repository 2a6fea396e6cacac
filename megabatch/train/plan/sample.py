"""Sample: the longest one of a recipe, which the plan must have room for; its shape, since nothing is computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megabatch.batching import OneRow
from megabatch.errors import MegabatchError
from megabatch.train.config import Config
from megabatch.train.data.load import load_data
from megabatch.train.model.architecture import load_tokenizer
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and types, by name


@dataclass(frozen=True)
class LongestSample:
    """The shapes and types of a sample's tensors."""

    fields: Fields  # of a microbatch of one, without its first dim
    length_tokens: int
    source: str  # of the length, in words
    one_row: bool = False  # whether the samples of a microbatch lie one after another

    def microbatch(self, num_samples: int) -> dict[str, Tensor]:
        """So many of it, zeros, as the library collates samples of one length: name → [B, ...]."""
        if not self.one_row:
            return {name: torch.zeros(num_samples, *shape, dtype=dtype) for name, (shape, dtype) in self.fields.items()}
        return {
            name: torch.zeros(1, num_samples * shape[0], *shape[1:], dtype=dtype)
            for name, (shape, dtype) in self.fields.items()
        }


def longest_sample(config: Config, length_tokens: int | None, console: Console) -> LongestSample:
    """What is said on the command line or in the recipe; else the data is read, as for training."""
    if config.data.function is not None:
        if length_tokens is not None:
            raise MegabatchError(
                "--length is given and the samples are those of data.function, which may be anything; leave it out: "
                "they are read"
            )
        return of_function(config, console)
    if length_tokens is not None:
        return of_tokens(length_tokens, "--length", config)
    for key in ("pack_tokens", "max_sample_tokens"):
        if (said := getattr(config.data, key)) is not None:
            return of_tokens(said, f"data.{key}", config)
    return of_tokens(measured(config, console), "the longest of its data", config)


def of_tokens(length_tokens: int, source: str, config: Config) -> LongestSample:
    """A sample of text, as the trainer's are; packed rows tell positions too."""
    names = ["input_ids", "labels", *(["position_ids"] if config.data.pack_tokens is not None else [])]
    return sample_of(dict.fromkeys(names, ((length_tokens,), torch.long)), length_tokens, source, config)


def of_function(config: Config, console: Console) -> LongestSample:
    """The longest sample of the user's function."""
    samples: Any = load_data(config, load_tokenizer(config.model), alone(), console).train
    number = int(samples.lengths.argmax())
    tensors = {name: torch.as_tensor(value) for name, value in samples[number].items()}
    fields = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return sample_of(fields, int(samples.lengths[number]), "the longest of data.function", config)


def sample_of(fields: Fields, length_tokens: int, source: str, config: Config) -> LongestSample:
    """With the fields that it has in a row, where samples lie in one."""
    if not config.update.one_row:
        return LongestSample(fields, length_tokens, source)
    made = {"attention_mask": torch.ones}  # of zeros it would hide all
    row = OneRow()([{name: made.get(name, torch.zeros)(shape, dtype=dtype) for name, (shape, dtype) in fields.items()}])
    fields = {name: (tuple(value.shape[1:]), value.dtype) for name, value in row.items()}
    return LongestSample(fields, length_tokens, source, one_row=True)


def measured(config: Config, console: Console) -> int:
    """Tokens of the longest sample of the data."""
    help_ = "give --length N, the tokens of the longest sample, or data.max_sample_tokens, and no data is read"
    unbounded = config.update.model_copy(update={"micro_batch_size": 1, "max_microbatch_tokens": None})
    try:
        data = load_data(
            config.model_copy(update={"update": unbounded}), load_tokenizer(config.model), alone(), console
        )
    except MegabatchError as error:
        raise MegabatchError(f"{error}; or {help_}") from None
    if data.longest_tokens is None:
        raise MegabatchError(f"the longest sample of a stream is not known; {help_}")
    return data.longest_tokens


def alone() -> Ranks:
    """The one process that plans."""
    return Ranks(0, 1, torch.device("cpu"))
