"""This rank's part of one call: its samples, cut, and weighed where the weight can be counted from the data."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import partial

from megabatch import context, cut
from megabatch.batch import Batch, Collate, Length, Microbatch, Samples
from megabatch.contract import PAIR_NAME, Weigh, counted_weights
from megabatch.cut import Plan
from megabatch.errors import LossContractError, PlanError
from megabatch.fit import Fit
from megabatch.shapes import equal_rows

MAX_WEIGHED_TERMS = 8  # the message between ranks has a fixed size


@dataclass(frozen=True)
class Share:
    """Samples with the plan of their microbatches, and the weights of those."""

    samples: Samples
    plan: Plan
    collated: tuple[Microbatch, ...]  # on the CPU; empty unless they were weighed, and for a deferred batch
    weights: tuple[dict[str, float], ...]  # of each microbatch, by term

    def microbatches(self) -> Generator[Microbatch]:
        """The microbatches of the plan in turn, on the CPU."""
        return (each for each in self.collated) if self.collated else self.samples.in_turn(self.plan.microbatches)

    def stand_in(self) -> Microbatch:
        """The last microbatch once more, whose shape a compiled model knows; a new one, since a loss may write to it.

        Of a deferred batch its last sample, over and over, since the others would have to be loaded again.
        """
        rows, last = self.plan.microbatches[-1], len(self.samples) - 1
        if self.samples.deferred is not None:
            rows = [last] * (len(rows) if last in rows else 1)
        return self.samples.take(rows)

    def weighed(self, index: int, microbatch: Microbatch, weigh: Weigh) -> dict[str, float]:
        """What ``weigh`` counts for microbatch ``index``, which is a stand-in from the end of the plan on."""
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
        """This rank's weight of each term, in the order of the message; empty without a weighed microbatch."""
        names = sorted(self.weights[0]) if self.weights else []
        return {name: sum(each[name] for each in self.weights) for name in names}


@dataclass(frozen=True)
class Cutter:
    """How a rank makes its share of a batch: everything that the user has said of it, and the sync that was chosen."""

    micro_batch_size: int | None
    max_microbatch_tokens: int | None
    collate: Collate | None
    length: Length | None
    choice: tuple[str, str]  # the sync policy, and why it is this one
    context_rank: int = 0  # which stretch of each sequence this rank sees, and of how many
    context_degree: int = 1
    one_shape: bool = False  # whether every microbatch is filled up to the longest sample of all, as in a pipeline
    fit: Fit | None = None  # the bound that was chosen where none was given

    @property
    def is_auto(self) -> bool:
        """Whether the bound is to be chosen."""
        return self.micro_batch_size is None and self.max_microbatch_tokens is None

    def samples(self, batch: Batch) -> Samples:
        """The batch seen as samples."""
        part = partial(context.stretch, index=self.context_rank, degree=self.context_degree)
        return Samples(batch, self.collate, self.length, part if self.context_degree > 1 else None)

    def plan(self, samples: Samples) -> Plan:
        """How they are cut into microbatches."""
        rows, tokens = self.micro_batch_size, self.max_microbatch_tokens
        if self.fit is not None:
            tokens = self.fit.max_microbatch_tokens
        elif self.is_auto and len(samples):
            raise PlanError(
                'max_microbatch_tokens is "auto" and the first forward_backward() or choose_bound() chooses the bound, '
                "from the loss and its samples; call one of them before, or give max_microbatch_tokens="
            )
        elif self.is_auto:
            rows = 1  # of no samples
        if self.one_shape and tokens is not None:
            rows, tokens = equal_rows(samples.lengths, tokens), None
        (plan,) = cut.plan(samples.lengths, micro_batch_size=rows, max_microbatch_tokens=tokens)
        sync, reason = self.choice
        plan = replace(plan, sync=sync, reason=reason)
        return plan if self.fit is None else cut.priced(plan, self.fit.cost)

    def share(self, batch: Batch, weigh: Weigh | None) -> Share:
        """This rank's part of a call. Raises `PlanError` or `LossContractError` for what is wrong with it."""
        samples = self.samples(batch)
        plan = self.plan(samples)
        if weigh is not None and self.context_degree > 1 and plan.microbatches:
            if samples.deferred is not None and samples.deferred.weights is not None:
                raise PlanError(
                    "weights of Deferred are of whole samples, and sequences are cut over the mesh axis 'cp'; leave "
                    "weights out"
                )
            whole = Samples(batch, self.collate, self.length).take(plan.microbatches[0])
            context.check_weights(whole, weigh, self.context_degree)
        return prepare(samples, plan, weigh)


def prepare(samples: Samples, plan: Plan, weigh: Weigh | None) -> Share:
    """Collate and weigh what was planned, on the CPU; of a deferred batch nothing is kept."""
    if weigh is None:
        return Share(samples, plan, (), ())
    if samples.deferred is not None and (told := samples.deferred.weights) is not None:
        sums = (sum(told[row] for row in rows) for rows in plan.microbatches)
        return Share(samples, plan, (), tuple(map(counted_weights, sums)))
    taken = map(samples.take, plan.microbatches)
    collated = tuple(taken) if samples.deferred is None else ()
    weights = tuple(counted_weights(weight) for weight in map(weigh, collated or taken))
    names = [sorted(each) for each in weights]
    if any(each != names[0] for each in names):
        raise LossContractError(f"weigh names the terms {names}; name the same terms for each microbatch")
    if names and len(names[0]) > MAX_WEIGHED_TERMS:
        raise LossContractError(f"weigh names {len(names[0])} terms; at most {MAX_WEIGHED_TERMS} are supported")
    return Share(samples, plan, collated, weights)
