"""DistributedDataParallel for fake tensors, on which its own reducer, in C++, fails.

It allocates, reduces and copies as that reducer does in torch 2.13. All gradients share one bucket until the first
reduction has shown their order, then buckets have the size of ``bucket_cap_mb``. A gradient that was not reduced lies
beside its bucket, and with gradient_as_bucket_view=True moves into it with the reduction.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.torch_private.autograd import call_after_backward

MIB = 2**20
DEFAULT_BUCKET_MB, FIRST_BUCKET_MB = 25.0, 1.0  # torch's; the first is small so that reduction begins early


class Bucket:
    """Gradients that one all-reduce sums, contiguous in memory."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        parts = self.flat.split(sizes)
        self.views = {parameter: part.view_as(parameter) for parameter, part in zip(parameters, parts, strict=True)}
        self.waiting: set[nn.Parameter] = set()


class Replica(DistributedDataParallel):
    """DistributedDataParallel in a simulation.

    Args:
        module: The model, which may still be on the meta device.
        process_group: As DDP's.
        bucket_cap_mb: As DDP's; None is its default, 25 MiB after a first one of 1 MiB.
        gradient_as_bucket_view: As DDP's.
        find_unused_parameters: As DDP's; unused gradients are reduced as zeros after the backward.
        broadcast_buffers: As DDP's.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        nn.Module.__init__(self)  # without DDP's, which makes the reducer
        state: dict[str, Any] = {
            "process_group": process_group or dist.group.WORLD,
            "static_graph": False,
            "mixed_precision": None,
            "require_backward_grad_sync": True,
            "require_forward_param_sync": True,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "find_unused_parameters": find_unused_parameters,
            "forward_sync_buffers": broadcast_buffers,
            "broadcast_buffers": broadcast_buffers,
            "modules_buffers": list(module.buffers()),
            "_comm_hooks": [],
            "_join_config": SimpleNamespace(enable=False),
        }
        vars(self).update(state)
        self.module = module
        cap = DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb
        first = FIRST_BUCKET_MB if bucket_cap_mb is None else cap
        self._caps_bytes = [int(first * MIB), int(cap * MIB)]
        self._buckets: list[Bucket] = []
        self._order: list[nn.Parameter] = []  # of gradients in the first backward that reduces
        self._is_rebuilt = find_unused_parameters  # DDP never does it then
        self._reduces = False  # in the backward of the last forward
        self._is_backward = False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not self._buckets:
            self._make_first_buckets()
        else:
            self._rebuild_buckets()
        if self.require_forward_param_sync:
            self._sync_buffers()
        self._reduces = torch.is_grad_enabled() and bool(self.require_backward_grad_sync)
        self.require_forward_param_sync = self._reduces
        if self._reduces:
            self.prepare_for_backward([])
        return self.module(*inputs, **named)

    @property
    def reducer(self) -> "Replica":
        """The object that holds the buckets, as in DDP."""
        return self

    def prepare_for_backward(self, _: list[Tensor]) -> None:
        """Reduce in the next backward, as the last one of a pipeline's stage does after forwards under ``no_sync``."""
        self._reduces = True
        for bucket in self._buckets:
            bucket.waiting = set(bucket.views)

    def _rebuild_buckets(self) -> None:
        if self._order and not self._is_rebuilt:
            self._rebuild()

    def memory(self) -> list[Tensor]:
        """Return the memory of the buckets, which exists from the first forward on."""
        return [bucket.flat for bucket in self._buckets]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {"num_parameter_tensors": len(self._trained())}

    def _check_reducer_finalized(self) -> None:
        if any(bucket.waiting for bucket in self._buckets):
            raise RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _make_first_buckets(self) -> None:
        """Make the first buckets: one for each dtype, or of the final size with find_unused_parameters."""
        parameters = self._trained()
        self._buckets = _make_buckets(parameters, self._caps_bytes if self.find_unused_parameters else [2**63])[::-1]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _rebuild(self) -> None:
        """Make the buckets anew in the order of gradients, before the first forward after a reduction."""
        self._buckets = []  # first, as DDP does
        self._buckets = _make_buckets(self._order, self._caps_bytes)
        self._is_rebuilt = True

    def _sync_buffers(self) -> None:
        """Broadcast the buffers of rank 0."""
        buffers = list(self.module.buffers()) if self.forward_sync_buffers else []
        for dtype in sorted({buffer.dtype for buffer in buffers}, key=str):
            flat = torch.cat([buffer.flatten() for buffer in buffers if buffer.dtype == dtype])
            dist.broadcast(flat, group=self._group, group_src=0)

    @property
    def _group(self) -> dist.ProcessGroup:
        return cast(dist.ProcessGroup, self.process_group)

    def _ready(self, parameter: Tensor) -> None:
        """Reduce the bucket of a new gradient once it is full."""
        if not self._reduces:
            return
        if not self._is_backward:
            self._is_backward = True
            call_after_backward(self._finish)
        if not self._is_rebuilt:
            self._order.append(cast(nn.Parameter, parameter))
        bucket = next(candidate for candidate in self._buckets if parameter in candidate.views)
        self._move(cast(nn.Parameter, parameter), bucket)
        bucket.waiting.discard(cast(nn.Parameter, parameter))
        if not bucket.waiting:
            dist.all_reduce(bucket.flat, group=self._group)

    def _move(self, parameter: nn.Parameter, bucket: Bucket) -> None:
        """Write a gradient, divided by the number of ranks, into its bucket."""
        view = bucket.views[parameter]
        if parameter.grad is view:
            view.div_(self._group.size())
            return
        assert parameter.grad is not None  # it has just come
        torch.mul(parameter.grad, 1 / self._group.size(), out=view)
        if self.gradient_as_bucket_view:
            parameter.grad = view

    def _finish(self) -> None:
        """Close a backward that reduces."""
        self._is_backward = False
        if self.find_unused_parameters:
            self._reduce_unused()
        if not self.gradient_as_bucket_view and not any(bucket.waiting for bucket in self._buckets):
            for bucket in self._buckets:
                for parameter, view in bucket.views.items():
                    if parameter.grad is not None:
                        parameter.grad.copy_(view)

    def _reduce_unused(self) -> None:
        for bucket in self._buckets:
            for parameter in bucket.waiting:
                bucket.views[parameter].zero_()
            if bucket.waiting:
                bucket.waiting = set()
                dist.all_reduce(bucket.flat, group=self._group)
        used = torch.empty(len(self._trained()), dtype=torch.int32, device=self._buckets[0].flat.device)
        dist.all_reduce(used, group=self._group)


def _make_buckets(parameters: list[nn.Parameter], caps_bytes: list[int]) -> list[Bucket]:
    """Make buckets in this order, by dtype; each is full at its cap, and the last cap holds for the rest."""
    buckets: list[Bucket] = []
    filling: dict[torch.dtype, tuple[list[nn.Parameter], int]] = {}
    caps = dict.fromkeys((parameter.dtype for parameter in parameters), 0)
    for parameter in parameters:
        members, num_bytes = filling.get(parameter.dtype, ([], 0))
        members, num_bytes = [*members, parameter], num_bytes + parameter.numel() * parameter.element_size()
        if num_bytes >= caps_bytes[min(caps[parameter.dtype], len(caps_bytes) - 1)]:
            buckets.append(Bucket(members))
            caps[parameter.dtype] += 1
            filling.pop(parameter.dtype, None)
        else:
            filling[parameter.dtype] = members, num_bytes
    return [*buckets, *(Bucket(members) for members, _ in filling.values())]
