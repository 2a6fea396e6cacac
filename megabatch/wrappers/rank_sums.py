"""Sums of gradients over ranks, where no wrapper reduces them."""

from collections import Counter, deque
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.core.gradients import Gradients
from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Wrapper, local
from megabatch.torch_private.classes import is_dtensor, is_partial

# Gradients up to this size are summed together, as in DDP.
BUCKET_BYTES = 25 * 2**20
BUCKETS_IN_FLIGHT = 3
# Layouts of a gradient.
NO_GRADIENT, DENSE = range(2)


def sum_over_ranks(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Add up tensors over the ranks of a group, in place: small ones together in buckets, as DDP does.

    A bucket has one dtype and device. A tensor that fills one by itself, and a sparse one, is not copied.
    """
    begun: deque[tuple[list[Tensor], Tensor, dist.Work]] = deque()
    for bucket in _buckets(tensors):
        is_alone = len(bucket) == 1 and (bucket[0].layout != torch.strided or bucket[0].is_contiguous())
        flat = bucket[0] if is_alone else torch.cat([tensor.reshape(-1) for tensor in bucket])
        begun.append((bucket, flat, cast(dist.Work, dist.all_reduce(flat, group=group, async_op=True))))
        if len(begun) == BUCKETS_IN_FLIGHT:
            _end_sum(*begun.popleft())
    while begun:
        _end_sum(*begun.popleft())


def _end_sum(bucket: list[Tensor], flat: Tensor, work: dist.Work) -> None:
    work.wait()
    if flat is bucket[0]:
        return
    parts = flat.split([tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Generator[list[Tensor]]:
    """Yield tensors in their order, in lists of one dtype and device: `BUCKET_BYTES` at most, or one tensor."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    num_bytes: Counter[tuple[torch.dtype, torch.device]] = Counter()
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.nbytes >= BUCKET_BYTES:
            yield [tensor]
            continue
        kind = tensor.dtype, tensor.device
        bucket = open_buckets.setdefault(kind, [])
        if num_bytes[kind] + tensor.nbytes > BUCKET_BYTES:
            yield bucket.copy()
            bucket.clear()
            num_bytes[kind] = 0
        bucket.append(tensor)
        num_bytes[kind] += tensor.nbytes
    yield from filter(None, open_buckets.values())


def _layout(gradient: Tensor | None) -> int:
    """Return `NO_GRADIENT`, `DENSE`, or for a sparse gradient (COO) `DENSE` plus its number of sparse dimensions."""
    if gradient is None:
        return NO_GRADIENT
    return DENSE + (gradient.sparse_dim() if gradient.layout == torch.sparse_coo else 0)


def zeros_of(parameter: nn.Parameter, sparse_dims: int, dtype: torch.dtype) -> Tensor:
    """Return zeros for a gradient, dense, or sparse in the first ``sparse_dims`` dimensions."""
    if not sparse_dims:
        return torch.zeros_like(parameter, dtype=dtype)
    index = torch.empty(sparse_dims, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[sparse_dims:], dtype=dtype, device=parameter.device)
    return torch.sparse_coo_tensor(
        index, values, parameter.shape, device=parameter.device, check_invariants=True, is_coalesced=True
    )


def _replicated(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter, and sum its gradient if that is a partial DTensor.

    Sequence parallelism leaves partial gradients in norm layers. Without this, each reader would sum them again.
    """
    gradient = parameter.grad
    if is_dtensor(gradient) and any(map(is_partial, gradient.placements)):
        parameter.grad = gradient.redistribute(placements=cast(Any, parameter.data).placements)
    return parameter


def agree_on_layouts(parameters: Sequence[nn.Parameter], ranks: DataRanks, wide: Gradients) -> None:
    """Give all ranks gradients of one layout: zeros if only other ranks have one, dense if layouts differ."""
    if ranks.num_weighing == 1:
        return
    layouts = ranks.exchange_numbers([_layout(parameter.grad) for parameter in parameters])
    for parameter, *parameter_layouts in zip(parameters, *layouts, strict=True):
        held_layouts = set(parameter_layouts) - {NO_GRADIENT}
        sparse_dims = int(max(held_layouts)) - DENSE if len(held_layouts) == 1 else 0
        gradient = parameter.grad
        if gradient is None:
            if held_layouts:
                parameter.grad = zeros_of(parameter, sparse_dims, wide.dtype_of(parameter))
        elif gradient.layout != torch.strided and not sparse_dims:
            parameter.grad = gradient.to_dense()


def sum_gradients(parameters: Sequence[nn.Parameter], ranks: DataRanks, wide: Gradients) -> None:
    """Sum the gradients of an update over ranks."""
    agree_on_layouts(parameters, ranks, wide)
    replicated = map(_replicated, parameters)
    gradients = [local(parameter.grad) for parameter in replicated if parameter.grad is not None]
    for group in ranks.groups:
        sum_over_ranks(gradients, group)


class SummedWrapper(Wrapper):
    """Sums the whole gradient of a model without a wrapper in `finish_update`."""

    def finish_update(self) -> None:
        """Sum the gradients over ranks, after the last call of an update."""
        with torch.no_grad():
            sum_gradients(self.parameters, self.ranks, self._wide)
