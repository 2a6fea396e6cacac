"""Cuts: how every update was cut, a line each in cuts.jsonl, for bars that anyone can look at later."""

import json
from pathlib import Path

from megabatch import Plan
from megabatch.train.callbacks.jsonl_log import Journal
from megabatch.train.callbacks.metrics import Row
from megabatch.train.runtime.ranks import Ranks

FILE_NAME = "cuts.jsonl"
MOST_RANKS, MOST_MICROBATCHES = 16, 64  # of an update that a line has; it counts those that it leaves out
Cut = list[list[int]]  # of a data rank: its microbatches' samples, their real tokens, their padding


class Cuts:
    """A line for every update, of all data ranks; see `add`."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._ranks = ranks
        self.journal = Journal(folder / FILE_NAME, enabled=ranks.is_main)

    def add(self, step: int, plan: Plan) -> None:
        """Write how the update was cut on each data rank. Collective: a message of some hundred bytes a rank."""
        told = self._ranks.gather(json.dumps([self._ranks.dp_rank, len(plan.microbatches), self._own(plan)]))
        if self._ranks.is_main:
            self.journal.append(row_of(step, told))

    def _own(self, plan: Plan) -> Cut:
        return cut_of(plan) if self._ranks.dp_rank < MOST_RANKS else []


def row_of(step: int, told: list[str]) -> Row:
    """The line of an update; ranks along cp, tp and pp have the same samples, and count once."""
    ranks = {rank: (number, cut) for rank, number, cut in map(json.loads, told)}
    cut = [ranks[rank][1] for rank in sorted(ranks)[:MOST_RANKS]]
    left_out = sum(number for number, _ in ranks.values()) - sum(len(samples) for samples, *_ in cut)
    return {"step": step, "cut": cut} | ({"microbatches_left_out": left_out} if left_out else {})


def cut_of(plan: Plan) -> Cut:
    """Samples, real tokens and padding of this rank's microbatches, the first 64; nothing of dummy microbatches."""
    rows_of = plan.microbatches[:MOST_MICROBATCHES]
    real = [sum(plan.lengths[row] for row in rows) for rows in rows_of]
    padding = [whole_of(plan, rows) - own for rows, own in zip(rows_of, real, strict=True)]
    return [[len(rows) for rows in rows_of], real, padding]


def whole_of(plan: Plan, rows: tuple[int, ...]) -> int:
    """Tokens that go through the model for these samples, with their padding."""
    if not plan.one_shape or not rows:
        return plan.tokens_of(rows)
    return max(map(len, plan.microbatches)) * max(plan.lengths)
