"""The plain way to run a plan: agree over ranks on a call, and hand out its microbatches one by one.

Everything that can be wrong with a batch is found here, before the first forward and on all ranks at once.
"""

import contextlib
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from megabatch.batching.samples import Microbatch
from megabatch.batching.tree import clone, to_device
from megabatch.engine.oom_broadcast import is_out_of_memory
from megabatch.engine.prepare import MAX_WEIGHED_TERMS, PreparedBatch
from megabatch.errors import LossContractError, MegabatchError, PlanError
from megabatch.losses.contract import Weigh
from megabatch.planning.plan import Plan, pad_with_dummies
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.mesh import DataRanks

NUM_TOLD = 8  # numbers of `RankReport` before the weights


@dataclass(frozen=True)
class CallPlan:
    """What the ranks told each other about one call; sums are over all ranks."""

    num_microbatches: int  # the most that any rank has
    num_samples: int
    num_tokens: int
    weights: dict[str, float]  # by weighed term; empty without weigh
    dummy: Callable[[], Microbatch] | None  # a real sample, run where a rank has fewer microbatches; not counted


class RankReport(NamedTuple):
    """What a rank tells the others about its part of a call, as numbers; the weights by term, filled up with zeros."""

    failed: float
    num_microbatches: float
    num_samples: float
    num_tokens: float
    has_sample: float
    names_hash: float  # of the weighed terms
    fingerprint: float  # of the samples and their cut, where other ranks must have the same
    keys_hash: float  # of the keys of samples, where all must have the same; below 0 where samples differ
    weights: list[float]

    @classmethod
    def of(cls, row: list[float]) -> "RankReport":
        failed, microbatches, samples, tokens, has_sample, names_hash, fingerprint, keys_hash, *weights = row
        return cls(failed, microbatches, samples, tokens, has_sample, names_hash, fingerprint, keys_hash, weights)


@dataclass(frozen=True)
class MicrobatchStep:
    """One microbatch on its device, and what is known of it."""

    microbatch: Microbatch
    index: int
    counted: dict[str, float]  # weights counted from the data or told of it, by term; announced to all ranks
    weighed: dict[str, float]  # what weigh counts; differs from the former where what was told is wrong
    is_dummy: bool
    is_part: bool = False  # of a microbatch that did not fit in memory
    wanted: Sequence[nn.Parameter] | None = None  # those that still lack its gradient; None: all
    retold: Mapping[str, int] = field(default_factory=dict[str, int])  # what else was taken back, and how often


def agree_on_call(
    wrapper: Wrapper, make_share: Callable[[], PreparedBatch], weigh: Weigh | None,
    remembered: Callable[[], Microbatch | None],
) -> tuple[PreparedBatch, CallPlan]:  # fmt: skip
    """Prepare this rank's share and tell the others, in one message between hosts; with one rank, in none.

    ``remembered`` gives a sample of an earlier call with this loss as a microbatch, if there was one. A failure on any
    rank is raised on all of them, so that none is left waiting.
    """
    ranks = wrapper.ranks
    share, failure, has_sample = None, None, False
    try:
        share = make_share()
        has_sample = len(share.samples) > 0 or remembered() is not None
    except Exception as error:  # whatever the user's collate or weigh raises, the other ranks must hear of it
        failure = error
    told = list(map(RankReport.of, ranks.exchange(_message(share, wrapper, has_sample))))
    if any(each.failed for each in told):
        raise first_failure(ranks, failure)
    assert share is not None  # only a failure leaves it out
    _check_same_samples(ranks, told)
    keys = {each.keys_hash for each in told} - {0.0}
    if wrapper.forwards_meet and (len(keys) > 1 or min(keys, default=0.0) < 0):
        raise PlanError(
            f"samples have other keys on other ranks, or on one rank, and with {wrapper.kind_name} ranks wait for each "
            "other in every submodule; give all samples of a call the same keys, an image of zeros say"
        )
    if len({each.names_hash for each in told if each.num_microbatches}) > 1:
        raise LossContractError("weigh names other terms on other ranks; name the same terms everywhere")
    num_microbatches = int(max(each.num_microbatches for each in told))
    dummy = _dummy(ranks, share, num_microbatches, remembered, everyone_has=all(each.has_sample for each in told))
    names = list(share.weight_sums())
    if weigh is not None and num_microbatches and not all(each.num_microbatches for each in told):
        names = next(filter(None, ranks.exchange_objects(names)), [])  # a rank that has weighed nothing knows none
    data, weights = told[: ranks.degree], zip(*(each.weights for each in told[: ranks.num_weighing]), strict=True)
    return share, CallPlan(
        num_microbatches=num_microbatches,
        num_samples=int(sum(each.num_samples for each in data)),
        num_tokens=int(sum(each.num_tokens for each in data)),
        weights=dict(zip(names, map(sum, weights), strict=False)),
        dummy=dummy,
    )


