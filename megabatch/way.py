"""The way in which a call is run: microbatch by microbatch, through representations, or through a pipeline."""

import contextlib
from typing import Any

from megabatch import joint, pipeline
from megabatch.contract import JointLoss, LossFunction, Term, Weigh, terms_of, weigh_of
from megabatch.errors import PlanError
from megabatch.plain import PlainReducer
from megabatch.run import Agreement, turns
from megabatch.share import Share
from megabatch.stages import PipelineReducer
from megabatch.update import OpenUpdate, add_terms


def run(
    model: Any, loss_fn: LossFunction | JointLoss, share: Share, agreement: Agreement,
    reducer: PlainReducer, opened: OpenUpdate,
) -> dict[str, Term]:  # fmt: skip
    """Add a call's gradient to the open update; returns its sums."""
    if isinstance(loss_fn, JointLoss):
        if isinstance(reducer, PipelineReducer):
            raise PlanError("a JointLoss cannot run through a Pipeline; give a loss that sums over samples")
        return joint.run(loss_fn, model, share, agreement, reducer, opened)
    if isinstance(reducer, PipelineReducer):
        return pipeline.run(share, agreement, weigh_of(loss_fn), loss_fn, reducer, opened)
    return _one_by_one(model, loss_fn, share, agreement, reducer, opened)


def filled(reducer: PlainReducer, share: Share, agreement: Agreement) -> Agreement:
    """The agreement, with the stand-ins that a pipeline's schedule needs besides."""
    return pipeline.filled(reducer, share, agreement) if isinstance(reducer, PipelineReducer) else agreement


def check_open_loop(reducer: PlainReducer, weigh: Weigh | None) -> None:
    """Raise `PlanError` for what cannot be run by a loop of the user's own."""
    joint.refuse_in_a_loop(weigh)
    if isinstance(reducer, PipelineReducer):
        raise PlanError("a pipeline runs the microbatches of a call together; use forward_backward, not an open loop")


def _one_by_one(
    model: Any, loss_fn: LossFunction, share: Share, agreement: Agreement,
    reducer: PlainReducer, opened: OpenUpdate,
) -> dict[str, Term]:  # fmt: skip
    opened.open_call(agreement)
    sums: dict[str, Term] = {}
    with contextlib.closing(turns(share, agreement, weigh_of(loss_fn), reducer, reducer.device)) as each:
        for turn in each:
            terms = terms_of(loss_fn(model, turn.microbatch))
            add_terms(sums, opened.backward(terms, turn))
            del turn, terms  # with the microbatch and its graph, before the next is made
    return sums
