"""The ranks' agreement on a call and on the weights of an update. A plain call of one rank needs none."""

import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Generic, NamedTuple, TypeVar

from megabatch.core.call import MAX_WEIGHED_TERMS, CallAgreement, PreparedBatch
from megabatch.core.contract import counted_weights
from megabatch.core.mesh import DataRanks
from megabatch.core.samples import Microbatch, Samples
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError, MegabatchError, PlanError, ReplanError
from megabatch.inspection.error_kinds import is_out_of_memory
from megabatch.inspection.tree import clone

Number = TypeVar("Number")
RecallDummy = Callable[[], Microbatch | None]


class CallReport(NamedTuple, Generic[Number]):
    """The part of a rank in a call, as the numbers of its message. With all ranks' numbers, each field is a column.

    Attributes:
        failed: 1 if this rank has an error to raise.
        has_sample: 1 if this rank can make a dummy microbatch.
        names_hash: Hash of the names of the weighed terms, 0 if there are none.
        samples_hash: Hash of the samples and their plan if other ranks (cp, tp, pp) must have the same, else 0.
        compares_order: 1 if the loss is new on this rank, and ranks wait for each other in forwards.
        keys_hash: Hash of the samples' keys if all ranks must have the same. Negative if they differ on this rank.
        weights: Announced weights by term, padded to a fixed number.
    """

    failed: Number
    num_microbatches: Number
    num_samples: Number
    num_tokens: Number
    has_sample: Number
    names_hash: Number
    samples_hash: Number
    compares_order: Number
    keys_hash: Number
    weights: Sequence[Number]


NUM_COUNTS = len(CallReport._fields) - 1
Reports = CallReport[tuple[float, ...]]


class FailureReport(NamedTuple):
    """The failure of a rank, as it tells the others."""

    breaks_contract: bool
    loses_update: bool
    text: str


# The report of a `ReplanError`.
REPLAN = FailureReport(breaks_contract=False, loses_update=False, text="the samples need another microbatch limit")


def agree_over_ranks(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None, recall_dummy: RecallDummy
) -> CallAgreement:
    """Agree with the other ranks on a call. See `agree_on_call`.

    This takes one message between hosts, and more where a rank has an error, no microbatch, or no sample for a dummy.
    """
    ranks = wrapper.ranks
    reports = _exchange_reports(wrapper, prepared, failure, recall_dummy)
    assert prepared is not None
    _check_same_samples(ranks, reports)
    _check_same_keys(wrapper, reports)
    _check_same_terms(reports)
    dummy = _agree_on_dummy(ranks, prepared, reports, recall_dummy)
    names = _agree_on_terms(ranks, prepared, reports)
    columns = zip(names, reports.weights, strict=False)
    weights = {name: sum(column[: ranks.num_weighing]) for name, column in columns}
    return CallAgreement(
        num_microbatches=int(max(reports.num_microbatches)),
        num_samples=int(sum(reports.num_samples[: ranks.degree])),
        num_tokens=int(sum(reports.num_tokens[: ranks.degree])),
        weights=weights,
        dummy=dummy,
        compares_order=any(reports.compares_order),
    )


def _exchange_reports(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None, recall_dummy: RecallDummy
) -> Reports:
    """Return the reports of all ranks. An error on one rank is raised on all ranks."""
    ranks = wrapper.ranks
    message = [1.0] + [0.0] * (NUM_COUNTS - 1 + MAX_WEIGHED_TERMS)
    # The user's loading may raise anything, and the other ranks must know.
    try:
        if prepared is not None:
            *counts, weights = _report_call(wrapper, prepared, recall_dummy)
            message = [*counts, *_padded(weights)]
    except Exception as error:
        failure = error
    columns = list(zip(*ranks.exchange_numbers(message), strict=True))
    reports = CallReport(*columns[:NUM_COUNTS], weights=columns[NUM_COUNTS:])
    if any(reports.failed):
        raise first_failure(ranks, failure)
    return reports


