"""One call: split, collate and weigh this rank's samples, agree with the other ranks, and yield the microbatches.

Errors in a batch are found here, before the first forward, and are raised on all ranks at once.
"""

import contextlib
import math
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar, NamedTuple, cast

from torch import Tensor

from megabatch.batching.samples import STOPPED, Batch, Batching, Length, Microbatch, Samples
from megabatch.batching.tree import clone, to_device
from megabatch.engine.error_broadcast import is_out_of_memory
from megabatch.engine.ownership import ByLoss
from megabatch.errors import LossContractError, MegabatchError, MicrobatchLimit, PlanError, ReplanError
from megabatch.losses.contract import LossHooks, Prepare, Weigh, counted_weights, is_own
from megabatch.losses.padded_targets import check_weights
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import (
    CostModel,
    Plan,
    check_lengths,
    pad_with_dummies,
    priced,
)
from megabatch.wrappers.base import Wrapper, policies_of_call
from megabatch.wrappers.mesh import DataRanks

REPLAN = (False, False, "the samples need another microbatch limit")  # what a rank tells of a `ReplanError`
MAX_WEIGHED_TERMS = 8  # the message between ranks has a fixed size


@dataclass(frozen=True)
class PreparedBatch:
    """This rank's samples of one call, the plan of their microbatches, and the microbatches' weights."""

    samples: Samples
    plan: Plan
    collated: tuple[Microbatch, ...]  # on the CPU; empty unless they were weighed, and for a deferred batch
    weights: tuple[dict[str, float], ...]  # of each microbatch, by term
    weight_sums: dict[str, float] = field(
        default_factory=dict[str, float]
    )  # over this rank's microbatches, by term; empty without a weighed microbatch
    parts: dict[int, list[tuple[int, ...]]] = field(
        default_factory=dict[int, list[tuple[int, ...]]]
    )  # by index of a microbatch that ran out of memory: the samples of each part that ran instead
    is_given: bool = False  # the user gave the plan

    def microbatches(self) -> Generator[Microbatch]:
        """Iterate over the microbatches of the plan, on the CPU."""
        return (each for each in self.collated) if self.collated else self.samples.in_turn(self.plan.microbatches)

    def dummy(self) -> Microbatch:
        """Return a new copy of the last microbatch: a compiled model knows its shape, and a loss may write to it.

        For a deferred batch, repeat the last sample instead, since the others would have to be loaded again.
        """
        return self.samples.take(self.rows(len(self.plan.microbatches)))

    def rows(self, index: int) -> tuple[int, ...]:
        """Return the samples of microbatch ``index``. After the end of the plan, return those of a dummy microbatch."""
        cut = self.plan.microbatches
        if index < len(cut) or not cut:
            return cut[index] if cut else ()
        if self.plan.shapes:
            return (len(self.samples) - 1,)  # which has the cheapest shape that is long enough
        return self.samples.dummy_rows(self.plan)

    def take_part(
        self, rows: tuple[int, ...], weigh: Weigh | None
    ) -> tuple[Microbatch, dict[str, float], dict[str, float]]:
        """Return samples as a microbatch on the CPU, its announced weights, and the weights that ``weigh`` counts."""
        microbatch = self.samples.take(rows)
        weighed = {} if weigh is None else weights_of(weigh, microbatch)
        given_weight = None if weigh is None else self.samples.given_weight(rows)
        announced = weighed if given_weight is None else counted_weights(given_weight)
        return microbatch, announced, weighed


