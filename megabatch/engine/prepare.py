"""Prepare this rank's samples of one call: split, collated, and weighed where the data tell the weight."""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megabatch.batching import context_parallel
from megabatch.batching.packed_row import OneRow
from megabatch.batching.pad_to_shape import equal_rows
from megabatch.batching.padding import Padding, note_padding
from megabatch.batching.samples import Batch, Collate, Length, Microbatch, Samples
from megabatch.batching.tree import clone, memory_of
from megabatch.errors import LossContractError, MicrobatchLimit, PlanError
from megabatch.losses.contract import PAIR_NAME, WEIGHT_TOLERANCE, LossHooks, Prepare, Weigh, counted_weights
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel, Plan, check_lengths, plan_share, priced, without_padding
from megabatch.wrappers.mesh import DataRanks

MAX_COMPARED = 8  # samples of a row whose weights are held against those of each alone
MAX_WEIGHED_TERMS = 8  # the message between ranks has a fixed size


@dataclass(frozen=True)
class PreparedBatch:
    """This rank's samples of one call, the plan of their microbatches, and the weights of those."""

    samples: Samples
    plan: Plan
    collated: tuple[Microbatch, ...]  # on the CPU; empty unless they were weighed, and for a deferred batch
    weights: tuple[dict[str, float], ...]  # of each microbatch, by term
    names: list[str] = field(default_factory=list[str])  # of the weighed terms; none without a weighed microbatch
    parts: dict[int, list[tuple[int, ...]]] = field(
        default_factory=dict[int, list[tuple[int, ...]]]
    )  # those that ran in parts

    def microbatches(self) -> Generator[Microbatch]:
        """The microbatches of the plan in turn, on the CPU."""
        return (each for each in self.collated) if self.collated else self.samples.in_turn(self.plan.microbatches)

    def dummy(self) -> Microbatch:
        """The last microbatch once more, whose shape a compiled model knows; a new one, since a loss may write to it.

        Of a deferred batch its last sample, over and over, since the others would have to be loaded again.
        """
        return self.samples.take(self.rows(len(self.plan.microbatches)))

    def rows(self, index: int) -> tuple[int, ...]:
        """Return the samples of microbatch ``index``; from the end of the plan on, those of a dummy microbatch."""
        cut, last = self.plan.microbatches, len(self.samples) - 1
        if index < len(cut) or not cut:
            return cut[index] if cut else ()
        if self.samples.deferred is None:
            return cut[-1]
        several = self.plan.padded and last in cut[-1]  # in one row it may be longer than those it would stand for
        return (last,) * (len(cut[-1]) if several else 1)

    def part(self, rows: tuple[int, ...], weigh: Weigh | None) -> tuple[Microbatch, dict[str, float], dict[str, float]]:
        """Some samples as a microbatch on the CPU, with what is counted or told of its weight, and what is weighed."""
        microbatch = self.samples.take(rows)
        weighed = {} if weigh is None else counted_weights(weigh(microbatch))
        told = None if self.samples.deferred is None or weigh is None else self.samples.deferred.weights
        return microbatch, weighed if told is None else counted_weights(sum(told[row] for row in rows)), weighed

    def weighed(self, index: int, microbatch: Microbatch, weigh: Weigh) -> dict[str, float]:
        """What ``weigh`` counts for microbatch ``index``, which is a dummy microbatch from the end of the plan on."""
        told = self.samples.deferred is not None and self.samples.deferred.weights is not None
        if index < len(self.weights) and not told:
            return self.weights[index]
        weights = counted_weights(weigh(microbatch))
        if told and index < len(self.weights) and weights.keys() != {PAIR_NAME}:
            raise LossContractError(
                f"weigh names the terms {sorted(weights)} but weights of Deferred have no name; "
                "return a number from weigh, or leave weights out"
            )
        return weights

    def weight_sums(self) -> dict[str, float]:
        """Return this rank's weight of each term."""
        return {name: sum(each[name] for each in self.weights) for name in self.names}


