"""The ranks' agreement on an accumulator, a call and the weights of an update. A plain call of one rank needs none."""

import math
import zlib
from collections.abc import Callable
from typing import NamedTuple

from megabatch.core.call import MAX_WEIGHED_TERMS, CallAgreement, PreparedBatch
from megabatch.core.contract import counted_weights
from megabatch.core.error_kinds import is_out_of_memory
from megabatch.core.mesh import DataRanks
from megabatch.core.samples import Microbatch
from megabatch.core.tree import clone
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError, MegabatchError, PlanError, ReplanError

REPLAN = (False, False, "the samples need another microbatch limit")  # what a rank tells of a `ReplanError`


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


def agree_over_ranks(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None,
    remembered: Callable[[], Microbatch | None],
) -> CallAgreement:  # fmt: skip
    """Agree with the other ranks on a call, by one message between hosts. See `agree_on_call`."""
    ranks = wrapper.ranks
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
        compares_order=float(wrapper.wants_comparison),
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