@dataclass(frozen=True)
class MicrobatchPlanner:
    """Settings by which a rank splits its samples into microbatches: the user's arguments and the sync policy."""

    micro_batch_size: int | None
    max_microbatch_tokens: int | None
    batching: Batching
    length: Length | None
    choice: tuple[str, str]  # the sync policy, and why it is this one
    ranks: DataRanks
    cost: CostModel | None  # the user's cost model
    fit: TunedLimit | None = None  # the measured limit, if the user gave none
    learned: MicrobatchLimit | None = None  # the limit learned from microbatches that did not fit in memory
    compared: ByLoss[bool] = field(default_factory=ByLoss[bool], compare=False)  # weigh that counted no padding
    fills_up: ClassVar[bool] = True  # microbatches may be cut smaller than `plan` cut them
    cuts_samples: ClassVar[bool] = False  # microbatches may hold parts of samples

    @property
    def is_auto(self) -> bool:
        """True if the limit is to be measured."""
        return self.micro_batch_size is None and self.max_microbatch_tokens is None

    @cached_property
    def known_cost(self) -> CostModel | None:
        """The cost by which samples are split: given or measured. None: relative defaults."""
        return self.cost or (self.fit and self.fit.cost)

    @cached_property
    def stated_limits(self) -> tuple[int | None, int | None]:
        """Samples and tokens of a microbatch as they were given or measured; both None before the measurement."""
        if self.fit is not None:
            return None, self.fit.max_microbatch_tokens
        return self.micro_batch_size, self.max_microbatch_tokens

    @cached_property
    def limits(self) -> tuple[int | None, int | None]:
        """Samples and tokens of a microbatch, no more than have fit in memory."""
        rows, tokens = self.stated_limits
        if self.learned is not None:
            rows = None if rows is None else min(rows, self.learned.samples)
            tokens = None if tokens is None else max(1, min(tokens, self.learned.tokens))
        return rows, tokens

    @property
    def has_rows(self) -> bool:
        """True if each sample is a whole row of its microbatch."""
        return self.batching.has_rows

    def samples(self, batch: Batch, prepare: Prepare | None = None) -> Samples:
        """Return the batch as samples, which `Samples.take` turns into the microbatches that the loss is given."""
        return self.batching.samples(batch, self.length, prepare)

    def plan(self, samples: Samples) -> Plan:
        """Return the plan by which samples are split into microbatches."""
        rows, tokens = self.limits
        if rows is None and tokens is None:
            if len(samples):
                raise PlanError(
                    'max_microbatch_tokens is "auto" and the first forward_backward() or tune() chooses the limit, '
                    "from the loss and its samples; call one of them before, or give max_microbatch_tokens="
                )
            rows = 1  # without samples any limit does
        check_lengths(samples.lengths, self.stated_limits[1])
        # A sample that is longer than what has fit in memory goes alone.
        lengths = samples.lengths if tokens is None else [min(length, tokens) for length in samples.lengths]
        cost = self.known_cost
        plan = self.batching.plan(samples, lengths, (rows, tokens), cost)
        sync, reason = self.choice
        plan = replace(plan, lengths=tuple(samples.lengths), sync=sync, reason=reason)
        return plan if cost is None else priced(plan, cost)

    def of_call(self, batch: Batch) -> "MicrobatchPlanner":
        """Return the planner of one call. Collective where the plan depends on the samples of other ranks."""
        return self

    def of_forwards(self, verb: str, fn: object) -> "MicrobatchPlanner":
        """Return the planner of a call without a backward, of the method ``verb`` with a loss or function."""
        return self

    def check_goes_with(self, what: str) -> None:
        """Raise `PlanError` for something that this planner does not go with."""

    def check_told(self, weights: dict[str, float]) -> None:
        """Raise `PlanError` for weights of an update, told to `open`, that this planner does not go with."""

    def dummy(self, samples: Samples) -> Microbatch:
        """Return the last sample of an earlier call as a microbatch, for a rank without samples."""
        return samples.dummy()

    def check_call(self, wrapper: Wrapper, plan: Plan, loss_fn: object) -> None:
        """Raise `PlanError` on all ranks for a call that this planner is not for. May be collective."""

    def surround_steps(
        self,
        steps: "Generator[MicrobatchStep]",
        prepared: PreparedBatch,
        loss_fn: Callable[..., object],
        wrapper: Wrapper,
    ) -> "Generator[MicrobatchStep]":
        """Return the steps of a call, with what runs before and after each."""
        return steps

    def lowered(self, bound: MicrobatchLimit | None) -> "MicrobatchPlanner":
        """Return a planner whose microbatches also respect ``bound``."""
        if bound is None:
            return self
        return replace(self, learned=MicrobatchLimit(*map(min, bound, self.learned or bound)))

    def fitted(self, plan: Plan, samples: Samples) -> Plan:
        """Return a plan that was made before, for these samples. Raises `PlanError` if it is of others."""
        if not isinstance(cast(object, plan), Plan):
            raise PlanError(f"plan is a {type(plan).__name__}; give what plan() returned, or last_plan")
        if plan.lengths != tuple(samples.lengths):
            pairs = zip(plan.lengths, samples.lengths, strict=False)
            other = next((f"sample {row}: {a} and {b} tokens" for row, (a, b) in enumerate(pairs) if a != b), "")
            numbers = f"{len(plan.lengths)} and {len(samples)} samples"
            raise PlanError(
                f"plan is of another batch ({other or numbers}); give it with the samples that it was made for, in "
                "their order"
            )
        cut = tuple(rows for rows in plan.microbatches if rows)
        if sorted(row for rows in cut for row in rows) != list(range(len(samples))):
            raise PlanError("plan has not every sample once; give what plan() returned, or last_plan")
        self.batching.check_plan(samples, plan)
        sync, reason = self.choice
        return replace(plan, microbatches=cut, sync=sync, reason=reason, num_split=0, steps=())

    def is_repeatable(self, hooks: LossHooks) -> bool:
        """Return True if no function of the user's that may draw random numbers is called to prepare a batch."""
        return self.batching.is_repeatable and (hooks.prepare is None or is_own(hooks.prepare))

    def prepare(self, batch: Batch, hooks: LossHooks, given: Plan | None = None) -> PreparedBatch:
        """Split, collate and weigh this rank's samples. Raises `PlanError` or `LossContractError`."""
        samples = self.samples(batch, hooks.prepare)
        plan = self.plan(samples) if given is None else self.fitted(given, samples)
        self.check(samples, plan, hooks)
        prepared = collate_planned(samples, plan, self.weigh_own(hooks.weigh))
        self.check_padding(samples, plan, hooks)
        return prepared if given is None else replace(prepared, is_given=True)

    def weigh_own(self, weigh: Weigh | None) -> Weigh | None:
        """Return the function that counts what this rank weighs of a microbatch of `samples`."""
        return weigh

    def check(self, samples: Samples, plan: Plan, hooks: LossHooks) -> None:
        """Raise `LossContractError` for a loss whose weight the samples do not have, before they are collated."""
        self.batching.check(samples, plan, hooks)

    def complete(
        self, prepared: PreparedBatch, agreement: "CallAgreement", hooks: LossHooks, wrapper: Wrapper
    ) -> tuple[PreparedBatch, "CallAgreement"]:
        """Return the call as it runs: where other ranks have more microbatches, this rank's are cut smaller.

        That costs less than a dummy microbatch. Dummies stand in for samples that a rank lacks, and run where
        microbatches are not to be cut again. No message is sent.
        """
        planned = prepared.plan.microbatches
        if not planned or len(planned) >= agreement.num_microbatches:
            return prepared, agreement
        from megabatch.engine.fill_up import fill_up

        return fill_up(self, prepared, agreement, hooks, wrapper)

    def check_padding(self, samples: Samples, plan: Plan, hooks: LossHooks) -> None:
        """Raise `LossContractError` for a weight that counts padding. Compare each ``weigh`` once."""
        weigh = hooks.weigh
        if weigh is None or self.compared.get(weigh):
            return
        if hooks.prepare is not None and not is_own(hooks.prepare):  # it may draw random numbers
            return
        if check_weights(samples, plan, hooks):
            self.compared.set(weigh, True)