def _check_same_samples(ranks: DataRanks, told: list[RankReport]) -> None:
    """Raise where ranks that work on the same samples, along cp, tp or pp, were given others."""
    for data_rank in range(ranks.degree):
        if len({each.fingerprint for each in told[data_rank :: ranks.degree]}) > 1:
            raise PlanError(
                f"ranks along cp, tp or pp of data rank {data_rank} were given different samples, or cut them "
                "otherwise; give them the same: deal samples over the data axes only (UpdateSampler's dp_rank and "
                "dp_degree)"
            )


def _dummy(
    ranks: DataRanks,
    share: PreparedBatch,
    num_microbatches: int,
    remembered: Callable[[], Microbatch | None],
    *,
    everyone_has: bool,
) -> Callable[[], Microbatch] | None:
    """A sample of this rank's, or one that another rank sends; None where nobody needs one."""
    mine = share.dummy if len(share.samples) else remembered
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
    return mine if num_microbatches > len(share.plan.microbatches) else None


def iterate_steps(
    share: PreparedBatch, call: CallPlan, weigh: Weigh | None, wrapper: Wrapper, device: torch.device
) -> Generator[MicrobatchStep]:
    """The microbatches in their turn, each moved to the device for its own forward and backward alone."""
    if weigh is None and wrapper.ranks.context_degree > 1:
        raise LossContractError(
            "sequences are cut over the mesh axis 'cp' and the loss does not say how its weight is counted, so a "
            "weight that counts samples would not be seen; give weigh=, see megabatch.loss"
        )
    num_real = len(share.plan.microbatches)
    with contextlib.closing(share.microbatches()) as real:
        for index in range(call.num_microbatches):
            is_dummy = index >= num_real
            if is_dummy:
                assert call.dummy is not None  # some rank has more than this one
                microbatch = call.dummy()
            else:
                microbatch = next(real)
            weighed = {} if weigh is None else share.weighed(index, microbatch, weigh)
            counted = weighed if weigh is None or is_dummy else share.weights[index]
            last = index == call.num_microbatches - 1
            with wrapper.microbatch(share.plan.sync, last=last):
                wrapper.is_counting = not is_dummy
                try:
                    share.samples.expect(microbatch)
                    moved = share.samples.owned(microbatch, to_device(microbatch, device))
                    yield MicrobatchStep(moved, index, counted, weighed, is_dummy)
                    del moved
                finally:
                    wrapper.is_counting = None
            del microbatch  # before the next is made
    if call.num_microbatches:
        wrapper.finish_call()


def with_dummies(plan: Plan, num_microbatches: int) -> Plan:
    """The plan with the dummy microbatches that bring it to everyone's number of microbatches."""
    return replace(plan, microbatches=pad_with_dummies(plan.microbatches, num_microbatches))


def _message(share: PreparedBatch | None, wrapper: Wrapper, has_sample: bool) -> list[float]:
    """The fields of `RankReport`, in one row of a fixed length."""
    if share is None:
        return [1.0] + [0.0] * (NUM_TOLD - 1 + MAX_WEIGHED_TERMS)
    sums = share.weight_sums()
    names_hash = zlib.crc32("\n".join(sums).encode()) if sums else 0
    cut = repr(share.plan.microbatches).encode()
    shares_samples = wrapper.ranks.num_all > wrapper.ranks.degree
    fingerprint = zlib.crc32(cut, share.samples.fingerprint()) if shares_samples else 0
    keys = share.samples.keys() if wrapper.forwards_meet else ()
    keys_hash = zlib.crc32(repr(keys).encode()) * (1 if len(keys) == 1 else -1) if keys else 0
    counts = [0, len(share.plan.microbatches), len(share.samples), share.samples.num_tokens]
    rest = [0.0] * (MAX_WEIGHED_TERMS - len(sums))
    return [*map(float, [*counts, has_sample, names_hash, fingerprint, keys_hash]), *sums.values(), *rest]


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
