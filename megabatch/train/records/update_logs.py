"""cuts.jsonl: how each update was split into microbatches."""

import json

from megabatch import Plan
from megabatch.train.context import Callback, RunContext
from megabatch.train.runtime.files import CUTS, Row
from megabatch.train.runtime.oom_limit import report_split

# Ranks and microbatches of an update in a line, which counts those that it leaves out.
MOST_RANKS, MOST_MICROBATCHES = 16, 64
# Of a data rank: the samples of its microbatches, their real tokens, their padding.
Cut = list[list[int]]


class MicrobatchLog(Callback):
    """Write a line for every update, with the microbatches of all data ranks. Collective."""

    def __init__(self, context: RunContext) -> None:
        self._file = context.open_log(CUTS)
        self._is_alone, self._dp_rank = context.ranks.size == 1, context.ranks.dp_rank

    def after_update(self, context: RunContext) -> None:
        """Add the line. On several ranks this sends some hundred bytes a rank."""
        plan = context.plan
        local_part = (self._dp_rank, len(plan.microbatches), cut_of(plan) if self._dp_rank < MOST_RANKS else [])
        parts = [local_part] if self._is_alone else context.ranks.gather(local_part)
        if self._file.is_enabled:
            self._file.pending.append(f"{json.dumps(row_of(context.learner.step, parts))}\n")
        if "num_split" in context.row:
            limit = context.learner.gradient.oom_limit
            context.console.say(report_split(context.config.run, plan, limit, context.ranks))


def cut_of(plan: Plan) -> Cut:
    """Return samples, real tokens and padding of this rank's first 64 microbatches; zeros of dummy microbatches."""
    rows_of = plan.microbatches[:MOST_MICROBATCHES]
    real = [sum(plan.lengths[row] for row in rows) for rows in rows_of]
    padding = [total - real_tokens for total, real_tokens in zip(plan.microbatch_tokens, real, strict=False)]
    return [[len(rows) for rows in rows_of], real, padding]


def row_of(step: int, parts: list[tuple[int, int, Cut]]) -> Row:
    """Return the line of an update. Ranks along cp, tp and pp have the same samples and count once."""
    ranks = {rank: (number, cut) for rank, number, cut in parts}
    cut = [ranks[rank][1] for rank in sorted(ranks)[:MOST_RANKS]]
    left_out = sum(number for number, _ in ranks.values()) - sum(len(samples) for samples, *_ in cut)
    return {"step": step, "cut": cut} | ({"microbatches_left_out": left_out} if left_out else {})
