"""The plain way to run a plan: prepare a call on the CPU, agree over ranks, hand out the microbatches one by one.

Everything that can be wrong with a batch is found here, before the first forward and on all ranks at once.
"""

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch

from megabatch.batch import Microbatch, Samples, to_device
from megabatch.contract import Weigh, counted_weights
from megabatch.cut import Plan, pad_with_stand_ins
from megabatch.errors import LossContractError, MegabatchError, PlanError
from megabatch.mesh import DataRanks
from megabatch.sync import Reducer

MAX_WEIGHED_TERMS = 8  # the message between ranks has a fixed size


@dataclass(frozen=True)
class Share:
    """This rank's part of one call: its samples, cut, and weighed if the weight can be counted."""

    samples: Samples
    plan: Plan
    collated: tuple[Microbatch, ...]  # on the CPU; empty unless they were weighed
    weights: tuple[dict[str, float], ...]  # of each microbatch, by term

    def microbatch(self, index: int) -> Microbatch:
        """Microbatch ``index`` of the plan, on the CPU."""
        return self.collated[index] if self.collated else self.samples.take(self.plan.microbatches[index])

    def weight_sums(self) -> dict[str, float]:
        """This rank's weight of each term, in the order of the message; empty without a weighed microbatch."""
        names = sorted(self.weights[0]) if self.weights else []
        return {name: sum(each[name] for each in self.weights) for name in names}


@dataclass(frozen=True)
class Agreement:
    """What the ranks told each other about one call; sums are over all ranks."""

    num_microbatches: int  # the most that any rank has
    num_samples: int
    num_tokens: int
    weights: dict[str, float]  # by weighed term; empty without weigh
    stand_in: Microbatch | None  # a real sample that is run where a rank has fewer microbatches, and not counted


@dataclass(frozen=True)
class Turn:
    """One microbatch on its device, and what is known of it."""

    microbatch: Microbatch
    index: int
    counted: dict[str, float]  # weights counted from the data, by term
    is_stand_in: bool


def prepare(samples: Samples, plan: Plan, weigh: Weigh | None) -> Share:
    """Collate and weigh what was planned, on the CPU."""
    if weigh is None:
        return Share(samples, plan, (), ())
    collated = tuple(samples.take(rows) for rows in plan.microbatches)
    weights = tuple(counted_weights(weigh(microbatch)) for microbatch in collated)
    names = [sorted(each) for each in weights]
    if any(each != names[0] for each in names):
        raise LossContractError(f"weigh names the terms {names}; name the same terms for each microbatch")
    if names and len(names[0]) > MAX_WEIGHED_TERMS:
        raise LossContractError(f"weigh names {len(names[0])} terms; at most {MAX_WEIGHED_TERMS} are supported")
    return Share(samples, plan, collated, weights)


def agree(
    ranks: DataRanks, make_share: Callable[[], Share], weigh: Weigh | None, remembered: Callable[[], Microbatch | None]
) -> tuple[Share, Agreement]:
    """Prepare this rank's share and tell the others, in one message between hosts; with one rank, in none.

    ``remembered`` gives a sample of an earlier call as a microbatch, if there was one. A failure on any rank is
    raised on all of them, so that none is left waiting.
    """
    share, failure, has_sample = None, None, False
    try:
        share = make_share()
        has_sample = len(share.samples) > 0 or remembered() is not None
    except Exception as error:  # whatever the user's collate or weigh raises, the other ranks must hear of it
        failure = error
    failed, microbatches, samples, tokens, with_sample, hashes, *weights = zip(
        *ranks.exchange(_message(share, has_sample)), strict=True
    )
    if any(failed):
        raise _told_failure(ranks, failure)
    assert share is not None  # only a failure leaves it out
    if len({each for each, num in zip(hashes, microbatches, strict=True) if num}) > 1:
        raise LossContractError("weigh names other terms on other ranks; name the same terms everywhere")
    num_microbatches = int(max(microbatches))
    stand_in = _stand_in(ranks, share, num_microbatches, remembered, everyone_has=all(with_sample))
    names = list(share.weight_sums())
    if weigh is not None and stand_in is not None and not names:
        names = sorted(counted_weights(weigh(stand_in)))
    return share, Agreement(
        num_microbatches=num_microbatches,
        num_samples=int(sum(samples)),
        num_tokens=int(sum(tokens)),
        weights=dict(zip(names, map(sum, weights), strict=False)),
        stand_in=stand_in,
    )


def _stand_in(
    ranks: DataRanks,
    share: Share,
    num_microbatches: int,
    remembered: Callable[[], Microbatch | None],
    *,
    everyone_has: bool,
) -> Microbatch | None:
    """A sample of this rank's, or one that another rank sends; None where nobody needs one."""
    mine = None
    if num_microbatches > len(share.plan.microbatches) or not everyone_has:
        mine = share.samples.take([len(share.samples) - 1]) if len(share.samples) else remembered()
    if num_microbatches and not everyone_has:
        offers = ranks.exchange_objects(mine)
        mine = next(each for each in offers if each is not None) if mine is None else mine
    return mine


def turns(
    share: Share, agreement: Agreement, weigh: Weigh | None, reducer: Reducer, device: torch.device
) -> Generator[Turn]:
    """The microbatches in their turn, each moved to the device for its own forward and backward alone."""
    num_real = len(share.plan.microbatches)
    for index in range(agreement.num_microbatches):
        is_stand_in = index >= num_real
        microbatch = agreement.stand_in if is_stand_in else share.microbatch(index)
        if weigh is None:
            counted: dict[str, float] = {}
        else:
            counted = counted_weights(weigh(microbatch)) if is_stand_in else share.weights[index]
        last = index == agreement.num_microbatches - 1
        with reducer.microbatch(reduce=last or share.plan.sync == "every", last=last):
            yield Turn(to_device(microbatch, device), index, counted, is_stand_in)
    if agreement.num_microbatches:
        reducer.finish_call()


def with_stand_ins(plan: Plan, num_microbatches: int) -> Plan:
    """The plan with the stand-ins that bring it to everyone's number of microbatches."""
    return replace(plan, microbatches=pad_with_stand_ins(plan.microbatches, num_microbatches))


def _message(share: Share | None, has_sample: bool) -> list[float]:
    """[failed, microbatches, samples, tokens, has a sample, hash of the terms' names, weights...]"""
    if share is None:
        return [1.0] + [0.0] * (5 + MAX_WEIGHED_TERMS)
    sums = share.weight_sums()
    names_hash = zlib.crc32("\n".join(sums).encode()) if sums else 0
    counts = [0, len(share.plan.microbatches), len(share.samples), share.plan.num_tokens, has_sample, names_hash]
    return [*map(float, counts), *sums.values(), *[0.0] * (MAX_WEIGHED_TERMS - len(sums))]


def _one_line(failure: Exception) -> str:
    kind = "" if isinstance(failure, MegabatchError) else f"{type(failure).__name__}: "
    return kind + str(failure).strip().partition("\n")[0]


def _told_failure(ranks: DataRanks, failure: Exception | None) -> Exception:
    """This rank's own failure, or the first that another rank tells of."""
    told = failure and (isinstance(failure, LossContractError), _one_line(failure))
    failures: list[tuple[bool, str] | None] = ranks.exchange_objects(told)
    if failure is not None:
        return failure
    rank, (of_contract, text) = next((rank, each) for rank, each in enumerate(failures) if each is not None)
    return (LossContractError if of_contract else PlanError)(f"data rank {rank} of {ranks.degree}: {text}")
