"""Gradients whose sums and norm have the same bits in any order, for `SameBits`."""

from collections.abc import Sequence
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.core.wrapper import local
from megabatch.torch_private.classes import is_dtensor
from megabatch.wrappers.wide_gradients import WideGradients

# The smallest value of the largest gradient, whose square float64 must hold.
LEAST = 2.0**-200
# Bits that a sum of squares keeps.
BITS_OF_NORM = 40
# Elements whose squares stay in a CPU's cache.
PIECE = 1 << 16


class ExactGradients(WideGradients):
    """Wide gradients, of which every parameter has one at the end: zeros, if no rank has used it.

    FSDP2 gives an unused parameter zeros and a plain model leaves it None, which optimizers step differently.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        super().__init__(parameters, dtype)
        self._parameters = parameters

    def finish(self) -> None:
        super().finish()
        # An update without weight has no gradient.
        if any(parameter.grad is not None for parameter in self._parameters):
            # A sum of zeros has a sign that depends on the dummy microbatches.
            for parameter in self._parameters:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.add_(0.0)

    def norm(
        self, parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup],
        uncounted: Sequence[nn.Parameter],
    ) -> Tensor:  # fmt: skip
        return exact_norm(parameters)


def exact_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the 2-norm of the gradients of all parameters, with the same bits however they are sharded.

    Squares are rounded to a grid on which float64 adds all of them without rounding: ``(x + C) - C``. The grid follows
    from the largest gradient of all ranks and the number of elements. What it cuts off is rounded to a finer grid, and
    so on to 40 bits below the largest square, since the small squares of a large model may outweigh its largest.
    """
    sharded: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if (gradient := parameter.grad) is not None:
            sharded.setdefault(_shard_groups(gradient), []).append(local(gradient).detach())
    device, bits = parameters[0].device, sum(parameter.numel() for parameter in parameters).bit_length()
    num_cached = PIECE if device.type == "cpu" else PIECE << 8
    largest = torch.zeros((), dtype=torch.float64, device=device)
    for groups, gradients in sharded.items():
        maxima = [gradient.abs().max().double() for gradient in gradients if gradient.numel()]
        local_largest = torch.stack([torch.zeros_like(largest), *maxima]).max()
        for group in groups:
            dist.all_reduce(local_largest, op=dist.ReduceOp.MAX, group=group)
        largest = torch.maximum(largest, local_largest)
    largest = largest.clamp(min=LEAST)
    # The power of two above the largest, which is exact.
    power = largest / torch.frexp(largest).mantissa
    # Adding and subtracting 1.5 * 2**n rounds to the last bit of 2**n, in any order of the sum. The first shift rounds
    # to 2**(bits - 52) of the largest square.
    shifts = [power * power * (1.5 * 2.0**bits)]
    while (53 - bits) * len(shifts) < bits + BITS_OF_NORM:
        shifts.append(shifts[-1] * 2.0 ** (bits - 53))
    total = torch.zeros(len(shifts), dtype=torch.float64, device=device)
    for groups, gradients in sharded.items():
        local_sums = torch.zeros_like(total)
        for piece in chain.from_iterable(gradient.flatten().split(num_cached) for gradient in gradients):
            remainder = piece.double().square()
            for level, shift in enumerate(shifts):
                part = (remainder + shift).sub_(shift)
                local_sums[level] += part.sum()
                remainder -= part
        for group in groups:
            dist.all_reduce(local_sums, group=group)
        total += local_sums
    return total.sum().sqrt()


def _shard_groups(gradient: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over whose ranks a gradient is sharded, one for each such axis of its mesh."""
    if not is_dtensor(gradient):
        return ()
    axes = enumerate(gradient.placements)
    return tuple(gradient.device_mesh.get_group(axis) for axis, placement in axes if placement.is_shard())
