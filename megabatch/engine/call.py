"""Agree over ranks on one call, and run through its microbatches.

Everything that can be wrong with a batch is found here, before the first forward and on all ranks at once.
"""

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from megabatch.batching.samples import Microbatch
from megabatch.batching.tree import clone, to_device
from megabatch.engine.oom_broadcast import is_out_of_memory
from megabatch.engine.prepare import MAX_WEIGHED_TERMS, PreparedBatch
from megabatch.errors import LossContractError, MegabatchError, PlanError
from megabatch.losses.contract import Weigh
from megabatch.planning.plan import Plan, pad_with_dummies
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.mesh import DataRanks


@dataclass(frozen=True)
class CallPlan:
    """The ranks' agreement on one call; sums are over all ranks."""

    num_microbatches: int  # the most that any rank has
    num_samples: int
    num_tokens: int
    weights: dict[str, float]  # by weighed term; empty without weigh
    dummy: Callable[[], Microbatch] | None  # a real sample, run where a rank has fewer microbatches; not counted


class RankReport(NamedTuple):
    """A rank's part of a call, told to the others as numbers; the weights by term."""

    failed: float
    num_microbatches: float
    num_samples: float
    num_tokens: float
    has_sample: float
    names_hash: float  # of the weighed terms
    fingerprint: float  # of the samples and their cut, where other ranks must have the same
    keys_hash: float  # of the keys of samples, where all must have the same; below 0 where samples differ
    weights: list[float]


@dataclass(frozen=True)
class MicrobatchStep:
    """One microbatch on its device, and its weights."""

    microbatch: Microbatch
    index: int
    counted: dict[str, float]  # weights counted from the data or told of it, by term; announced to all ranks
    weighed: dict[str, float]  # what weigh counts; differs from the former where what was told is wrong
    is_dummy: bool

    def differentiate(self, objective: Tensor) -> None:
        """Run the backward."""
        objective.backward()


def agree_on_call(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None, weigh: Weigh | None,
    remembered: Callable[[], Microbatch | None],
) -> CallPlan:  # fmt: skip
    """Agree with the other ranks on a call, in one message between hosts; alone, in none.

    Args:
        wrapper: Of the model.
        prepared: This rank's samples, None where they could not be prepared.
        failure: The reason, which is raised on all ranks, so that none is left waiting.
        weigh: Counts the weights of the loss.
        remembered: Gives a sample of an earlier call with this loss as a microbatch, if there was one.
    """
    ranks = wrapper.ranks
    if ranks.is_alone and failure is not None:
        raise failure
    if ranks.is_alone and prepared is not None:
        reports = [_report(prepared, wrapper, has_sample=True)]
    else:
        reports = _exchange_reports(wrapper, prepared, failure, remembered)
        _check_same_samples(ranks, reports)
    assert prepared is not None  # only a failure leaves it out
    keys = {each.keys_hash for each in reports} - {0.0}
    if wrapper.forwards_meet and (len(keys) > 1 or min(keys, default=0.0) < 0):
        raise PlanError(
            f"samples have other keys on other ranks, or on one rank, and with {wrapper.kind_name} ranks wait for each "
            "other in every submodule; give all samples of a call the same keys, an image of zeros say"
        )
    if len({each.names_hash for each in reports if each.num_microbatches}) > 1:
        raise LossContractError("weigh names other terms on other ranks; name the same terms everywhere")
    num_microbatches, names, dummy = int(max(each.num_microbatches for each in reports)), prepared.names, None
    if not ranks.is_alone:
        everyone_has = all(each.has_sample for each in reports)
        dummy = _dummy(ranks, prepared, num_microbatches, remembered, everyone_has=everyone_has)
        if weigh is not None and num_microbatches and not all(each.num_microbatches for each in reports):
            names = next(filter(None, ranks.exchange_objects(names)), [])  # a rank that has weighed nothing knows none
    data, weights = reports[: ranks.degree], zip(*(each.weights for each in reports[: ranks.num_weighing]), strict=True)
    return CallPlan(
        num_microbatches=num_microbatches,
        num_samples=int(sum(each.num_samples for each in data)),
        num_tokens=int(sum(each.num_tokens for each in data)),
        weights=dict(zip(names, map(sum, weights), strict=False)),
        dummy=dummy,
    )


def _exchange_reports(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None,
    remembered: Callable[[], Microbatch | None],
) -> list[RankReport]:  # fmt: skip
    """Return the reports of all ranks. Raises on all ranks what was raised on one."""
    ranks, num_told = wrapper.ranks, len(RankReport._fields) - 1
    message = [1.0] + [0.0] * (num_told - 1 + MAX_WEIGHED_TERMS)
    try:
        if prepared is not None:
            *numbers, weights = _report(prepared, wrapper, len(prepared.samples) > 0 or remembered() is not None)
            message = [*numbers, *weights, *[0.0] * (MAX_WEIGHED_TERMS - len(weights))]
    except Exception as error:  # whatever the user's loading raises, the other ranks must hear of it
        failure = error
    reports = [RankReport(*row[:num_told], weights=row[num_told:]) for row in ranks.exchange(message)]
    if any(each.failed for each in reports):
        raise first_failure(ranks, failure)
    return reports


