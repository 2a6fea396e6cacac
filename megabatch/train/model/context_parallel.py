"""Context parallelism of a transformers model: the attention of `context_parallel` as one of its implementations."""

from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from megabatch.batching import context_parallel
from megabatch.errors import PlanError

FAMILIES = ("gpt2", "gpt_neox", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")  # tested against uncut runs
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # others look at the longest position, which ranks do not share
NOT_KNOWN = ("sliding_window", "softcap", "position_bias", "s_aux")  # what changes attention beyond order and documents


def attend_over(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Let the layers of ``model`` attend over the ranks of ``group``; from then on it runs stretches of microbatches.

    Raises `PlanError` for a model in which positions see each other in another way than by full causal attention.
    """
    check_model(model)
    name = f"megabatch_context_{group.group_name}"  # a group has its own, since models may have different groups
    AttentionInterface.register(name, _implementation(context_parallel.GatheredAttention(group)))
    model.set_attn_implementation(name)


def check_model(model: PreTrainedModel) -> None:
    """Raise `PlanError` where gathered attention would not be what the model computes in one piece."""
    config = cast(Any, model.config)
    if config.model_type not in FAMILIES:
        raise PlanError(
            f"context parallelism was asked for a model of type {config.model_type!r}, where it is not tested; "
            f"use one of {', '.join(FAMILIES)}, or a mesh without cp"
        )
    if seen := _other_attention(config):
        raise PlanError(f"the model has {seen}; context parallelism needs full causal attention in every layer")
    for rope_type in _rope_types(getattr(config, "rope_parameters", None)):
        if rope_type not in ROPE_TYPES:
            raise PlanError(
                f"the model's rotary positions are of type {rope_type!r}, which looks at the longest position that a "
                f"rank has; context parallelism needs one of {', '.join(ROPE_TYPES)}"
            )


def _other_attention(config: Any) -> str | None:
    """What a layer has that is not full causal attention, in words."""
    kinds = sorted({*(getattr(config, "layer_types", None) or ())} - {"full_attention"})
    window = getattr(config, "sliding_window", None)
    if kinds or window:
        return ", ".join(kinds) or f"a sliding window of {window} tokens"
    return None if getattr(config, "is_causal", True) else "attention that is not causal"


def _rope_types(parameters: Any) -> list[str]:
    """The type of rotary positions, or one per kind of layer."""
    if not isinstance(parameters, dict):
        return []
    found = cast(dict[str, Any], parameters)
    nested = [rope_type for value in found.values() for rope_type in _rope_types(value)]
    return [str(found["rope_type"]), *nested] if "rope_type" in found else nested


def _implementation(attention: context_parallel.GatheredAttention) -> Any:
    def forward(
        module: nn.Module,
        query: Tensor,  # [B, H, L, D]
        key: Tensor,  # [B, K, L, D]
        value: Tensor,  # [B, K, L, D]
        attention_mask: Tensor | None,  # the documents, [B, 1, 1, T or 0]
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        set_options = [name for name in NOT_KNOWN if options.get(name) is not None]
        if set_options or not causal:
            seen = ", ".join(set_options) or "attention that is not causal"
            raise PlanError(
                f"{type(module).__name__} asks for {seen}; context parallelism has full causal attention only"
            )
        output = attention(query, key, value, attention_mask, scale=scaling, dropout=dropout)
        return output.transpose(1, 2).contiguous(), None  # [B, L, H, D]

    return forward
