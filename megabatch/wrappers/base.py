"""A model without a wrapper: gradients stay on their rank and are summed once per update.

A reducer is what the other modules know of a wrapper. Its ``loss_factor`` undoes the wrapper's own division, so that
gradients come out summed over data and context ranks, in every wrapper and under every policy.
"""

import contextlib
import zlib
from collections.abc import Generator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megabatch.errors import PlanError
from megabatch.torch_private import (
    hooks_after_grad,
    hooks_before_grad,
    is_dtensor,
    is_partial,
    optimizers_in_backward,
    own_of_parameter,
)
from megabatch.wrappers.gradients import WideGradients, refuse_float16
from megabatch.wrappers.mesh import DataRanks

Choice = tuple[str, str]  # a policy, "last", "every" or "replica_last", and why
NO_GRADIENT, DENSE = range(2)  # layouts of a gradient
CHANGED = (
    "parameters were frozen, unfrozen, added or replaced since the GradientAccumulator was made; make a new one "
    "(and wrap the model anew) after such a change"
)


class Wrapper:
    """Sums the whole gradient in `finish_update`; one rank needs no reduction."""

    kind_name = "no wrapper"
    loss_factor = 1.0
    hands_over_in_backward = False  # each whole gradient, as soon as it is reduced
    is_pipeline = False  # the microbatches of a call run together
    one_shape = False  # whether microbatches are filled up to the largest of a call
    forwards_meet = False  # whether ranks wait for each other in every module that is called
    replaces_gradients = False  # whether the wrapper lays other views into ``p.grad`` by itself
    may_pause = True  # whether all of an open update's gradient is in ``p.grad`` between two calls
    collectives = 0  # hash of what was gathered and reduced in this update, in order
    is_counting: bool | None = None  # the microbatch that runs: False for a dummy microbatch

    def __init__(self, model: nn.Module, ranks: DataRanks) -> None:
        self.ranks = ranks
        self.parameters = trainable(model)
        self._dtypes = [each.dtype for each in self.parameters]
        self.device = next(model.parameters()).device  # of what the model reads
        self.norm_groups: list[dist.ProcessGroup] = []  # ranks that hold parts of the gradient which no DTensor tells
        self._wide = WideGradients(self.parameters, None)
        self._model = model
        self.models = [model]  # those that are called
        refuse_float16((f"parameter {name!r}", each.dtype) for name, each in model.named_parameters())

    def note_collective(self, number: int) -> None:
        """Mix one gather or reduction into the hash that ranks compare."""
        self.collectives = zlib.crc32(number.to_bytes(8), self.collectives)

    def accumulate_in(self, wide: WideGradients) -> None:
        """Take in that gradients are added wider. Raises `PlanError` where the wrapper would round them before."""
        self._wide = wide

    def check_unchanged(self) -> None:
        """Raise `PlanError` where an update would be reduced otherwise than what was looked at in the beginning."""
        now = [each for each in self._model.parameters() if each.requires_grad]
        if len(now) != len(self.parameters) or any(a is not b for a, b in zip(now, self.parameters, strict=True)):
            raise PlanError(CHANGED)
        self.check_parameters()

    def check_parameters(self) -> None:
        """Raise `PlanError` for parameters that were cast, and those with hooks that would see single microbatches."""
        dtypes = [each.dtype for each in self.parameters]
        if dtypes != self._dtypes:
            was, now = next((was, now) for was, now in zip(self._dtypes, dtypes, strict=True) if was != now)
            raise PlanError(
                f"parameters were cast from {was} to {now} since the GradientAccumulator was made; make a new one "
                "after such a change"
            )
        for parameter in [each for each in self.parameters if any(own_of_parameter(each))]:
            if names := _foreign_hooks(parameter):
                raise PlanError(
                    f"a parameter of shape {tuple(parameter.shape)} has the hook {names[0]}, which would see the "
                    "gradients of single microbatches; remove it, and work on p.grad after finalize()"
                )

    @property
    def runs_alone(self) -> bool:
        """Whether the microbatch that runs needs no other rank, so that it can be run again in parts."""
        return self.ranks.num_all == self.ranks.degree

    @property
    def accumulating(self) -> Sequence[nn.Parameter]:
        """The parameters in whose ``grad`` autograd adds up."""
        return self.parameters

    def choose(self, policy: str) -> Choice:
        """The policy to follow. Raises `PlanError` for one that this wrapper does not have."""
        self._refuse_replica_last(policy)
        if self.ranks.num_weighing == 1:
            return "last", "one rank, nothing to reduce"
        return "last", "no wrapper: every rank keeps its whole gradient, summed once per update"

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        """Surrounds the forward and backward of one microbatch; ``last`` of its call."""
        yield

    def finish_call(self) -> None:
        """After the last backward of a call: what had to be reduced was reduced, or an error says so."""

    def finish_update(self) -> None:
        """After the last call: gradients are summed over ranks from here on."""
        with torch.no_grad():
            self._agree_on_layouts()
            gradients = [each.grad for each in map(_replicated, self.parameters) if each.grad is not None]
            for group in self.ranks.groups:
                works = [dist.all_reduce(local(gradient), group=group, async_op=True) for gradient in gradients]
                for work in works:
                    cast(dist.Work, work).wait()

    def discard(self) -> None:
        """Drop what an update that failed half-way has left, outside of ``p.grad``."""

    def _agree_on_layouts(self) -> None:
        """Let ranks sum gradients of one layout: zeros where only others have one, dense where layouts differ."""
        if self.ranks.num_weighing == 1:
            return
        layouts = self.ranks.exchange([_layout(parameter.grad) for parameter in self.parameters])
        for parameter, *seen in zip(self.parameters, *layouts, strict=True):
            found = {int(layout) for layout in seen} - {NO_GRADIENT}
            sparse_dims = max(found) - DENSE if len(found) == 1 else 0
            if found and parameter.grad is None:
                parameter.grad = _zeros_of(parameter, sparse_dims, self._wide.dtype_of(parameter))
            elif parameter.grad is not None and parameter.grad.layout != torch.strided and not sparse_dims:
                parameter.grad = parameter.grad.to_dense()

    def _refuse_replica_last(self, policy: str) -> None:
        if policy == "replica_last":
            raise PlanError(
                f"sync is 'replica_last', which is for HSDP, and the model has {self.kind_name}; leave sync out, or "
                "shard with fully_shard over a mesh of two axes (dp_replicate, dp_shard)"
            )