def weights_of(weigh: Weigh, microbatch: Microbatch) -> dict[str, float]:
    """Return the weights that ``weigh`` counts in a microbatch, by term."""
    return counted_weights(_call_weigh(weigh, microbatch))


def _call_weigh(weigh: Weigh, microbatch: Microbatch) -> object:
    try:
        return weigh(microbatch)
    except StopIteration as error:
        raise LossContractError(f"weigh {STOPPED}") from error


def collate_planned(samples: Samples, plan: Plan, weigh: Weigh | None) -> PreparedBatch:
    """Collate and weigh the planned microbatches on the CPU. Keep no microbatch of a deferred batch."""
    if weigh is None:
        return PreparedBatch(samples, plan, (), ())
    try:
        collated, counts = samples.weigh(plan.microbatches, partial(_call_weigh, weigh))
        weights = tuple(map(counted_weights, counts))
    except KeyError as error:
        if len(kinds := samples.keys()) < 2:
            raise
        raise PlanError(
            f"weigh asks for {error} and samples of one batch have the keys {list(kinds[0])} and {list(kinds[1])}; "
            "give it to all"
        ) from error
    names = [sorted(weight) for weight in weights]
    if any(each != names[0] for each in names):
        raise LossContractError(f"weigh names the terms {names}; name the same terms for each microbatch")
    if names and len(names[0]) > MAX_WEIGHED_TERMS:
        raise LossContractError(f"weigh names {len(names[0])} terms; at most {MAX_WEIGHED_TERMS} are supported")
    weight_sums = {name: sum(weight[name] for weight in weights) for name in (names[0] if names else ())}
    return PreparedBatch(samples, plan, collated, weights, weight_sums)


