"""How long an operation takes on a device: its arithmetic, or the memory that it reads and writes, whichever is longer.

No launch costs, no host, nothing that overlaps: what is left out makes small models slower than they are said to be.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from megabatch.simulate.devices import Device

aten = torch.ops.aten
FREE = {  # of what moves no bytes beside torch's views
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten._unsafe_view,
    aten._reshape_alias,
    aten.lift_fresh,
    aten.set_,
    aten.resize_,
}


class Cost(NamedTuple):
    """Of one operation."""

    flops: int
    seconds: float
    is_arithmetic: bool  # whether arithmetic takes longer than memory


NOTHING = Cost(0, 0.0, False)


def cost_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, device: Device) -> Cost:
    """The cost of an operation of torch that is no view, by the shapes of what goes in and what comes out."""
    if func._overloadpacket in FREE or func.namespace not in ("aten", "fsdp"):
        return NOTHING
    tensors = [*tensors_in(args), *tensors_in(kwargs.values()), *tensors_in((result,))]
    moving = sum(tensor.numel() * tensor.element_size() for tensor in tensors) / device.memory_bytes_per_second
    formula = FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    if formula is None:
        return Cost(0, moving, False)
    flops = int(formula(*args, **kwargs, out_val=result))
    arithmetic = flops / device.flops_per_second(next(tensors_in((result,))).dtype)
    return Cost(flops, max(moving, arithmetic), arithmetic > moving)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)


def _experts(tokens: Tensor, weights: Tensor, *_: object, **__: object) -> int:
    """[T, K] by one of [E, K, N] for each row; in the backward of weights [K, T] by [T, N], a part of T for each."""
    return 2 * tokens.shape[-2] * tokens.shape[-1] * weights.shape[-1]


# What torch has no formula for: what a CPU, and a fake one too, runs.
FORMULAS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._grouped_mm: _experts,
}