def _report(prepared: PreparedBatch, wrapper: Wrapper, has_sample: bool) -> RankReport:
    """Return this rank's part of a call in numbers."""
    samples, names, ranks = prepared.samples, prepared.names, wrapper.ranks
    shares_samples = ranks.num_all > ranks.degree
    cut = repr(prepared.plan.microbatches).encode() if shares_samples else b""
    keys = samples.keys() if wrapper.forwards_meet else ()
    return RankReport(
        failed=0.0,
        num_microbatches=float(len(prepared.plan.microbatches)),
        num_samples=float(len(samples.lengths)),
        num_tokens=float(samples.num_tokens),
        has_sample=float(has_sample),
        names_hash=float(zlib.crc32("\n".join(names).encode()) if names else 0),
        fingerprint=float(zlib.crc32(cut, samples.fingerprint()) if shares_samples else 0),
        keys_hash=float(zlib.crc32(repr(keys).encode()) * (1 if len(keys) == 1 else -1) if keys else 0),
        weights=[sum(each[name] for each in prepared.weights) for name in names],
    )


def _check_same_samples(ranks: DataRanks, reports: list[RankReport]) -> None:
    """Raise where ranks that work on the same samples, along cp, tp or pp, were given others."""
    for data_rank in range(ranks.degree):
        if len({each.fingerprint for each in reports[data_rank :: ranks.degree]}) > 1:
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
    """A sample of this rank's, or one that another rank sends; None where nobody needs one."""
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
    prepared: PreparedBatch, call: CallPlan, weigh: Weigh | None, wrapper: Wrapper
) -> Generator[MicrobatchStep]:
    """Yield the microbatches one after another, each moved to the device for its own forward and backward alone."""
    if weigh is None and wrapper.ranks.context_groups:
        raise LossContractError(
            "sequences are cut over the mesh axis 'cp' and the loss does not say how its weight is counted, so a "
            "weight that counts samples would not be seen; give weigh=, see megabatch.loss"
        )
    samples, num_real, on_cpu = prepared.samples, len(prepared.plan.microbatches), wrapper.device.type == "cpu"
    real = iter(prepared.collated) if prepared.collated else samples.in_turn(prepared.plan.microbatches)
    try:
        for index in range(call.num_microbatches):
            is_dummy = index >= num_real
            if is_dummy:
                assert call.dummy is not None  # some rank has more than this one
                microbatch = call.dummy()
            else:
                microbatch = next(real)
            counted = {} if weigh is None or is_dummy else prepared.weights[index]
            weighed = counted
            if weigh is not None and (is_dummy or samples.deferred is not None):
                weighed = prepared.weighed(index, microbatch, weigh)
                counted = weighed if is_dummy else counted
            with wrapper.microbatch(prepared.plan.sync, last=index == call.num_microbatches - 1):
                wrapper.is_counting = not is_dummy
                try:
                    if samples.expect is not None:
                        samples.expect(microbatch)
                    moved = microbatch if on_cpu else to_device(microbatch, wrapper.device)
                    if samples.is_shared:
                        moved = samples.owned(microbatch, moved)
                    yield MicrobatchStep(moved, index, counted, weighed, is_dummy)
                    del moved
                finally:
                    wrapper.is_counting = None
            del microbatch  # before the next is made
    finally:
        if isinstance(real, Generator):
            real.close()  # the user's loading may be under way in it
    if call.num_microbatches:
        wrapper.finish_call()


def with_dummies(plan: Plan, num_microbatches: int) -> Plan:
    """Return the plan with the dummy microbatches that bring it to everyone's number of microbatches."""
    return replace(plan, microbatches=pad_with_dummies(plan.microbatches, num_microbatches))


def _one_line(failure: Exception) -> str:
    kind = "" if isinstance(failure, MegabatchError) else f"{type(failure).__name__}: "
    return kind + str(failure).strip().partition("\n")[0]


def first_failure(ranks: DataRanks, failure: Exception | None) -> Exception:
    """This rank's own failure, or the first that another rank tells of."""
    loses = getattr(failure, "loses_update", False)
    told = failure and (isinstance(failure, LossContractError), loses, _one_line(failure))
    failures: list[tuple[bool, bool, str] | None] = ranks.exchange_objects(told)
    loses = any(each is not None and each[1] for each in failures)
    if failure is not None and (ranks.num_all == 1 or not is_out_of_memory(failure)):  # which is told by now
        if isinstance(failure, MegabatchError):
            failure.loses_update = loses
        return failure
    rank, (of_contract, _, text) = next((rank, each) for rank, each in enumerate(failures) if each is not None)
    rank %= ranks.degree  # ranks that share samples come after those that do not
    error = (LossContractError if of_contract else PlanError)(f"data rank {rank} of {ranks.degree}: {text}")
    error.loses_update = loses
    return error
