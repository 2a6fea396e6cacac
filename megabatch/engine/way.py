"""How a call is run: microbatch by microbatch, through representations, or through a pipeline; and how all ends."""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch

from megabatch.batching.padding import Padding
from megabatch.batching.samples import Collate
from megabatch.engine import coupled_loss, random_state
from megabatch.engine.call import Agreement, Turn, turns
from megabatch.engine.oom_retry import Recovery
from megabatch.engine.ownership import Ownership
from megabatch.engine.packing_check import watched
from megabatch.engine.prepare import Share
from megabatch.engine.update import OpenUpdate, Update, add_terms
from megabatch.errors import PlanError
from megabatch.losses.contract import JointLoss, LossFunction, Term, Weigh, takes_divisor, weigh_of
from megabatch.pipeline import run as pipeline_run
from megabatch.pipeline.stages import PipelineReducer
from megabatch.wrappers import gradients
from megabatch.wrappers.base import PlainReducer
from megabatch.wrappers.precision import no_float16_autocast


def run(
    model: Any, loss_fn: LossFunction | JointLoss, share: Share, agreement: Agreement,
    reducer: PlainReducer, opened: OpenUpdate, ownership: Ownership,
) -> dict[str, Term]:  # fmt: skip
    """Add a call's gradient to the open update; returns its sums."""
    if takes_divisor(loss_fn) and isinstance(reducer, PipelineReducer):
        raise PlanError("a loss that takes the divisor cannot run through a Pipeline; give one that returns its sum")
    if isinstance(loss_fn, JointLoss):
        if isinstance(reducer, PipelineReducer):
            raise PlanError("a JointLoss cannot run through a Pipeline; give a loss that sums over samples")
        return coupled_loss.run(loss_fn, model, share, agreement, reducer, opened)
    if isinstance(reducer, PipelineReducer):
        return pipeline_run.run(share, agreement, weigh_of(loss_fn), loss_fn, reducer, opened)
    return _one_by_one(model, loss_fn, share, agreement, reducer, opened, ownership)


def close(opened: OpenUpdate, reducer: PlainReducer, weight: float | None, max_norm: float | None) -> Update:
    """Close an update and give its gradient what it still lacks. Raises `LossContractError`, as `OpenUpdate.close`."""
    update, factor = opened.close(weight, max_norm)
    parameters = reducer.parameters
    if isinstance(factor, float) and factor == 0.0:
        gradients.drop(parameters)
        return replace(update, finite=torch.zeros_like(update.finite))
    reducer.finish_update()
    if max_norm is not None:
        return update.with_norm(gradients.clip(parameters, max_norm, factor, reducer.norm_groups))
    if factor is not None:
        gradients.scale(parameters, factor)
    return update


def filled(reducer: PlainReducer, share: Share, agreement: Agreement) -> Agreement:
    """The agreement, with the stand-ins that a pipeline's schedule needs besides."""
    return pipeline_run.filled(reducer, share, agreement) if isinstance(reducer, PipelineReducer) else agreement


@contextlib.contextmanager
def around(
    model: Any, reducer: PlainReducer, agreement: Agreement, collate: Collate | None, padding: Padding
) -> Generator[None]:
    """Surrounds a call."""
    with (
        no_float16_autocast(reducer.models),
        reducer.fused(),
        watched(model, collate, agreement.num_microbatches),
        padding.watched(),
    ):
        yield


def check_open_loop(reducer: PlainReducer, weigh: Weigh | None) -> None:
    """Raise `PlanError` for what cannot be run by a loop of the user's own."""
    coupled_loss.refuse_in_a_loop(weigh)
    if isinstance(reducer, PipelineReducer):
        raise PlanError("a pipeline runs the microbatches of a call together; use forward_backward, not an open loop")


def _one_by_one(
    model: Any, loss_fn: LossFunction, share: Share, agreement: Agreement,
    reducer: PlainReducer, opened: OpenUpdate, ownership: Ownership,
) -> dict[str, Term]:  # fmt: skip
    opened.open_call(agreement)
    sums: dict[str, Term] = {}
    weigh = weigh_of(loss_fn)
    recovery = Recovery(share, loss_fn, reducer, opened)

    def work(turn: Turn) -> dict[str, Term]:
        is_new = ownership.is_new(loss_fn)
        if is_new:
            opened.check_divided(loss_fn, model, turn)
        random = random_state.note(reducer.device) if is_new else None
        receipt = ownership.receipt()
        terms = opened.terms_of(loss_fn, model, turn)
        ownership.check_unmoved(loss_fn, receipt)
        if random is not None:
            ownership.check_reach(loss_fn, receipt, terms, [turn.microbatch, share.samples.held(), share.collated])
        del receipt  # which would keep gradients that a wrapper frees in its backward
        if random is not None and ownership.uses_up(loss_fn, terms):
            random_state.put_back(random)
            terms = opened.terms_of(loss_fn, model, turn)
        if turn.is_part:
            recovery.check_reach(terms, turn)
        return opened.backward(terms, turn)

    with contextlib.closing(turns(share, agreement, weigh, reducer, reducer.device)) as each:
        for turn in each:
            for part in recovery.run(turn, work):
                add_terms(sums, part)
            del turn  # with the microbatch, before the next is made
    return sums
