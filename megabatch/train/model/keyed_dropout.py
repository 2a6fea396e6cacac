"""Dropout that follows the sample: a mask is a function of the seed, the update, the sample, the layer and the place.

A mask that a generator draws depends on what the rank drew before, so on the cut and the number of ranks. This one does
not: a run that resumes on other ranks, or in another cut, makes the updates of a run that was never stopped.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megabatch import JointLoss
from megabatch.train.runtime.plugins import in_place_of

# Key of a sample, int64, which the model does not get.
KEY = "dropout_key"
# Factors of splitmix64, whose mixing this is.
FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
# Odd steps between the places along each dimension.
STEPS = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


class SampleKeys:
    """Keys of the samples of the running microbatch, [B] int64; None: masks are drawn by a generator."""

    current: Tensor | None = None


class KeyedDropout(nn.Module):
    """`nn.Dropout` of inputs [B, ...], with samples in dim 0 and padding at the end of other dimensions.

    A module that a forward calls twice uses one mask for both. Inputs with another dim 0 than there are keys, and a
    forward without keys, draw from torch's generator.

    Args:
        p: Share of elements that become zero.
        layer: Number of the module in its model.
        keys: Keys of the running microbatch, shared by all modules of a model.
    """

    def __init__(self, p: float, layer: int, keys: SampleKeys) -> None:
        super().__init__()
        self.p, self.layer, self.keys = p, layer, keys

    def forward(self, input: Tensor) -> Tensor:
        """Return the input with a part of it zero, and the rest larger by as much."""
        keys = self.keys.current
        if keys is None or input.dim() == 0 or len(input) != len(keys) or not 0 < self.p < 1:
            return functional.dropout(input, self.p, self.training)
        if not self.training:
            return input
        dropped = numbers_of(keys, self.layer, input.shape[1:]) < int(self.p * 2**53)
        return input.masked_fill(dropped, 0.0) * (1 / (1 - self.p))

    def extra_repr(self) -> str:
        """Describe the module."""
        return f"p={self.p:g}, layer={self.layer}"


def numbers_of(keys: Tensor, layer: int, shape: torch.Size) -> Tensor:
    """Return a random whole number in [0, 2**53) for each place, [B, *shape], which no size of a dimension changes."""
    numbers = mixed(keys + layer * STEPS[0])
    for number, size in enumerate(shape):
        places = torch.arange(1, size + 1, device=keys.device) * STEPS[number % len(STEPS)]
        numbers = mixed(numbers.unsqueeze(-1) + places)
    return numbers.bitwise_and_(2**53 - 1)


def mixed(numbers: Tensor) -> Tensor:
    """Return int64 numbers of which each bit depends on all bits of those given (splitmix64). Products wrap around."""
    numbers = numbers.bitwise_xor((numbers >> 30).bitwise_and_(2**34 - 1)).mul_(FACTORS[0])
    numbers.bitwise_xor_((numbers >> 27).bitwise_and_(2**37 - 1)).mul_(FACTORS[1])
    return numbers.bitwise_xor_((numbers >> 31).bitwise_and_(2**33 - 1))


def key_dropouts(model: nn.Module) -> None:
    """Put a `KeyedDropout` in the place of every `nn.Dropout` of the model."""
    keys, layer = SampleKeys(), 0
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout and child.p > 0:
                keyed = KeyedDropout(child.p, layer, keys)
                setattr(module, name, keyed.train(child.training))
                layer += 1


def keys_of(model: nn.Module) -> SampleKeys | None:
    """Return the keys that the dropout of a model goes by; None for a model without such dropout."""
    return next((module.keys for module in model.modules() if isinstance(module, KeyedDropout)), None)


def with_keys(loss_fn: Any, keys: SampleKeys) -> Any:
    """Return the loss. It takes the keys of samples out of each microbatch, before the model gets it."""
    if isinstance(loss_fn, JointLoss):
        return JointLoss(with_keys(loss_fn.encode, keys), loss_fn.loss)

    def compute(model: Any, microbatch: Any, **divisor: Any) -> Any:
        # A backward may compute layers again: keys stay until the next forward.
        keys.current = microbatch.get(KEY)
        inputs = {name: value for name, value in microbatch.items() if name != KEY}
        return loss_fn(model, inputs, **divisor)

    return in_place_of(loss_fn, compute)


def keying(seed: int) -> Callable[[Any, int, int | str], Any]:
    """Return the function that gives a sample, of a number or a name, its key in an update."""

    def with_key(sample: Any, update: int, name: int | str) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        digest = hashlib.blake2b(f"{seed} {update} {name}".encode(), digest_size=8).digest()
        return {**sample, KEY: torch.tensor(int.from_bytes(digest, "big", signed=True))}

    return with_key
