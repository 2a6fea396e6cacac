"""DDP's communication hooks: what one does to gradients is found by trying it, since its code says nothing.

A hook is tried on a throw-away module over the same ranks, on gradients that are known. One that averages, as DDP does
by itself, is exact; one that rounds to bfloat16 on the way is exact to that rounding. float16 turns small gradients,
those of a loss that is divided by its weight, into zeros.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import PlanError, in_one_line

AVERAGING = (default_hooks.allreduce_hook, default_hooks.bf16_compress_hook)
AVERAGES, SUMS, OTHERWISE, FAILED = range(4)  # what a hook was seen to do, from good to bad
SHAPES = ((3, 5), (7,), (2, 2, 2), (33, 4), (1,))  # a hook may treat matrices in a way of their own
NUM_TRIALS = 4  # a hook that remembers gives another answer the second time
SPREAD = (-40.0, 10.0)  # of log2 of the gradients: bfloat16 keeps all of them, float16 and eight bits do not
TOLERANCE = 2.0**-6  # relative, of each element: bfloat16's rounding of a value, of a sum of two and of a quotient


def comm_hooks_of(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """The communication hooks that the user has registered, with their states."""
    return list(cast(Any, ddp)._comm_hooks)


def check_hooks(ddp: DistributedDataParallel) -> None:
    """Raise `PlanError` for a communication hook that does not average over DDP's ranks.

    Where there is a hook that is not known, each rank tries it: collective over DDP's ranks, all raise alike.
    """
    for hook, state in comm_hooks_of(ddp):
        if hook in AVERAGING and state is None:
            continue
        name = getattr(hook, "__name__", type(hook).__name__)
        if not _keeps_nothing(hook) or not (state is None or isinstance(state, dist.ProcessGroup)):
            raise PlanError(
                f"DDP has the communication hook {name!r}, which keeps a state, so what it does to one update may "
                "depend on others; leave the hook out, or give one without state that averages"
            )
        if (fault := _fault(ddp, hook, state)) is not None:
            raise PlanError(f"DDP has the communication hook {name!r}, which {fault}")


def _keeps_nothing(hook: object) -> bool:
    """Whether a hook is a function, closing over nothing that could change."""
    if not isinstance(hook, FunctionType):
        return False  # a method, or an object that is called: both have a self
    inside = [cell.cell_contents for cell in hook.__closure__ or ()]
    return all(map(_is_fixed, [*inside, *(hook.__defaults__ or ()), *(hook.__kwdefaults__ or {}).values()]))


def _is_fixed(value: object) -> bool:
    if isinstance(value, FunctionType):
        return _keeps_nothing(value)
    return value is None or isinstance(value, int | float | str | torch.dtype | dist.ProcessGroup)


def _fault(ddp: DistributedDataParallel, hook: Callable[..., Any], state: object) -> str | None:
    """What is wrong with a hook; None for one that averages, on every rank."""
    group = cast(dist.ProcessGroup, ddp.process_group)
    device = next(ddp.parameters()).device
    seen, raised = AVERAGES, ""
    try:
        for dtype in sorted({each.dtype for each in ddp.parameters() if each.requires_grad}, key=str):
            seen = max(seen, _tried(hook, state, group, device, dtype))
    except Exception as error:  # whatever a hook raises, the other ranks must come to the message below
        seen, raised = FAILED, f": {in_one_line(error)}"
    worst = torch.tensor(seen, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return {
        AVERAGES: None,
        SUMS: "sums over ranks; divide by the number of ranks as DDP does",
        OTHERWISE: "does not average over the ranks of DDP; sum over all of them, divide by their number, "
        "and change nothing else (float16 loses small gradients)",
        FAILED: f"failed when it was tried on a small module{raised}; mend the hook, or leave it out",
    }[int(worst)]


def _tried(
    hook: Callable[..., Any], state: object, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype
) -> int:
    """What a hook does to known gradients."""
    module = _Known(device, dtype)
    small: Any = 1e-4  # megabytes: several buckets
    ddp = DistributedDataParallel(module, process_group=group, bucket_cap_mb=small)
    ddp.register_comm_hook(state, hook)
    worst = AVERAGES
    for trial in range(NUM_TRIALS):
        everyone = [_gradients(trial, rank, group.size()) for rank in range(group.size())]
        ddp.zero_grad()
        ddp([each.to(device, dtype) for each in everyone[group.rank()]]).backward()
        found = [cast(Tensor, weight.grad).double().cpu() for weight in module.weights]
        sums = [torch.stack(each).sum(0) for each in zip(*everyone, strict=True)]
        means = [each / group.size() for each in sums]
        if not all(map(_same, found, means)):
            worst = max(worst, SUMS if all(map(_same, found, sums)) else OTHERWISE)
    return worst


class _Known(nn.Module):
    """A module whose gradients are what it is given."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape, device=device, dtype=dtype) for shape in SHAPES])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def _gradients(trial: int, rank: int, num_ranks: int) -> list[Tensor]:
    """One for each of `SHAPES`, other in every trial, rank and element.

    An element is not zero on two ranks (other ones for each), there of one sign: its sum rounds once, however many
    ranks there are, and nothing cancels.
    """
    shared = torch.Generator().manual_seed(trial)
    own = torch.Generator().manual_seed(1 + trial + NUM_TRIALS * rank)
    made: list[Tensor] = []
    for shape in SHAPES:
        first = torch.randint(num_ranks, shape, generator=shared, device="cpu")
        sign = torch.randint(2, shape, generator=shared, device="cpu") * 2 - 1
        size = torch.empty(shape, dtype=torch.float64, device="cpu").uniform_(*SPREAD, generator=own).exp2()
        made.append(torch.where((rank - first) % num_ranks < 2, sign * size, 0.0))
    return made


def _same(found: Tensor, expected: Tensor) -> bool:
    return bool(((found - expected).abs() <= TOLERANCE * expected.abs()).all())
