"""Attention of a chunk to earlier tokens, without copies of keys and masks in each layer.

transformers hides the later tokens of a chunk by a boolean mask [B, 1, T, stop]. Under a mask, its attention for torch
repeats the keys and values of grouped heads for each head, and torch makes numbers of the mask. Each layer keeps both
for its backward. They take more memory than the keys and values themselves. `attend` gives the kernel keys that heads
share, and one mask to all layers. It leaves out tokens before a sliding window.
"""

import contextlib
from collections.abc import Generator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megabatch.torch_private.autograd import count_writes

SPECIAL = ("position_bias", "cache", "softcap")  # arguments of transformers' function that change the attention


class Pattern(NamedTuple):
    """The tokens that a mask shows to all queries."""

    first: int  # column of the mask, before which it shows none
    is_causal: bool  # it shows all tokens up to the query
    num_writes: int = 0  # to the mask, when this was noted


# Of masks, for as long as they live.
_patterns = WeakTensorKeyDictionary()
_numbers = WeakTensorKeyDictionary()


@contextlib.contextmanager
def lean_attention() -> Generator[None]:
    """Let models of transformers whose attention is ``"sdpa"`` call `attend`.

    Nothing is replaced where a program has registered other functions of this name.
    """
    registries: tuple[Any, Any] = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    usual = (sdpa_attention_forward, sdpa_mask)
    if any(registry["sdpa"] is not function for registry, function in zip(registries, usual, strict=True)):
        yield
        return
    for registry, function in zip(registries, (attend, make_mask), strict=True):
        registry["sdpa"] = function
    try:
        yield
    finally:
        for registry in registries:
            del registry["sdpa"]  # a function that is registered later takes effect


def make_mask(*placed: Any, **named: Any) -> Tensor | None:
    """Return the mask that transformers makes, and note what it shows."""
    mask = sdpa_mask(*placed, **named)
    start, window = named.get("q_offset"), named.get("local_size")
    if mask is None or type(start) is not int or named.get("attention_mask") is not None:
        return mask
    num_writes = count_writes(mask)
    if named.get("mask_function") is causal_mask_function:
        is_causal = start + named["q_length"] == named["kv_offset"] + named["kv_length"]
        _patterns[mask] = Pattern(0, is_causal, num_writes)
    elif window is not None and named.get("allow_is_causal_skip"):  # nothing is shown beside the window
        _patterns[mask] = Pattern(max(0, start - window + 1 - named["kv_offset"]), False, num_writes)
    return mask


@torch.compiler.disable
def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **named: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Return the attention [B, T, H, D] as transformers does, from less memory where what the mask shows is known."""
    pattern = None if attention_mask is None else _pattern_of(attention_mask)
    is_special = any(named.get(name) is not None for name in SPECIAL)
    if attention_mask is None or pattern is None or is_special or attention_mask.shape[-1] != key.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **named)
    if pattern.first:
        key, value = key[:, :, pattern.first :], value[:, :, pattern.first :]
    shares_keys = True
    if query.device.type == "cpu":
        mask = _as_numbers(attention_mask, pattern.first, query.dtype)
    elif pattern.is_causal:
        mask = causal_lower_right(query.shape[2], key.shape[2])
        shares_keys = can_use_flash_attention(SDPAParams(query, key, value, None, dropout, False, True))
    else:
        mask, shares_keys = attention_mask[..., pattern.first :], False
    if not shares_keys:
        return sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **named)
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous(), None


def _pattern_of(mask: Tensor) -> Pattern | None:
    """Return what a mask shows. None if that is not known, or the model has written to it since."""
    pattern = cast(Pattern | None, _patterns.get(mask))
    return pattern if pattern is not None and pattern.num_writes == count_writes(mask) else None


def _as_numbers(mask: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """Return the columns of a mask that show tokens, as numbers to add. All layers share them."""
    numbers = cast(Tensor | None, _numbers.get(mask))
    if numbers is None or numbers.dtype != dtype:
        shown = mask[..., first:]
        numbers = torch.full(shown.shape, -torch.inf, dtype=dtype, device=mask.device).masked_fill_(shown, 0.0)
        _numbers[mask] = numbers
    return numbers
