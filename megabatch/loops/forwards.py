"""Calls without a backward: outputs by sample, and quotients of a loss. An open update stays as it is."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from megabatch.core.call import MicrobatchStep, PreparedBatch, agree_on_call, iterate_steps, with_dummies
from megabatch.core.contract import LossFunction, LossHooks, loss_hooks, terms_of
from megabatch.core.samples import Batch, Microbatch
from megabatch.core.update import OpenUpdate
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, PlanError
from megabatch.inspection import random_state
from megabatch.inspection.error_kinds import agreeing
from megabatch.loops.graph_on_demand import GraphOnDemand
from megabatch.loops.sample_outputs import split_outputs
from megabatch.planning.plan import Plan


def compute_outputs(
    gradient: Any, wrapper: Wrapper, batch: Batch, fn: Callable[[Any, Microbatch], Any], plan: Plan | None, *,
    trim: bool,
) -> list[Any]:  # fmt: skip
    """Return what ``fn`` returns for each sample; see `GradientAccumulator.forward`."""
    # No weight is counted: outputs are not divided.
    hooks = LossHooks(None, loss_hooks(fn).prepare)
    with (
        gradient.guarded("forward()"),
        _open_forwards(gradient, wrapper, "forward", batch, fn, hooks, plan) as (prepared, steps),
    ):
        forwards = GraphOnDemand(wrapper)
        outputs = [(step.is_dummy, forwards.run(fn, gradient.model, step.microbatch)) for step in steps]
    outputs = [output for is_dummy, output in outputs if not is_dummy]
    return prepared.samples.join_outputs(split_outputs(outputs, prepared.plan, trim=trim), trim=trim)


def evaluate(
    gradient: Any, wrapper: Wrapper, batch: Batch, loss_fn: LossFunction, sums: OpenUpdate
) -> dict[str, Tensor]:
    """Return the quotient of each term; see `GradientAccumulator.evaluate`. ``sums`` is an update to add to."""
    hooks = loss_hooks(loss_fn)
    with gradient.guarded("evaluate()"):
        with _open_forwards(gradient, wrapper, "evaluate", batch, loss_fn, hooks, None) as (_, steps):
            forwards = GraphOnDemand(wrapper)
            for step in steps:
                sums.add(terms_of(forwards.run(loss_fn, gradient.model, step.microbatch)), step)
        with agreeing():
            update, _ = sums.close(None, None)
    if (problem := update.problem()) is not None:
        raise problem
    return update.terms


@contextlib.contextmanager
def _open_forwards(
    gradient: Any, wrapper: Wrapper, name: str, batch: Batch, function: Any, hooks: LossHooks, plan: Plan | None
) -> Generator[tuple[PreparedBatch, Generator[MicrobatchStep]]]:
    """Surround the forwards of a call: prepare it, and agree on it with the other ranks."""
    planner, prepared, failure = gradient.planner.of_forwards(name, function), None, None
    wrapper.ranks.position.verb = f"{name}()"
    opened: OpenUpdate | None = gradient.open_update
    try:
        if opened is not None and opened.is_running:
            raise MegabatchError(f"{name}() was called inside a microbatch; call it before the first or after the last")
        if wrapper.is_pipeline:
            raise PlanError(f"{name}() cannot run a pipeline; use megabatch.pipeline.evaluate")
        wrapper.reshard()  # a forward without a backward leaves weights gathered, perhaps those before the step
        prepared = planner.prepare(batch, hooks, plan)
        gradient.call_guard.check_weights(planner, prepared, hooks)
    except Exception as error:  # the user's collate may raise anything; the other ranks must know
        failure, prepared = error, None
    agreement = agree_on_call(wrapper, prepared, failure, lambda: None)
    assert prepared is not None  # else its failure was raised
    prepared, agreement = planner.complete(prepared, agreement, hooks, wrapper)
    gradient.last_plan = with_dummies(prepared.plan, agreement.num_microbatches)
    # With trains=False the wrapper prepares no reduction, which would wait for a backward.
    steps = iterate_steps(prepared, agreement, hooks.weigh, wrapper, trains=False)
    try:
        with contextlib.ExitStack() as stack:
            surrounding = planner.batching.surround_call(gradient.model, prepared.plan, agreement.num_microbatches)
            stack.enter_context(surrounding)
            stack.enter_context(random_state.replay(random_state.note(wrapper.device)))
            stack.enter_context(torch.no_grad())
            stack.enter_context(contextlib.closing(steps))
            surrounded = planner.surround_steps(steps, prepared, function, wrapper)
            yield prepared, stack.enter_context(contextlib.closing(surrounded))
    finally:
        # FSDP frees gathered parameters in its backward, and there was none.
        wrapper.reshard()