@dataclass(frozen=True)
class CallAgreement:
    """The ranks' agreement on one call. Sums are over all ranks."""

    num_microbatches: int  # the largest number that any rank has
    num_samples: int
    num_tokens: int
    weights: dict[str, float]  # by weighed term; empty without weigh
    dummy: Callable[[], Microbatch] | None  # makes a dummy microbatch, for a rank that has fewer than the others
    compares_order: bool = False  # ranks compare each collective of the call before it begins


class RankReport(NamedTuple):
    """Numbers that a rank reports to the others about its part of a call."""

    failed: float
    num_microbatches: float
    num_samples: float
    num_tokens: float
    has_sample: float
    names_hash: float  # of the weighed terms
    fingerprint: float  # of the samples and their plan, if other ranks (cp, tp, pp) must have the same
    compares_order: float  # the loss is new on this rank, and ranks wait for each other in forwards
    keys_hash: float  # of the samples' keys, if all ranks must have the same; negative if this rank's samples differ
    weights: list[float]  # by term


@dataclass(frozen=True)
class MicrobatchStep:
    """One microbatch on its device, and its weights."""

    microbatch: Microbatch
    index: int
    announced: dict[str, float]  # weights by term that ranks were told: counted by weigh, or given by a deferred batch
    weighed: dict[str, float]  # weights that weigh counts; different from `announced` only if given weights are wrong
    is_dummy: bool
    differentiate: ClassVar[Callable[[Tensor], None]] = staticmethod(Tensor.backward)


def agree_on_call(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None, weigh: Weigh | None,
    remembered: Callable[[], Microbatch | None],
) -> CallAgreement:  # fmt: skip
    """Agree with the other ranks on a call. This takes one message between hosts, and none for a single rank.

    Args:
        wrapper: The model's wrapper.
        prepared: This rank's samples, or None if they could not be prepared.
        failure: The error that prevented it. It is raised on all ranks, so that none is left waiting.
        weigh: Counts the weights of the loss.
        remembered: Returns a dummy microbatch from an earlier call with this loss, or None if there was none.
    """
    ranks = wrapper.ranks
    if ranks.is_alone:
        if prepared is None:
            raise cast(Exception, failure)
        samples, num_microbatches = prepared.samples, len(prepared.plan.microbatches)
        return CallAgreement(
            num_microbatches, samples.num_samples, samples.num_tokens, prepared.weight_sums, dummy=None
        )
    reports = _exchange_reports(wrapper, prepared, failure, remembered)
    assert prepared is not None  # else its failure was raised
    _check_same_samples(ranks, reports)
    keys = {report.keys_hash for report in reports} - {0.0}
    if len(keys) > 1 or min(keys, default=0.0) < 0:  # they are told where forwards meet
        raise PlanError(
            f"samples have other keys on other ranks, or on one rank, and with {wrapper.kind_name} ranks wait for each "
            "other in every submodule; give all samples of a call the same keys, an image of zeros say"
        )
    if len({report.names_hash for report in reports if report.num_microbatches}) > 1:
        raise LossContractError("weigh names other terms on other ranks; name the same terms everywhere")
    num_microbatches = int(max(report.num_microbatches for report in reports))
    everyone_has = all(report.has_sample for report in reports)
    dummy = _dummy(ranks, prepared, num_microbatches, remembered, everyone_has=everyone_has)
    names = list(prepared.weight_sums)
    # Known to all ranks, since an idle one may have another loss.
    is_weighed = any(report.names_hash for report in reports)
    if is_weighed and not all(report.num_microbatches for report in reports):
        names = next(filter(None, ranks.exchange_objects(names)), [])  # an idle rank does not know them
    data = reports[: ranks.degree]
    weights = zip(*(report.weights for report in reports[: ranks.num_weighing]), strict=True)
    return CallAgreement(
        num_microbatches=num_microbatches,
        num_samples=int(sum(each.num_samples for each in data)),
        num_tokens=int(sum(each.num_tokens for each in data)),
        weights=dict(zip(names, map(sum, weights), strict=False)),
        dummy=dummy,
        compares_order=any(report.compares_order for report in reports),
    )


