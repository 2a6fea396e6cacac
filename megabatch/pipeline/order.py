"""The order in which the ranks of a pipeline run the parts of a call, and how long they take together."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from megabatch.pipeline.stages import SCHEDULES

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "B", "I", "W"  # as torch writes them


class Action(NamedTuple):
    """A part of a call: one microbatch through one stage, in one direction."""

    kind: str
    stage: int
    microbatch: int


@cache
def orders_of(schedule: str, num_ranks: int, per_rank: int, num_microbatches: int) -> list[list[Action]]:
    """Return the actions of every rank along "pp", in order.

    Args:
        schedule: A name in `SCHEDULES`.
        num_ranks: Ranks along "pp".
        per_rank: Stages of each.
        num_microbatches: As many as the schedule runs: see `Pipeline.runnable`.
    """
    kind, num_stages = SCHEDULES[schedule], num_ranks * per_rank
    if kind.per_rank == 1:
        # What torch prints as the order of 1F1B numbers the last rank's microbatches from 1.
        early = [num_microbatches] * num_ranks if schedule == "GPipe" else range(num_ranks, 0, -1)
        return [list(order_of_stage(rank, num_early, num_microbatches)) for rank, num_early in enumerate(early)]
    # Attributes of stages that torch reads to order their actions.
    stages = [
        SimpleNamespace(
            stage_index=index, num_stages=num_stages, group_size=num_ranks, group_rank=0, submod=nn.Identity()
        )
        for index in kind.indices(0, num_ranks, per_rank)
    ]
    orders: dict[int, list[Any]] = kind.make(stages, num_microbatches).pipeline_order
    return [_read_all(orders[rank]) for rank in range(num_ranks)]


def order_of_stage(stage: int, num_early: int, num_microbatches: int) -> Iterator[Action]:
    """Yield the actions of a rank with one stage: some forwards, then backwards and forwards in turn."""
    num_early = min(num_early, num_microbatches)
    yield from (Action(FORWARD, stage, index) for index in range(num_early))
    for index in range(num_microbatches):
        yield Action(BACKWARD, stage, index)
        if index + num_early < num_microbatches:
            yield Action(FORWARD, stage, index + num_early)


def _read_all(torch_actions: Sequence[Any]) -> list[Action]:
    """Return torch's actions without bubbles, those that run together one by one."""
    actions: list[Action] = []
    for action in filter(None, torch_actions):
        if action.sub_actions:
            actions += _read_all(action.sub_actions)
        else:
            actions.append(Action(action.computation_type.value, action.stage_index, action.microbatch_index))
    return actions


@cache
def count_held(schedule: str, num_ranks: int, per_rank: int, rank: int, num_microbatches: int) -> float:
    """Return the most microbatches whose activations a rank along "pp" holds for all its layers, at least.

    Arguments as for `orders_of`.
    """
    alive = max_alive = 0
    for action in orders_of(schedule, num_ranks, per_rank, num_microbatches)[rank]:
        alive += {FORWARD: 1, WEIGHT_GRADIENT: 0}.get(action.kind, -1)
        max_alive = max(max_alive, alive)
    return max_alive / per_rank


@cache
def estimate_bubble(
    schedule: str, num_ranks: int, per_rank: int, num_microbatches: int, *, recomputes: bool = False,
    message: float = 0.0,
) -> float:  # fmt: skip
    """Return the time that ranks wait for each other, by the time that they compute, if all stages are alike.

    Args:
        schedule: As for `orders_of`.
        num_ranks: As for `orders_of`.
        per_rank: As for `orders_of`.
        num_microbatches: As for `orders_of`.
        recomputes: Make the forward again in the backward.
        message: Time of a message, by that of a microbatch in all stages of a rank.
    """
    # In forwards: a backward takes as long as two.
    total = 3 + recomputes
    parts = {FORWARD: 1, BACKWARD: total - 1, INPUT_GRADIENT: total - 2, WEIGHT_GRADIENT: 1}
    ends = finish_seconds(
        orders_of(schedule, num_ranks, per_rank, num_microbatches),
        lambda _, action: parts[action.kind] / total / per_rank,
        lambda _, receiver: message,
    )
    return max(ends) / num_microbatches - 1


def finish_seconds(
    orders: Sequence[Sequence[Action]],
    seconds_of: Callable[[int, Action], float],
    message_seconds: Callable[[int, int], float],
) -> list[float]:
    """Return when each rank is through with its actions, in seconds after the first one starts.

    Args:
        orders: As `orders_of` returns them.
        seconds_of: Time of an action of a rank.
        message_seconds: Time of a message from rank to rank, of an activation or its gradient.
    """
    rank_of: dict[int, int] = {}
    for rank, order in enumerate(orders):
        rank_of.update((action.stage, rank) for action in order)
    # By the action that makes the output; for the gradient of an input that is the whole backward.
    done: dict[Action, float] = {}
    ends, positions = [0.0] * len(orders), [0] * len(orders)

    def ready(rank: int, action: Action) -> float | None:
        """Return when the input of an action is there; None if the action that makes it has not run."""
        maker = _maker_of_input(action, len(rank_of))
        if maker is None:
            return 0.0
        if maker not in done:
            return None
        maker_rank = rank_of[maker.stage]
        return done[maker] + (message_seconds(maker_rank, rank) if maker_rank != rank else 0.0)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                if (start := ready(rank, action)) is None:
                    break
                ends[rank] = max(start, ends[rank]) + seconds_of(rank, action)
                done[action._replace(kind=BACKWARD) if action.kind == INPUT_GRADIENT else action] = ends[rank]
                positions[rank] += 1
                moved = True
    assert positions == [len(order) for order in orders], "a rank waits for an action that never runs"
    return ends


def _maker_of_input(action: Action, num_stages: int) -> Action | None:
    """Return the action whose output another needs. None if it needs none of the other actions."""
    kind, stage, index = action
    if kind == WEIGHT_GRADIENT:
        return None
    if kind == FORWARD:
        return Action(FORWARD, stage - 1, index) if stage else None
    if stage == num_stages - 1:
        return Action(FORWARD, stage, index)
    return Action(BACKWARD, stage + 1, index)
