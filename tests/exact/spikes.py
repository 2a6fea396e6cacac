"""A model of the user's that runs out of memory where it is told to. Plain torch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

PLACES = {  # modules by model, in the order of the forward; the first begins it
    "tokens": ("embedding", "blocks.0", "blocks.1", "head"),
    "language": ("transformer.wte", "transformer.h.0.mlp", "transformer.h.1.mlp", "lm_head"),
    "small": ("embedding", "blocks.0.down", "blocks.1.down", "head"),
}


class _Fails(torch.autograd.Function):
    """The tensor that it is given, whose gradient does not fit in memory."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Spikes:
    """Raises `torch.OutOfMemoryError` in some forwards of a model, counted from its first, or in their backwards."""

    def __init__(self, model: nn.Module, places: tuple[str, ...]) -> None:
        self.when: Mapping[int, tuple[str, int]] = {}  # by forward: "forward" or "backward", and the place
        self.num_forwards = 0
        model.get_submodule(places[0]).register_forward_pre_hook(self._begin)
        for index, name in enumerate(places):
            model.get_submodule(name).register_forward_hook(partial(self._end, index))

    def set(self, when: Mapping[int, tuple[str, int]]) -> None:
        """Begin to count anew."""
        self.when, self.num_forwards = when, 0

    def _begin(self, *_: object) -> None:
        self.num_forwards += 1

    def _end(self, place: int, _module: nn.Module, _inputs: Any, output: Tensor) -> Tensor | None:
        phase, here = self.when.get(self.num_forwards - 1, ("", -1))
        if here != place:
            return None
        if phase == "forward":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return _Fails.apply(output)
