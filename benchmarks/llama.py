"""Llamas of the benchmarks that are meant for a GPU, by their shapes."""

from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


class Shape(NamedTuple):
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool = False  # the head's matrix is that of the input


def config_of(shape: Shape, tokens: int) -> dict[str, Any]:
    """What transformers' AutoConfig takes, and a recipe's model.config."""
    return {
        "model_type": "llama", "vocab_size": shape.vocabulary, "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "max_position_embeddings": tokens, "tie_word_embeddings": shape.tied,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def llama(shape: Shape, tokens: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Fresh weights, made on the device in their dtype."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**config_of(shape, tokens), use_cache=False)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def sizes_of(shape: Shape) -> tuple[int, int]:
    """Parameters, and those without the input's embedding, unless it is the head's matrix too."""
    model = llama(shape, 8, torch.float32, torch.device("meta"))
    whole = sum(each.numel() for each in model.parameters())
    return whole, whole - (0 if shape.tied else shape.vocabulary * shape.hidden)


def flops_per_token(shape: Shape, tokens: int) -> int:
    """Forward and backward of rows of so many tokens, by appendix B of PaLM's paper."""
    return 6 * sizes_of(shape)[1] + 12 * shape.layers * shape.hidden * tokens
