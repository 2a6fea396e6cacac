"""How a call is run: microbatch by microbatch, through representations, or through a pipeline; and how all ends."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from megabatch.batching.padding import Padding
from megabatch.batching.samples import Collate
from megabatch.engine import coupled_loss, random_state
from megabatch.engine.call import CallPlan, MicrobatchStep, iterate_steps
from megabatch.engine.oom_retry import OOMRetry
from megabatch.engine.ownership import Ownership
from megabatch.engine.packing_check import watched
from megabatch.engine.prepare import PreparedBatch
from megabatch.engine.update import OpenUpdate, Update, add_terms
from megabatch.errors import PlanError
from megabatch.losses.contract import JointLoss, LossFunction, Term, Weigh, takes_divisor, weigh_of
from megabatch.pipeline import run as pipeline_run
from megabatch.pipeline.stages import PipelineWrapper
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.gradients import clip_gradients, drop_gradients, no_float16_autocast, scale_gradients


def run(
    model: Any, loss_fn: LossFunction | JointLoss, share: PreparedBatch, call: CallPlan,
    wrapper: Wrapper, opened: OpenUpdate, ownership: Ownership,
) -> dict[str, Term]:  # fmt: skip
    """Add a call's gradient to the open update; returns its sums."""
    if takes_divisor(loss_fn) and isinstance(wrapper, PipelineWrapper):
        raise PlanError("a loss that takes the divisor cannot run through a Pipeline; give one that returns its sum")
    if isinstance(loss_fn, JointLoss):
        if isinstance(wrapper, PipelineWrapper):
            raise PlanError("a JointLoss cannot run through a Pipeline; give a loss that sums over samples")
        return coupled_loss.run(loss_fn, model, share, call, wrapper, opened)
    if isinstance(wrapper, PipelineWrapper):
        return pipeline_run.run(share, call, weigh_of(loss_fn), loss_fn, wrapper, opened)
    return _one_by_one(model, loss_fn, share, call, wrapper, opened, ownership)


def close(opened: OpenUpdate, wrapper: Wrapper, weight: float | None, max_norm: float | None) -> Update:
    """Close an update and give its gradient what it still lacks. Raises `LossContractError`, as `OpenUpdate.close`."""
    update, factor = opened.close(weight, max_norm)
    parameters = wrapper.parameters
    if isinstance(factor, float) and factor == 0.0:
        drop_gradients(parameters)
        return replace(update, finite=torch.zeros_like(update.finite))
    wrapper.finish_update()
    if max_norm is not None:
        return update.with_norm(clip_gradients(parameters, max_norm, factor, wrapper.norm_groups))
    if factor is not None:
        scale_gradients(parameters, factor)
    return update


def filled(wrapper: Wrapper, share: PreparedBatch, call: CallPlan) -> CallPlan:
    """The agreement, with the dummy microbatches that a pipeline's schedule needs besides."""
    return pipeline_run.filled(wrapper, share, call) if isinstance(wrapper, PipelineWrapper) else call


@contextlib.contextmanager
def around(model: Any, wrapper: Wrapper, call: CallPlan, collate: Collate | None, padding: Padding) -> Generator[None]:
    """Surrounds a call."""
    with (
        no_float16_autocast(wrapper.models),
        watched(model, collate, call.num_microbatches),
        padding.watched(),
    ):
        yield


def check_open_loop(wrapper: Wrapper, weigh: Weigh | None) -> None:
    """Raise `PlanError` for what cannot be run by a loop of the user's own."""
    coupled_loss.refuse_in_a_loop(weigh)
    if isinstance(wrapper, PipelineWrapper):
        raise PlanError("a pipeline runs the microbatches of a call together; use forward_backward, not an open loop")


def _one_by_one(
    model: Any, loss_fn: LossFunction, share: PreparedBatch, call: CallPlan,
    wrapper: Wrapper, opened: OpenUpdate, ownership: Ownership,
) -> dict[str, Term]:  # fmt: skip
    opened.open_call(call)
    sums: dict[str, Term] = {}
    weigh = weigh_of(loss_fn)
    recovery = OOMRetry(share, loss_fn, wrapper, opened)

    def work(step: MicrobatchStep) -> dict[str, Term]:
        is_new = ownership.is_new(loss_fn)
        if is_new:
            opened.check_divided(loss_fn, model, step)
        random = random_state.note(wrapper.device) if is_new else None
        receipt = ownership.receipt()
        terms = opened.terms_of(loss_fn, model, step)
        ownership.check_unmoved(loss_fn, receipt)
        if random is not None:
            ownership.check_reach(loss_fn, receipt, terms, [step.microbatch, share.samples.held(), share.collated])
        del receipt  # which would keep gradients that a wrapper frees in its backward
        if random is not None and ownership.uses_up(loss_fn, terms):
            random_state.put_back(random)
            terms = opened.terms_of(loss_fn, model, step)
        if step.is_part:
            recovery.check_reach(terms, step)
        return opened.backward(terms, step)

    with contextlib.closing(iterate_steps(share, call, weigh, wrapper, wrapper.device)) as each:
        for step in each:
            for part in recovery.run(step, work):
                add_terms(sums, part)
            del step  # with the microbatch, before the next is made
    return sums
