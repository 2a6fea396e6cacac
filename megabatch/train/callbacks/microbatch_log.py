"""cuts.jsonl: how each update was split into microbatches, a line for each, as the report draws it."""

import json

from megabatch import Plan
from megabatch.train.context import Callback, RunContext
from megabatch.train.runtime.jsonl_file import Row
from megabatch.train.runtime.oom_limit import report_split

FILE_NAME = "cuts.jsonl"
MOST_RANKS, MOST_MICROBATCHES = 16, 64  # of an update in a line, which counts those that it leaves out
Cut = list[list[int]]  # of a data rank: its microbatches' samples, their real tokens, their padding


class MicrobatchLog(Callback):
    """Write a line for every update, with the microbatches of all data ranks. Collective."""

    def __init__(self, context: RunContext) -> None:
        self._file = context.open_log(FILE_NAME)
        self._is_alone, self._dp_rank = context.ranks.size == 1, context.ranks.dp_rank

    def after_update(self, context: RunContext) -> None:
        """Add the line. On several ranks this sends some hundred bytes a rank."""
        plan, step = context.plan, context.learner.step
        cut = cut_of(plan) if self._dp_rank < MOST_RANKS else []
        own = (self._dp_rank, len(plan.microbatches), cut)
        told = [own] if self._is_alone else [json.loads(text) for text in context.ranks.gather(json.dumps(own))]
        if self._file.is_enabled:
            self._file.lines.append(json.dumps(row_of(step, told)))
        if "num_split" in context.row:
            limit = context.learner.gradient.oom_limit
            context.console.say(report_split(context.config.run, plan, limit, context.ranks))


def row_of(step: int, told: list[tuple[int, int, Cut]]) -> Row:
    """Return the line of an update. Ranks along cp, tp and pp have the same samples and count once."""
    ranks = {rank: (number, cut) for rank, number, cut in told}
    cut = [ranks[rank][1] for rank in sorted(ranks)[:MOST_RANKS]]
    left_out = sum(number for number, _ in ranks.values()) - sum(len(samples) for samples, *_ in cut)
    return {"step": step, "cut": cut} | ({"microbatches_left_out": left_out} if left_out else {})


def cut_of(plan: Plan) -> Cut:
    """Return samples, real tokens and padding of this rank's first 64 microbatches; zeros of dummy microbatches."""
    rows_of = plan.microbatches[:MOST_MICROBATCHES]
    real = [sum(plan.lengths[row] for row in rows) for rows in rows_of]
    padding = [whole_of(plan, rows) - own for rows, own in zip(rows_of, real, strict=True)]
    return [[len(rows) for rows in rows_of], real, padding]


def whole_of(plan: Plan, rows: tuple[int, ...]) -> int:
    """Return the tokens that go through the model for these samples, padding included."""
    if not plan.one_shape or not rows:
        return plan.tokens_of(rows)
    return max(map(len, plan.microbatches)) * max(plan.lengths)