def agree_on_weights(ranks: DataRanks, weights: object, failure: Exception | None) -> dict[str, float]:
    """Return the sums over ranks of weights that were told before an update's first call. Empty if none were told.

    This takes one message between hosts. ``failure`` is an error of this rank, which is raised on all ranks.
    """
    own: dict[str, float] = {}
    try:
        own = {} if weights is None else counted_weights(weights, "the weight told to open()")
        if weights is not None and not 0 < len(own) <= MAX_WEIGHED_TERMS:
            raise PlanError(f"open() was told {len(own)} weights; tell 1 to {MAX_WEIGHED_TERMS}, or leave weights out")
    except Exception as error:  # the other ranks must know
        failure = failure or error
    names = zlib.crc32("\n".join(own).encode()) if own else 0
    padded = [*own.values(), *[0.0] * MAX_WEIGHED_TERMS][:MAX_WEIGHED_TERMS]
    rows = ranks.exchange_numbers([float(failure is not None), float(names), *padded])
    if any(row[0] for row in rows):
        raise first_failure(ranks, failure)
    if len({row[1] for row in rows}) > 1:
        raise PlanError(
            "open() was told weights of other terms on other ranks; name the same everywhere and in one order, 0 where "
            "a rank has none"
        )
    for data_rank in range(ranks.degree):
        if any(row != rows[data_rank] for row in rows[data_rank :: ranks.degree]):
            raise PlanError(
                f"open() was told other weights on ranks along cp, tp or pp of data rank {data_rank}; tell each the "
                "weights of the whole samples that they share"
            )
    return dict(zip(own, map(math.fsum, zip(*(row[2:] for row in rows[: ranks.degree]), strict=True)), strict=False))


def _exchange_reports(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None,
    remembered: Callable[[], Microbatch | None],
) -> list[RankReport]:  # fmt: skip
    """Return the reports of all ranks. An error on one rank is raised on all ranks."""
    ranks, num_fields = wrapper.ranks, len(RankReport._fields) - 1
    message = [1.0] + [0.0] * (num_fields - 1 + MAX_WEIGHED_TERMS)
    try:
        if prepared is not None:
            has_sample = len(prepared.samples) > 0 or remembered() is not None
            *numbers, weights = _report(prepared, wrapper, has_sample)
            message = [*numbers, *weights, *[0.0] * (MAX_WEIGHED_TERMS - len(weights))]
    except Exception as error:  # the user's loading may raise anything, and the other ranks must know
        failure = error
    reports = [RankReport(*row[:num_fields], weights=row[num_fields:]) for row in ranks.exchange_numbers(message)]
    if any(report.failed for report in reports):
        raise first_failure(ranks, failure)
    return reports


def _report(prepared: PreparedBatch, wrapper: Wrapper, has_sample: bool) -> RankReport:
    """Return this rank's report of a call."""
    samples, sums, ranks = prepared.samples, prepared.weight_sums, wrapper.ranks
    shares_samples = ranks.num_all > ranks.degree
    cut = repr(prepared.plan.microbatches).encode() if shares_samples else b""
    keys = samples.keys() if wrapper.forwards_meet else ()
    return RankReport(
        failed=0.0,
        num_microbatches=float(len(prepared.plan.microbatches)),
        num_samples=float(samples.num_samples),
        num_tokens=float(samples.num_tokens),
        has_sample=float(has_sample),
        names_hash=float(zlib.crc32("\n".join(sums).encode()) if sums else 0),
        fingerprint=float(zlib.crc32(cut, samples.fingerprint()) if shares_samples else 0),
        compares_order=float(wrapper.collective_order.wants_comparison),
        keys_hash=float(zlib.crc32(repr(keys).encode()) * (1 if len(keys) == 1 else -1) if keys else 0),
        weights=list(sums.values()),
    )


def _check_same_samples(ranks: DataRanks, reports: list[RankReport]) -> None:
    """Raise `PlanError` if ranks along cp, tp or pp, which must have the same samples, were given different ones."""
    for data_rank in range(ranks.degree):
        if len({report.fingerprint for report in reports[data_rank :: ranks.degree]}) > 1:
            raise PlanError(
                f"ranks along cp, tp or pp of data rank {data_rank} were given different samples, or cut them "
                "otherwise; give them the same: deal samples over the data axes only (UpdateSampler's dp_rank and "
                "dp_degree)"
            )