def _report_call(wrapper: Wrapper, prepared: PreparedBatch, recall_dummy: RecallDummy) -> CallReport[float]:
    """Return this rank's report of a call."""
    samples, ranks = prepared.samples, wrapper.ranks
    samples_hash = keys_hash = 0
    if ranks.num_all > ranks.degree:
        cut = repr(prepared.plan.microbatches).encode()
        samples_hash = zlib.crc32(cut, samples.fingerprint())
    if wrapper.forwards_meet:
        keys_hash = _hash_keys(samples)
    return CallReport(
        failed=0.0,
        num_microbatches=float(len(prepared.plan.microbatches)),
        num_samples=float(samples.num_samples),
        num_tokens=float(samples.num_tokens),
        has_sample=float(len(samples) > 0 or recall_dummy() is not None),
        names_hash=_hash_names(prepared.weight_sums),
        samples_hash=float(samples_hash),
        compares_order=float(wrapper.wants_comparison),
        keys_hash=float(keys_hash),
        weights=list(prepared.weight_sums.values()),
    )


def _hash_names(names: Iterable[str]) -> float:
    """Return a hash of the names of terms, 0 without names."""
    return float(zlib.crc32("\n".join(names).encode()))


def _hash_keys(samples: Samples) -> int:
    """Return a hash of the samples' keys, negative if they differ, and 0 without samples."""
    keys = samples.keys()
    if not keys:
        return 0
    hash_of_keys = zlib.crc32(repr(keys).encode())
    return hash_of_keys if len(keys) == 1 else -hash_of_keys


def _padded(weights: Iterable[float]) -> list[float]:
    """Return the weights as the end of a message of fixed size."""
    return [*weights, *[0.0] * MAX_WEIGHED_TERMS][:MAX_WEIGHED_TERMS]


def _check_same_samples(ranks: DataRanks, reports: Reports) -> None:
    """Raise `PlanError` if ranks along cp, tp or pp, which must have the same samples, were given different ones."""
    data_rank = _find_unequal_data_rank(ranks, reports.samples_hash)
    if data_rank is not None:
        raise PlanError(
            f"ranks along cp, tp or pp of data rank {data_rank} were given different samples, or cut them "
            "otherwise; give them the same: deal samples over the data axes only (UpdateSampler's dp_rank and "
            "dp_degree)"
        )


def _find_unequal_data_rank(ranks: DataRanks, values: Sequence[Hashable]) -> int | None:
    """Return the first data rank whose ranks along cp, tp and pp have different values, None without one."""
    for data_rank in range(ranks.degree):
        if len(set(values[data_rank :: ranks.degree])) > 1:
            return data_rank
    return None


def _check_same_keys(wrapper: Wrapper, reports: Reports) -> None:
    """Raise `PlanError` if samples have other keys where forwards meet. Elsewhere no rank reports them."""
    hashes = set(reports.keys_hash) - {0.0}
    if len(hashes) > 1 or min(hashes, default=0.0) < 0:
        raise PlanError(
            f"samples have other keys on other ranks, or on one rank, and with {wrapper.kind_name} ranks wait for each "
            "other in every submodule; give all samples of a call the same keys, an image of zeros say"
        )


def _check_same_terms(reports: Reports) -> None:
    """Raise `LossContractError` if ranks with microbatches weigh other terms."""
    if len(set(compress(reports.names_hash, reports.num_microbatches))) > 1:
        raise LossContractError("weigh names other terms on other ranks; name the same terms everywhere")


def _agree_on_dummy(
    ranks: DataRanks, prepared: PreparedBatch, reports: Reports, recall_dummy: RecallDummy
) -> Callable[[], Microbatch] | None:
    """Return a function that makes a dummy microbatch, from this rank's samples or another's. None if not needed."""
    make_dummy = prepared.dummy if len(prepared.samples) else recall_dummy
    num_microbatches = max(reports.num_microbatches)
    if num_microbatches and not all(reports.has_sample):
        dummy, received = _exchange_dummies(ranks, make_dummy)
        if dummy is None:
            # A new one for each call, since a loss may write to it.
            return partial(clone, received)
    return make_dummy if num_microbatches > len(prepared.plan.microbatches) else None


def _exchange_dummies(ranks: DataRanks, make_dummy: RecallDummy) -> tuple[Microbatch | None, Microbatch]:
    """Return this rank's dummy microbatch, and the first of any rank."""
    dummy, failure = None, None
    # The user's loading may raise anything, and the other ranks must know.
    try:
        dummy = make_dummy()
    except Exception as error:
        failure = error
    failed, dummies = zip(*ranks.exchange_objects((failure is not None, dummy)), strict=True)
    if any(failed):
        raise first_failure(ranks, failure)
    return dummy, next(received for received in dummies if received is not None)