@dataclass(frozen=True)
class MicrobatchPlanner:
    """How a rank makes its share of a batch: everything that the user has said of it, and the sync that was chosen."""

    micro_batch_size: int | None
    max_microbatch_tokens: int | None
    collate: Collate | None
    length: Length | None
    choice: tuple[str, str]  # the sync policy, and why it is this one
    ranks: DataRanks
    one_shape: bool  # whether every microbatch is filled up to the longest sample of all, as in a pipeline
    cost: CostModel | None  # what the user says a microbatch costs
    fit: TunedLimit | None = None  # the bound that was chosen where none was given
    learned: MicrobatchLimit | None = None  # from microbatches that did not fit in memory
    padding: Padding | None = None  # how samples become microbatches where there is no collate

    @property
    def is_auto(self) -> bool:
        """Whether the bound is to be chosen."""
        return self.micro_batch_size is None and self.max_microbatch_tokens is None

    def samples(self, batch: Batch, prepare: Prepare | None = None) -> Samples:
        """Return the batch as samples, whose microbatches are what the loss will see."""
        if self.ranks.context_groups:
            prepare = partial(context_parallel.stretch, index=self.ranks.context_rank, degree=self.ranks.context_degree)
        return Samples(batch, self.collate, self.length, prepare, self.padding)

    def plan(self, samples: Samples) -> Plan:
        """Return how samples are split into microbatches."""
        rows, tokens, lengths = self.micro_batch_size, self.max_microbatch_tokens, samples.lengths
        if self.fit is not None:
            rows, tokens = None, self.fit.max_microbatch_tokens
        elif rows is None and tokens is None:
            rows = self._refuse_unknown_limit(samples)
        elif self.one_shape and tokens is not None:
            rows, tokens = equal_rows(lengths, tokens), None
        check_lengths(lengths, tokens)
        if self.learned is not None and rows is not None:
            rows = min(rows, self.learned.samples)
        if self.learned is not None and tokens is not None:
            tokens = max(min(tokens, self.learned.tokens), 1)
            lengths = [min(each, tokens) for each in lengths]  # a sample that is longer goes alone
        cost = self.cost or (self.fit and self.fit.cost)
        plan = plan_share(lengths, rows, tokens, cost)
        if isinstance(self.collate, OneRow):
            plan = without_padding(lengths, plan, tokens)
        sync, reason = self.choice
        plan = replace(plan, lengths=tuple(samples.lengths), one_shape=self.one_shape, sync=sync, reason=reason)
        return plan if cost is None else priced(plan, cost)

    def _refuse_unknown_limit(self, samples: Samples) -> int:
        """Raise `PlanError` for samples, while the limit is to be chosen; no samples need no limit."""
        if len(samples):
            raise PlanError(
                'max_microbatch_tokens is "auto" and the first forward_backward() or tune() chooses the bound, '
                "from the loss and its samples; call one of them before, or give max_microbatch_tokens="
            )
        return 1

    def lowered(self, bound: MicrobatchLimit | None) -> "MicrobatchPlanner":
        """Return the planner of calls whose microbatches hold no more than ``bound`` either."""
        if bound is None:
            return self
        return replace(self, learned=MicrobatchLimit(*map(min, bound, self.learned or bound)))

    def prepare(self, batch: Batch, hooks: LossHooks) -> PreparedBatch:
        """Split, collate and weigh this rank's samples. Raises `PlanError` or `LossContractError`."""
        samples = self.samples(batch, hooks.prepare)
        plan = self.plan(samples)
        if self.ranks.context_groups:
            self._check_stretches(batch, samples, plan, hooks)
        if isinstance(self.collate, OneRow) and plan.microbatches:
            _check_rows(samples, plan, hooks.weigh)
        return collate_planned(samples, plan, hooks.weigh)

    def _check_stretches(self, batch: Batch, samples: Samples, plan: Plan, hooks: LossHooks) -> None:
        """Raise for a loss that wants whole samples, and for weights that do not add up over stretches."""
        if hooks.prepare not in (None, note_padding):
            raise PlanError(
                "the loss has prepare=, which is given whole samples, and a cp axis gives the loss stretches of them; "
                "prepare them in the collate function, or leave the cp axis out"
            )
        if hooks.weigh is None or not plan.microbatches:
            return
        if samples.deferred is not None and samples.deferred.weights is not None:
            raise PlanError(
                "weights of Deferred are of whole samples, and sequences are cut over the mesh axis 'cp'; leave "
                "weights out"
            )
        whole = Samples(batch, self.collate, self.length, pad=self.padding).take(plan.microbatches[0])
        check_weights_of_stretches(whole, hooks.weigh, self.ranks.context_degree)