class SelfWrapped(nn.Module):
    """A model that knows its wrapper: of modules that need more than the wrapper of each."""

    def make_wrapper(self, mesh: DeviceMesh | None) -> Wrapper:
        """The wrapper by which gradients are summed. Raises `PlanError` for a mesh that is not the model's."""
        raise NotImplementedError


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that get a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _foreign_hooks(parameter: nn.Parameter) -> list[str]:
    """Names of hooks on a parameter's gradient that are neither torch's nor ours."""
    hooks = [*hooks_before_grad(parameter), *hooks_after_grad(parameter)]
    homes = {hook: getattr(getattr(hook, "func", hook), "__module__", None) or "" for hook in hooks}
    foreign = [hook for hook, home in homes.items() if home.partition(".")[0] not in ("torch", "megabatch")]
    foreign += optimizers_in_backward(parameter)
    return [repr(getattr(hook, "__qualname__", type(hook).__name__)) for hook in foreign]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, on the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def _layout(gradient: Tensor | None) -> int:
    """`NO_GRADIENT`, `DENSE`, or for a sparse one (COO) that many more as it has sparse dimensions."""
    if gradient is None:
        return NO_GRADIENT
    return DENSE + (gradient.sparse_dim() if gradient.layout == torch.sparse_coo else 0)


def _zeros_of(parameter: nn.Parameter, sparse_dims: int, dtype: torch.dtype) -> Tensor:
    """Zeros for a gradient, dense, or sparse in the first ``sparse_dims`` dimensions."""
    if not sparse_dims:
        return torch.zeros_like(parameter, dtype=dtype)
    index = torch.empty(sparse_dims, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(0, *parameter.shape[sparse_dims:], dtype=dtype, device=parameter.device)
    return torch.sparse_coo_tensor(
        index, values, parameter.shape, device=parameter.device, check_invariants=True, is_coalesced=True
    )


def _replicated(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, its gradient summed over the ranks that hold it where each has a part of the sum.

    Sequence parallel leaves the gradients of norms so; whoever reads them would sum them again and again.
    """
    gradient = parameter.grad
    if is_dtensor(gradient) and any(map(is_partial, gradient.placements)):
        parameter.grad = gradient.redistribute(placements=cast(Any, parameter.data).placements)
    return parameter