def _agree_on_terms(ranks: DataRanks, prepared: PreparedBatch, reports: Reports) -> list[str]:
    """Return the names of the weighed terms. A rank without microbatches learns them from the others."""
    names = list(prepared.weight_sums)
    # All ranks must take part in the exchange, whether an idle rank's own loss is weighed or not.
    if any(reports.names_hash) and not all(reports.num_microbatches):
        return next(filter(None, ranks.exchange_objects(names)), [])
    return names


def first_failure(ranks: DataRanks, failure: Exception | None) -> Exception:
    """Return this rank's failure, or else the first of any rank. Collective."""
    reports: list[FailureReport | None] = ranks.exchange_objects(_report_failure(failure))
    # An error of another rank may come of the limit.
    if REPLAN in reports:
        return ReplanError(REPLAN.text)
    failures = {rank: report for rank, report in enumerate(reports) if report is not None}
    loses_update = any(map(attrgetter("loses_update"), failures.values()))
    # On several ranks, an out-of-memory error becomes one of this exchange, which all ranks raise. As it is, it would
    # be broadcast again, which aborts the collectives of the others.
    if failure is not None and (ranks.num_all == 1 or not is_out_of_memory(failure)):
        if isinstance(failure, MegabatchError):
            failure.loses_update = loses_update
        return failure
    rank, report = next(iter(failures.items()))
    # Ranks are ordered by their place along cp, tp and pp, then by data rank.
    data_rank = rank % ranks.degree
    error_type = LossContractError if report.breaks_contract else PlanError
    error = error_type(f"data rank {data_rank} of {ranks.degree}: {report.text}")
    error.loses_update = loses_update
    return error


def _report_failure(failure: Exception | None) -> FailureReport | None:
    """Return the report of a failure, which carries no object of the user's."""
    if failure is None:
        return None
    if isinstance(failure, ReplanError):
        return REPLAN
    text = str(failure).strip().partition("\n")[0]
    if not isinstance(failure, MegabatchError):
        text = f"{type(failure).__name__}: {text}"
    return FailureReport(isinstance(failure, LossContractError), getattr(failure, "loses_update", False), text)


def agree_on_weights(ranks: DataRanks, weights: object, failure: Exception | None) -> dict[str, float]:
    """Return the sums over ranks of the weights that `open` was told, by term. Empty without weights.

    This takes one message between hosts. ``failure`` is an error of this rank, which is raised on all ranks.
    """
    local_weights: dict[str, float] = {}
    # Anything may be given as weights, and the other ranks must know.
    try:
        local_weights = _weights_of_open(weights)
    except Exception as error:
        failure = failure or error
    message = [float(failure is not None), _hash_names(local_weights), *_padded(local_weights.values())]
    rows = list(map(tuple, ranks.exchange_numbers(message)))
    failed, hashes, *columns = zip(*rows, strict=True)
    if any(failed):
        raise first_failure(ranks, failure)
    if len(set(hashes)) > 1:
        raise PlanError(
            "open() was told weights of other terms on other ranks; name the same everywhere and in one order, 0 where "
            "a rank has none"
        )
    data_rank = _find_unequal_data_rank(ranks, rows)
    if data_rank is not None:
        raise PlanError(
            f"open() was told other weights on ranks along cp, tp or pp of data rank {data_rank}; tell each the "
            "weights of the whole samples that they share"
        )
    columns_of_terms = zip(local_weights, columns, strict=False)
    return {name: math.fsum(column[: ranks.degree]) for name, column in columns_of_terms}


def _weights_of_open(weights: object) -> dict[str, float]:
    """Return the weights that `open` was told as numbers by term. Empty without weights."""
    if weights is None:
        return {}
    numbers = counted_weights(weights, "the weight told to open()")
    if not 0 < len(numbers) <= MAX_WEIGHED_TERMS:
        raise PlanError(f"open() was told {len(numbers)} weights; tell 1 to {MAX_WEIGHED_TERMS}, or leave weights out")
    return numbers