def collate_planned(samples: Samples, plan: Plan, weigh: Weigh | None) -> PreparedBatch:
    """Collate and weigh what was planned, on the CPU; of a deferred batch nothing is kept."""
    if weigh is None:
        return PreparedBatch(samples, plan, (), ())
    if samples.deferred is not None and (told := samples.deferred.weights) is not None:
        sums = (sum(told[row] for row in rows) for rows in plan.microbatches)
        weights = tuple(map(counted_weights, sums))
        return PreparedBatch(samples, plan, (), weights, sorted(weights[0]) if weights else [])
    kept: tuple[Microbatch, ...] = ()
    if samples.deferred is None:
        is_own = samples.is_collated_by_user
        kept = _take_all(samples, plan) if is_own else tuple(map(samples.take, plan.microbatches))
    weights = tuple(map(counted_weights, map(weigh, kept or map(samples.take, plan.microbatches))))  # keeps none
    names = [sorted(each) for each in weights]
    if any(each != names[0] for each in names):
        raise LossContractError(f"weigh names the terms {names}; name the same terms for each microbatch")
    if names and len(names[0]) > MAX_WEIGHED_TERMS:
        raise LossContractError(f"weigh names {len(names[0])} terms; at most {MAX_WEIGHED_TERMS} are supported")
    return PreparedBatch(samples, plan, kept, weights, names[0] if names else [])


def _take_all(samples: Samples, plan: Plan) -> tuple[Microbatch, ...]:
    """Take every microbatch of the user's own collate, on memory of its own: it may fill the same buffers again."""
    kept: list[Microbatch] = []
    memory: set[int] = set()
    for rows in plan.microbatches:
        kept.append(samples.take(rows))
        own = memory_of(kept[-1])
        if not own.isdisjoint(memory):
            return tuple(clone(samples.take(rows)) for rows in plan.microbatches)
        memory |= own
    return tuple(kept)


def _check_rows(samples: Samples, plan: Plan, weigh: Weigh | None) -> None:
    """Raise `LossContractError` where samples lie in one row and a weight may count rows."""
    if weigh is None:
        raise LossContractError(
            "samples lie in one row and the loss does not say how its weight is counted, so a weight that counts "
            "rows would not be seen; give weigh=, see megabatch.loss, or leave OneRow out"
        )
    together = next((rows for rows in plan.microbatches if len(rows) > 1), ())
    if together and (samples.deferred is None or samples.deferred.weights is None):
        check_weights_of_row(samples, together[:MAX_COMPARED], weigh)


def check_weights_of_row(samples: Samples, rows: Sequence[int], weigh: Weigh) -> None:
    """Raise `LossContractError` where the weight of samples in one row is not the sum of their own."""
    together = counted_weights(weigh(samples.take(rows)))
    alone = [counted_weights(weigh(samples.take([row]))) for row in rows]
    for name, weight in together.items():
        added = sum(each.get(name, 0.0) for each in alone)
        if not math.isclose(added, weight, rel_tol=WEIGHT_TOLERANCE):
            raise LossContractError(
                f"weigh counts {weight:.10g} in samples of one row and {added:.10g} in the same one by one; under "
                "OneRow count positions (of shift_labels, say), not rows"
            )


def check_weights_of_stretches(microbatch: Microbatch, weigh: Weigh, degree: int) -> None:
    """Raise `LossContractError` where the weights of the stretches do not add up to that of the whole microbatch."""
    whole = counted_weights(weigh(context_parallel.stretch(microbatch, 0, 1)))
    parts = [counted_weights(weigh(context_parallel.stretch(microbatch, index, degree))) for index in range(degree)]
    for name, weight in whole.items():
        added = sum(part.get(name, 0.0) for part in parts)
        if not math.isclose(added, weight, rel_tol=1e-9):
            raise LossContractError(
                f"weigh counts {weight:g} in whole sequences and {added:g} in their {degree} stretches; under cp count "
                "positions (of shift_labels, say), not samples, which every rank sees"
            )
