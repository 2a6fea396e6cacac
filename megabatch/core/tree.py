"""Nested microbatches: move them, clone them, or apply a function to every leaf."""

import copy
from collections.abc import Callable, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.torch_private.operations import pytree


def to_device(microbatch: Any, device: torch.device) -> Any:
    """Return the microbatch with its tensors on ``device``.

    A copy from the CPU to a GPU goes through pinned memory, so that the host does not wait for it. Whatever has a
    method ``to``, such as a graph, is moved by that; other values stay as they are.

    Args:
        microbatch: Tensors in mappings, lists and tuples of any depth.
        device: Where they shall be.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf if leaf.device == device else _pinned(leaf, device).to(device, non_blocking=True)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf  # graphs and the like

    return microbatch if device.type == "cpu" else each_leaf(microbatch, move)


def _pinned(leaf: Tensor, device: torch.device) -> Tensor:
    """Pin a tensor where that is possible: a copy from other memory waits for all of the GPU's queue.

    Torch keeps the pinned memory until the GPU has read it.
    """
    is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and not leaf.requires_grad
    if device.type != "cuda" or leaf.device.type != "cpu" or not is_plain or leaf.is_pinned():
        return leaf
    return torch.empty_like(leaf, pin_memory=True).copy_(leaf)  # of a view its own numbers alone; channels stay last


def clone(microbatch: Any) -> Any:
    """Clone every tensor of a microbatch, so that they may be written to."""
    return each_leaf(microbatch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def memory_of(microbatch: Any) -> set[int]:
    """Return the addresses of a microbatch's storages."""
    addresses: set[int] = set()

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.numel():
            addresses.add(leaf.untyped_storage().data_ptr())
        return leaf

    each_leaf(microbatch, note)
    return addresses - {0}


def each_leaf(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the value with ``function`` applied to every leaf.

    Mappings that torch's pytree does not know, as transformers' tokenizers return them, are no leaves.
    """
    if type(value) is dict and all(type(leaf) is Tensor for leaf in value.values()):
        return {name: function(leaf) for name, leaf in value.items()}  # a tenth of pytree's time

    def apply(leaf: Any) -> Any:
        if not isinstance(leaf, MutableMapping):
            return function(leaf)
        copied = copy.copy(cast(MutableMapping[Any, Any], leaf))
        for name, inner in leaf.items():
            copied[name] = each_leaf(inner, function)
        return copied

    return pytree.tree_map(apply, value)
