"""Precision: what a model's parameters are kept in, and what it computes in."""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from megabatch.train.config import ModelConfig, UpdateConfig


def dtype_of(config: ModelConfig) -> torch.dtype:
    """What the parameters are kept in."""
    return getattr(torch, config.dtype)


def is_mixed(config: ModelConfig) -> bool:
    """Whether the model computes in another dtype than its parameters'."""
    return config.compute_dtype is not None and config.compute_dtype != config.dtype


def accumulation_of(config: UpdateConfig) -> torch.dtype | None:
    """What gradients are added in; None: the parameters' own."""
    return None if config.accumulate_dtype is None else getattr(torch, config.accumulate_dtype)


def policy_of(config: ModelConfig, accumulated: torch.dtype | None) -> MixedPrecisionPolicy:
    """What FSDP2 casts: weights to the dtype of computing, and gradients back before they are added up.

    Without an output_dtype, since a layer's output of another dtype would not go into the next layer's norm.
    """
    if not is_mixed(config):
        return MixedPrecisionPolicy(reduce_dtype=accumulated)
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=accumulated or dtype_of(config))


def boundary_dtype(config: ModelConfig) -> torch.dtype:
    """What goes from stage to stage, and out of the last, of a model that computes by FSDP2's policy or in one type."""
    return torch.bfloat16 if is_mixed(config) else dtype_of(config)


def computing(config: ModelConfig, wrapper_name: str, device: torch.device) -> AbstractContextManager[object]:
    """Surrounds a forward where the precision needs autocast; FSDP2 casts by its own policy."""
    if not is_mixed(config) or wrapper_name == "fsdp2":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def precision_text(config: ModelConfig, wrapper_name: str, accumulated: torch.dtype | None) -> str:
    """The precision in words."""
    if not is_mixed(config):
        is_wider = accumulated is not None and accumulated != dtype_of(config)
        added = f", gradients added in {accumulated}" if is_wider else ""
        return f"precision: {config.dtype} throughout{added.replace('torch.', '')}"
    how = "FSDP2's policy" if wrapper_name == "fsdp2" else "autocast"
    return f"precision: parameters and gradients in {config.dtype}, computed in {config.compute_dtype} ({how})"
