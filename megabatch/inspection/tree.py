"""Nested microbatches: move them, clone them, or apply a function to every leaf."""

import copy
import zlib
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
    return microbatch if device.type == "cpu" else each_leaf(microbatch, lambda leaf: _move(leaf, device))


def _move(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, Tensor):
        return _pinned(leaf, device).to(device, non_blocking=True)
    # Graphs and the like have such a method.
    if callable(getattr(leaf, "to", None)):
        return leaf.to(device)
    return leaf


def _pinned(leaf: Tensor, device: torch.device) -> Tensor:
    """Pin a tensor where that is possible: a copy from other memory waits for all of the GPU's queue.

    Torch keeps the pinned memory until the GPU has read it.
    """
    goes_to_gpu = (leaf.device.type, device.type) == ("cpu", "cuda")
    is_plain = (type(leaf), leaf.layout, leaf.requires_grad) == (Tensor, torch.strided, False)
    if not goes_to_gpu or not is_plain or leaf.is_pinned():
        return leaf
    # A view brings its own numbers alone, and channels stay last.
    return torch.empty_like(leaf, pin_memory=True).copy_(leaf)


def clone(microbatch: Any) -> Any:
    """Clone every tensor of a microbatch, so that they may be written to."""
    return each_tensor(microbatch, lambda tensor: tensor.clone())


def memory_of(microbatch: Any) -> set[int]:
    """Return the addresses of a microbatch's storages."""
    addresses: set[int] = set()
    for tensor in tensors_of(microbatch):
        if tensor.layout == torch.strided and tensor.numel():
            addresses.add(tensor.untyped_storage().data_ptr())
    return addresses - {0}


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value."""
    tensors: list[Tensor] = []
    each_tensor(value, lambda tensor: tensors.append(tensor) or tensor)
    return tensors


def hash_tensors(value: object, checksum: int) -> int:
    """Return a hash of the tensors on the CPU in ``value``, continued from ``checksum``."""
    for tensor in tensors_of(value):
        # Reading a tensor of another device would wait for that device.
        if tensor.device.type == "cpu":
            checksum = zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def each_tensor(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return the value with ``function`` applied to every tensor."""
    return each_leaf(value, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def each_leaf(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the value with ``function`` applied to every leaf.

    Mappings that torch's pytree does not know, as transformers' tokenizers return them, are no leaves.
    """
    # A flat mapping of tensors takes a tenth of pytree's time.
    if type(value) is dict and {Tensor}.issuperset(map(type, value.values())):
        return {name: function(leaf) for name, leaf in value.items()}

    def apply(leaf: Any) -> Any:
        if not isinstance(leaf, MutableMapping):
            return function(leaf)
        copied = copy.copy(cast(MutableMapping[Any, Any], leaf))
        for name, inner in leaf.items():
            copied[name] = each_leaf(inner, function)
        return copied

    return pytree.tree_map(apply, value)
