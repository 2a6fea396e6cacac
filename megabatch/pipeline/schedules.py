"""The pipeline schedules of torch, and what each asks for of microbatches and stages."""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import PlanError


class ScheduleKind(NamedTuple):
    """Requirements of a schedule."""

    make: Callable[..., Any]
    per_rank: int | None  # stages; None: any number
    filled: Callable[[int, int, int], int]  # microbatches, ranks, stages -> microbatches that it can run
    goes_back: bool = False  # a V: rank r holds stages r and 2 * ranks - 1 - r; else r, r + ranks, ...
    splits: bool = False  # computes gradients of weights later than those of inputs, without autograd's hooks

    def indices(self, rank: int, ranks: int, per_rank: int) -> list[int]:
        """Return the stages of a rank along "pp", of ``ranks`` that have ``per_rank`` stages each."""
        return [rank, 2 * ranks - 1 - rank] if self.goes_back else [rank + ranks * each for each in range(per_rank)]


def _any(microbatches: int, ranks: int, stages: int) -> int:
    return microbatches


def _one_per_stage(microbatches: int, ranks: int, stages: int) -> int:
    return max(microbatches, stages)


def _whole_rounds(microbatches: int, ranks: int, stages: int) -> int:
    return next(each for each in count(microbatches) if each % max(1, each // ranks) == 0)


SCHEDULES = {
    "GPipe": ScheduleKind(torch_schedules.ScheduleGPipe, 1, _any),
    "1F1B": ScheduleKind(torch_schedules.Schedule1F1B, 1, _one_per_stage),
    "Interleaved1F1B": ScheduleKind(torch_schedules.ScheduleInterleaved1F1B, None, _whole_rounds),
    "LoopedBFS": ScheduleKind(torch_schedules.ScheduleLoopedBFS, None, _any),
    "InterleavedZeroBubble": ScheduleKind(
        torch_schedules.ScheduleInterleavedZeroBubble, None, _whole_rounds, splits=True
    ),
    "ZBVZeroBubble": ScheduleKind(torch_schedules.ScheduleZBVZeroBubble, 2, _any, goes_back=True, splits=True),
    "DualPipeV": ScheduleKind(torch_schedules.ScheduleDualPipeV, 2, _one_per_stage, goes_back=True, splits=True),
}
"""The schedules that `Pipeline` takes, by name.

``SCHEDULES[name].per_rank`` is the number of stages of a rank, None where any number will do;
``indices(rank, ranks, per_rank)`` are the stages of a rank; ``splits`` is true for a schedule that computes gradients
of weights without autograd's hooks, which DDP cannot reduce.
"""


def check_stage(stage: nn.Module, schedule: str) -> None:
    """Refuse a stage with nothing to train, or in a wrapper that would reduce when it should not."""
    wrapped = cast(nn.Module, getattr(stage, "_orig_mod", stage))
    if not any(parameter.requires_grad for parameter in stage.parameters()):
        raise PlanError("no parameter of a stage requires a gradient; cut the model so that every stage trains some")
    inside = any(isinstance(each, FSDPModule | DistributedDataParallel) for each in wrapped.modules())
    if inside and not isinstance(stage, FSDPModule | DistributedDataParallel):
        raise PlanError(
            "a wrapper is inside a stage, where the schedule does not find it; call fully_shard on the stage itself "
            "too, and compile with stage.compile() instead of torch.compile(stage)"
        )
    if any(isinstance(each, FullyShardedDataParallel) for each in wrapped.modules()):
        raise PlanError("a stage is wrapped by FSDP1, which a pipeline cannot hold back; use FSDP2's fully_shard")
    if isinstance(stage, DistributedDataParallel) and SCHEDULES[schedule].splits:
        raise PlanError(
            f"{schedule} computes gradients without the hooks by which DDP reduces; wrap the stages with fully_shard "
            "or replicate, or choose 1F1B"
        )
    if isinstance(stage, DistributedDataParallel) and stage.static_graph:
        raise PlanError(
            "DDP with static_graph reduces in its first backward, which a pipeline holds back; leave static_graph out"
        )
