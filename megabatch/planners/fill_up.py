"""A rank with fewer microbatches than another cuts its own smaller, which costs less than a dummy microbatch."""

import math
from dataclasses import replace

from megabatch.core.call import CallAgreement, MicrobatchPlanner, PreparedBatch, collate_planned
from megabatch.core.contract import WEIGHT_TOLERANCE, LossHooks
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError
from megabatch.planning.finer_cut import split_into
from megabatch.planning.plan import CostModel, Plan, priced
from megabatch.torch_private.module_members import has_compiled


def fill_up(
    planner: MicrobatchPlanner, prepared: PreparedBatch, agreement: CallAgreement, hooks: LossHooks, wrapper: Wrapper
) -> tuple[PreparedBatch, CallAgreement]:
    """Return the call with as many microbatches as ranks agreed on, as far as this rank's samples go.

    The call stays as it is where its microbatches are not to be cut again, or would weigh something else: dummy
    microbatches then run.
    """
    if not _can_cut_again(planner, prepared, hooks) or _is_static(planner, prepared, wrapper):
        return prepared, agreement
    plan = _cut_smaller(prepared, agreement.num_microbatches, planner.known_cost)
    try:
        filled = collate_planned(prepared.samples, plan, hooks.weigh)
    except LossContractError:
        # Only some samples have a term, and this rank alone would raise.
        return prepared, agreement
    for name, announced in prepared.weight_sums.items():
        if not math.isclose(filled.weight_sums.get(name, math.nan), announced, rel_tol=WEIGHT_TOLERANCE):
            return prepared, agreement
    return filled, replace(agreement, dummy=filled.dummy)


def _cut_smaller(prepared: PreparedBatch, num_microbatches: int, cost: CostModel | None) -> Plan:
    price = cost or CostModel()
    cut = split_into(prepared.samples.lengths, prepared.plan.microbatches, num_microbatches, price.seconds)
    plan = replace(prepared.plan, microbatches=tuple(cut))
    return plan if cost is None else priced(plan, cost)


def _can_cut_again(planner: MicrobatchPlanner, prepared: PreparedBatch, hooks: LossHooks) -> bool:
    """Return True if no plan was given, samples are padded row by row, and a new microbatch has the same weight."""
    plan = prepared.plan
    if prepared.is_given or not plan.padded or plan.shared or not prepared.samples.is_in_memory:
        return False
    return hooks.weigh is None or planner.is_repeatable(hooks)


def _is_static(planner: MicrobatchPlanner, prepared: PreparedBatch, wrapper: Wrapper) -> bool:
    """Return True for a compiled model whose microbatches may all have one shape: another is compiled anew."""
    has_one_shape = planner.micro_batch_size is not None or len(set(prepared.samples.lengths)) == 1
    return has_one_shape and any(map(has_compiled, wrapper.models))
