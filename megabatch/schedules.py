"""The pipeline schedules of torch, and what each asks for."""

from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

from torch.distributed.pipelining import schedules as torch_schedules


class Kind(NamedTuple):
    """What a schedule asks for."""

    make: Callable[..., Any]
    per_rank: int | None  # stages; None: any number
    filled: Callable[[int, int, int], int]  # microbatches, ranks, stages -> microbatches that it can run
    goes_back: bool = False  # a V: rank r holds stages r and 2 * ranks - 1 - r; else r, r + ranks, ...
    splits: bool = False  # computes gradients of weights later than those of inputs, without autograd's hooks


def _any(microbatches: int, ranks: int, stages: int) -> int:
    return microbatches


def _one_per_stage(microbatches: int, ranks: int, stages: int) -> int:
    return max(microbatches, stages)


def _whole_rounds(microbatches: int, ranks: int, stages: int) -> int:
    return next(each for each in count(microbatches) if each % max(1, each // ranks) == 0)


SCHEDULES = {
    "GPipe": Kind(torch_schedules.ScheduleGPipe, 1, _any),
    "1F1B": Kind(torch_schedules.Schedule1F1B, 1, _one_per_stage),
    "Interleaved1F1B": Kind(torch_schedules.ScheduleInterleaved1F1B, None, _whole_rounds),
    "LoopedBFS": Kind(torch_schedules.ScheduleLoopedBFS, None, _any),
    "InterleavedZeroBubble": Kind(torch_schedules.ScheduleInterleavedZeroBubble, None, _whole_rounds, splits=True),
    "ZBVZeroBubble": Kind(torch_schedules.ScheduleZBVZeroBubble, 2, _any, goes_back=True, splits=True),
    "DualPipeV": Kind(torch_schedules.ScheduleDualPipeV, 2, _one_per_stage, goes_back=True, splits=True),
}
