"""Model: built from its config, then laid over the ranks as a plain model, DDP or FSDP2."""

import contextlib
import difflib
import warnings
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from logging import CRITICAL
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, PreTrainedConfig
from transformers.utils import logging

from megabatch.errors import MegabatchError
from megabatch.train.config import ModelConfig
from megabatch.train.data import Sample

SHARD_FROM_PARAMETERS = 1_000_000_000  # a rule of thumb; parallel.wrapper overrules it
OWNED_KEYS = {  # of model.config, that the trainer sets
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "use_cache": "the trainer sets it (false while it trains): leave it out",
}


@dataclass(frozen=True)
class Wrapper:
    """How the model lies over the ranks, and why."""

    name: str  # "plain", "ddp" or "fsdp2"
    reason: str


def build_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model with fresh weights, the same on every rank for the same seed."""
    torch.manual_seed(seed)
    with quiet():
        architecture = architecture_of(config)
        check_sizes(architecture)
        try:
            model = AutoModelForCausalLM.from_config(architecture, dtype=getattr(torch, config.dtype))
            try_forward(model)
        except Exception as error:  # whatever its layers raise for what they cannot be built of
            raise refused(error) from None
    return cast(nn.Module, model).train()


@contextlib.contextmanager
def quiet() -> Generator[None, None, None]:
    """Surrounds transformers' building, whose warnings would stand beside the one line that says what is wrong."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.set_verbosity(verbosity)


@torch.no_grad()
def try_forward(model: nn.Module) -> None:
    """Two tokens through the model: sizes that do not go together show here, and not when a folder has been made."""
    model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.long))


def check_sizes(architecture: PreTrainedConfig) -> None:
    """Raise for a model without layers or without a vocabulary; transformers builds it all the same."""
    names = architecture.attribute_map
    for key in ("num_hidden_layers", "vocab_size"):
        value = getattr(architecture, key, None)
        if isinstance(value, int) and value < 1:
            raise MegabatchError(
                f"model.config.{names.get(key, key)} is {value}; it must be at least 1: change it there"
            )


def refused(error: Exception) -> MegabatchError:
    """The error for what transformers cannot make a model of, with its own first words."""
    return MegabatchError(
        f"transformers refuses model.config ({type(error).__name__}: {first_line(error)}); change it there"
    )


def architecture_of(config: ModelConfig) -> PreTrainedConfig:
    """transformers' config for ``model.config``; it would take unknown keys in silence, this does not."""
    keys = dict(config.config)
    model_type = keys.pop("model_type", None)
    if not isinstance(model_type, str):
        raise MegabatchError('model.config has no model_type; add one, model_type = "llama" say')
    try:
        known = AutoConfig.for_model(model_type).to_dict().keys()
    except ValueError:
        raise MegabatchError(f"model.config.model_type is {model_type!r}, which transformers does not know") from None
    for key in (key for key in keys if key in OWNED_KEYS):
        raise MegabatchError(f"model.config.{key} is not the recipe's to set; {OWNED_KEYS[key]}")
    for key in (key for key in keys if key not in known):
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise MegabatchError(f"unknown key model.config.{key} for model_type {model_type!r}; the nearest key is {near}")
    try:
        return AutoConfig.for_model(model_type, **keys, use_cache=False)
    except Exception as error:  # its validation raises types of its dependencies
        raise refused(error) from None


def check_fit(model: nn.Module, samples: Sequence[Sample], tokenizer: ByT5Tokenizer) -> None:
    """Raise where the model has no embedding for a token or a position of the data."""
    architecture = cast(Any, model).config
    longest = max(len(sample["input_ids"]) for sample in samples)
    positions = getattr(architecture, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        raise MegabatchError(
            f"a sample has {longest} tokens and the model {positions} positions; raise the positions in model.config "
            "(max_position_embeddings or n_positions) or leave such samples out with data.max_sample_tokens"
        )
    num_tokens = max(int(sample["input_ids"].max()) for sample in samples if len(sample["input_ids"])) + 1
    if num_tokens > architecture.vocab_size:
        raise MegabatchError(
            f"the data has token {num_tokens - 1} and the model a vocabulary of {architecture.vocab_size}; "
            f"set model.config.vocab_size to {len(tokenizer)}"
        )


def choose_wrapper(asked: str | None, num_ranks: int, model: nn.Module) -> Wrapper:
    """The wrapper that was asked for, or the one that suits the number of ranks and parameters."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if asked is not None:
        return Wrapper(asked, "asked for")
    if num_ranks == 1:
        return Wrapper("plain", "one process")
    if num_parameters < SHARD_FROM_PARAMETERS:
        return Wrapper("ddp", f"{num_parameters:,} parameters are below {SHARD_FROM_PARAMETERS:,}: replicas send least")
    return Wrapper("fsdp2", f"{num_parameters:,} parameters are {SHARD_FROM_PARAMETERS:,} or more: sharded they fit")


def wrap(model: nn.Module, wrapper: Wrapper) -> nn.Module:
    """The model laid over the ranks."""
    if wrapper.name == "ddp":
        return DistributedDataParallel(model)
    if wrapper.name == "fsdp2":
        block_names = cast(Any, model)._no_split_modules or ()
        for module in model.modules():
            if type(module).__name__ in block_names:
                fully_shard(module)
        fully_shard(model)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """The model as transformers knows it; parameters and shards are the wrapped ones."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def reshard(model: nn.Module) -> None:
    """Drop FSDP2's unsharded weights after forwards without a backward: the next update would not be seen in them."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
