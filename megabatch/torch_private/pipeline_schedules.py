"""Schedules of torch's pipelines."""

from collections.abc import Callable, Iterable
from typing import Any, cast

from megabatch.torch_private.versions import lacking


def run_schedule(schedule: Any, args: list[Any], kwargs: list[Any], *, backward: bool) -> None:
    """``_step_microbatches`` of a schedule, which gives the loss each microbatch's number for a target."""
    schedule._has_backward = backward
    schedule._step_microbatches(args, kwargs, list(range(len(args))), None, False)


def agreement_of_stages() -> tuple[type, str, Callable[..., Any]]:
    """Return the class and the method with which stages tell each other that they know all shapes, and a silent one."""
    from torch.distributed.pipelining import schedules, stage

    schedule: Any = cast(Any, schedules)._PipelineSchedule
    for name in ("_warmup_p2p", "_initialize_pipeline_distributed_state"):  # the second since torch 2.15
        if hasattr(schedule, name):
            return schedule, name, _know_shapes
    base: Any = cast(Any, stage)._PipelineStageBase
    if not hasattr(base, "_get_init_p2p_neighbors_ops"):
        raise lacking("a plan of a pipeline", "_PipelineSchedule._warmup_p2p")
    return base, "_get_init_p2p_neighbors_ops", _send_nothing  # torch 2.11


def _know_shapes(schedule: object, stages: Iterable[Any], *unused: object) -> None:
    from torch.distributed.pipelining import stage

    for pipeline_stage in stages:
        pipeline_stage._inference_mode = cast(Any, stage).InferenceMode.STATIC


def _send_nothing(stage: object) -> list[Any]:
    return []


def messages_of_stages() -> tuple[Any, str]:
    """Return the module and the function that send and receive between stages: a list of operations → of works."""
    from torch.distributed.pipelining import schedules

    return schedules, "_batch_p2p"