def _dummy(
    ranks: DataRanks,
    prepared: PreparedBatch,
    num_microbatches: int,
    remembered: Callable[[], Microbatch | None],
    *,
    everyone_has: bool,
) -> Callable[[], Microbatch] | None:
    """Return a function that makes a dummy microbatch, from this rank's samples or another's. None if not needed."""
    mine = prepared.dummy if len(prepared.samples) else remembered
    if num_microbatches and not everyone_has:
        offer, failure = None, None
        try:
            offer = mine()
        except Exception as error:  # as above
            failure = error
        failed, offers = zip(*ranks.exchange_objects((failure is not None, offer)), strict=True)
        if any(failed):
            raise first_failure(ranks, failure)
        if offer is None:
            sent = next(each for each in offers if each is not None)
            return lambda: clone(sent)  # a new one, since a loss may write to it
    return mine if num_microbatches > len(prepared.plan.microbatches) else None


def iterate_steps(
    prepared: PreparedBatch, agreement: CallAgreement, weigh: Weigh | None, wrapper: Wrapper, *, trains: bool = True
) -> Generator[MicrobatchStep]:
    """Yield the microbatches one after another. Each is on the device only for its own forward and backward.

    If ``trains`` is False, no backward follows, and the wrapper prepares no reduction.
    """
    samples, num_real, on_cpu = prepared.samples, len(prepared.plan.microbatches), wrapper.device.type == "cpu"
    count = partial(weights_of, weigh) if weigh is not None else None
    policies = policies_of_call(prepared.plan.sync, agreement.num_microbatches)
    with contextlib.closing(prepared.microbatches()) as real:  # the user's loading may be under way in it
        for index in range(agreement.num_microbatches):
            is_dummy = index >= num_real
            if is_dummy:
                assert agreement.dummy is not None  # some rank has more than this one
                microbatch = agreement.dummy()
            else:
                microbatch = next(real)
            if count is None:
                announced = weighed = {}
            elif is_dummy:
                announced = weighed = count(microbatch)
            else:
                announced = prepared.weights[index]
                weighed = samples.count_again(microbatch, announced, count)
            is_last = index == agreement.num_microbatches - 1
            with wrapper.microbatch(policies[index], last=is_last) if trains else contextlib.nullcontext():
                wrapper.is_counting = not is_dummy
                try:
                    samples.expect(microbatch)
                    moved = microbatch if on_cpu else to_device(microbatch, wrapper.device)
                    moved = samples.owned(microbatch, moved)
                    yield MicrobatchStep(moved, index, announced, weighed, is_dummy)
                    del moved
                finally:
                    wrapper.is_counting = None
            del microbatch  # before the next is made


def with_dummies(plan: Plan, num_microbatches: int) -> Plan:
    """Return the plan, filled up with dummy microbatches to ``num_microbatches``."""
    if num_microbatches <= len(plan.microbatches):
        return plan
    return replace(plan, microbatches=pad_with_dummies(plan.microbatches, num_microbatches))


def _one_line(failure: Exception) -> str:
    kind = "" if isinstance(failure, MegabatchError) else f"{type(failure).__name__}: "
    return kind + str(failure).strip().partition("\n")[0]


def first_failure(ranks: DataRanks, failure: Exception | None) -> Exception:
    """Return this rank's own failure, or else the first failure of another rank."""
    loses = getattr(failure, "loses_update", False)
    told = failure and (isinstance(failure, LossContractError), loses, _one_line(failure))
    if isinstance(failure, ReplanError):
        told = REPLAN
    failures: list[tuple[bool, bool, str] | None] = ranks.exchange_objects(told)
    if REPLAN in failures:  # an error of another rank may come of the limit
        return ReplanError(REPLAN[-1])
    loses = any(each is not None and each[1] for each in failures)
    if failure is not None and (ranks.num_all == 1 or not is_out_of_memory(failure)):  # else reported already
        if isinstance(failure, MegabatchError):
            failure.loses_update = loses
        return failure
    rank, (of_contract, _, text) = next((rank, each) for rank, each in enumerate(failures) if each is not None)
    rank %= ranks.degree  # ranks are ordered by their place along cp, tp and pp, then by data rank
    error = (LossContractError if of_contract else PlanError)(f"data rank {rank} of {ranks.degree}: {text}")
    error.loses_update = loses
    return error
