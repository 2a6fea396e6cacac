"""Model: built from its config, then laid over the ranks as a plain model, DDP or FSDP2."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, PreTrainedConfig

from megabatch.errors import MegabatchError
from megabatch.train.config import ModelConfig
from megabatch.train.data import Sample

SHARD_FROM_PARAMETERS = 1_000_000_000  # below, a replica with AdamW's state fits one device and DDP sends least


@dataclass(frozen=True)
class Wrapper:
    """How the model lies over the ranks, and why."""

    name: str  # "plain", "ddp" or "fsdp2"
    reason: str


def build_model(config: ModelConfig, seed: int) -> nn.Module:
    """The model with fresh weights, the same on every rank for the same seed."""
    torch.manual_seed(seed)
    architecture = architecture_of(config)
    try:
        model = AutoModelForCausalLM.from_config(architecture, dtype=getattr(torch, config.dtype))
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
        raise MegabatchError(f"transformers cannot build model.config ({first_line(error)}); change it there") from None
    return cast(nn.Module, model).train()


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
    for key in keys.keys() - known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
        raise MegabatchError(f"unknown key model.config.{key} for model_type {model_type!r}; the nearest key is {near}")
    try:
        return AutoConfig.for_model(model_type, **keys, use_cache=False)
    except Exception as error:  # its validation raises types of its dependencies
        raise MegabatchError(f"transformers refuses model.config ({first_line(error)}); change it there") from None


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
