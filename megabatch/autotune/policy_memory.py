"""What a microbatch takes under a policy: measured by small updates, before there is an update that follows it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from megabatch.autotune.memory import Budget
from megabatch.autotune.tuner import MicrobatchTuner
from megabatch.batching.padding import Padding
from megabatch.batching.samples import Batch, Collate
from megabatch.engine.oom_broadcast import OOMBroadcast
from megabatch.engine.prepare import MicrobatchPlanner
from megabatch.losses.contract import LossFunction
from megabatch.planning.limits import MeasuredMicrobatch, MemoryRoom, next_rows
from megabatch.wrappers.detect import choose_policy, detect_wrapper
from megabatch.wrappers.precision import WideGradients


@dataclass(frozen=True)
class PolicyMemory:
    """Measured memory of a microbatch under a policy of reduction; bytes, the same on all ranks."""

    num_bytes: float  # at its peak, beyond what stays: the most over all ranks
    stays_bytes: float  # from microbatch to microbatch: parameters, gradients, states, what else the process has
    allowed_bytes: float  # for a microbatch: the least over all ranks
    limit_bytes: float  # for all of it
    budget: Budget  # of this rank

    @property
    def peak_bytes(self) -> float:
        """Peak bytes of a rank with the microbatch."""
        return self.stays_bytes + self.num_bytes

    def fits(self, spare_bytes: float = 0.0) -> bool:
        """Return True if the microbatch fits with ``spare_bytes`` beside it."""
        return self.num_bytes + spare_bytes <= self.allowed_bytes


def measure_policy(
    policy: str, model: Any, batch: Batch, loss_fn: LossFunction, *, optimizer: optim.Optimizer, rows: int,
    tokens: int | None = None, spare_bytes: float = 0.0, memory_bytes: float | None = None,
    accumulate_dtype: torch.dtype | None = None, budget: Budget | None = None, collate: Collate | None = None,
) -> PolicyMemory | None:  # fmt: skip
    """Measure the memory of a microbatch under a policy of reduction, by a few small updates. Collective.

    As few rows are run as tell that it fits with ``spare_bytes`` beside it, and no more than are sure to. The model,
    its gradients and random numbers are as before.

    Args:
        policy: "last", "every" or "replica_last", as the ``sync`` of a `GradientAccumulator`.
        model: The wrapped model.
        batch: Samples of this rank; the longest is measured.
        loss_fn: The loss of the update.
        optimizer: Its states that are not there yet are counted.
        rows: Samples of the microbatch, each as long as the longest.
        tokens: Padded tokens of the microbatch: fewer rows, where they come to more. None: ``rows`` decide.
        spare_bytes: Room to leave.
        memory_bytes: What this rank may use on its device. None: nine tenths of what is free there.
        accumulate_dtype: As a `GradientAccumulator` takes it.
        budget: The ``budget`` of what was measured before under another policy, so that both have the same room.
        collate: As a `GradientAccumulator` takes it.

    Returns:
        The measurement, the same on all ranks; None where no rank has a sample.

    Raises:
        PlanError: The model, the policy or the device cannot be measured.
    """
    wrapper = detect_wrapper(model, None)
    wide = WideGradients(wrapper.parameters, accumulate_dtype)
    wrapper.accumulate_in(wide)
    choice = choose_policy(wrapper, policy)
    pad = Padding(wrapper.models)
    planner = MicrobatchPlanner(
        None, None, collate, None, choice, wrapper.ranks, wrapper.one_shape, cost=None, padding=pad
    )
    tuner = MicrobatchTuner(model, wrapper, wide, planner, memory_bytes)
    tuner.optimizer = optimizer
    with OOMBroadcast(wrapper.ranks, wrapper.device).listening():
        longest = tuner.longest(planner, batch, loss_fn)
        if longest is None:
            return None
        wanted = max(1.0, float(rows) if tokens is None else min(rows, tokens / longest.num_tokens))
        with tuner.copies(planner, longest, loss_fn, None, budget) as copies:
            measured = [copies.measure(1)]
            while (need := needed(measured, wanted)) > (space := beside(copies.space, spare_bytes)).allowed:
                if (more := next_rows(measured, space, int(wanted))) is None:
                    break
                measured.append(copies.measure(more))
    return PolicyMemory(need, copies.stays_bytes, copies.space.allowed, copies.limit_bytes, copies.budget)


def needed(measured: Sequence[MeasuredMicrobatch], rows: float) -> float:
    """Bytes of a microbatch of ``rows``: k times the rows of another take at most k times its bytes."""
    return min(each.num_bytes * max(1.0, rows / each.rows) for each in measured)


def beside(space: MemoryRoom, num_bytes: float) -> MemoryRoom:
    """What is left of it."""
    return MemoryRoom(space.allowed - num_bytes, space.there - num_bytes)
