"""The plain way to run a plan: prepare a call on the CPU, agree over ranks, hand out the microbatches one by one.

Everything that can be wrong with a batch is found here, before the first forward and on all ranks at once.
"""

import contextlib
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import torch

from megabatch.batch import Microbatch, Samples, to_device
from megabatch.contract import PAIR_NAME, Weigh, counted_weights
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
    collated: tuple[Microbatch, ...]  # on the CPU; empty unless they were weighed, and for a deferred batch
    weights: tuple[dict[str, float], ...]  # of each microbatch, by term

    def microbatches(self) -> Generator[Microbatch]:
        """The microbatches of the plan in turn, on the CPU."""
        return (each for each in self.collated) if self.collated else self.samples.in_turn(self.plan.microbatches)

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
class Agreement:
    """What the ranks told each other about one call; sums are over all ranks."""

    num_microbatches: int  # the most that any rank has
    num_samples: int
    num_tokens: int
    weights: dict[str, float]  # by weighed term; empty without weigh
    stand_in: Callable[[], Microbatch] | None  # a real sample, run where a rank has fewer microbatches; not counted


@dataclass(frozen=True)
class Turn:
    """One microbatch on its device, and what is known of it."""

    microbatch: Microbatch
    index: int
    counted: dict[str, float]  # weights counted from the data or told of it, by term; announced to all ranks
    weighed: dict[str, float]  # what weigh counts; differs from the former where what was told is wrong
    is_stand_in: bool


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
        names = sorted(counted_weights(weigh(stand_in())))
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
) -> Callable[[], Microbatch] | None:
    """A sample of this rank's, or one that another rank sends; None where nobody needs one."""
    mine = share.samples.stand_in if len(share.samples) else remembered
    if num_microbatches and not everyone_has:
        offer, failure = None, None
        try:
            offer = mine()
        except Exception as error:  # as above
            failure = error
        failed, offers = zip(*ranks.exchange_objects((failure is not None, offer)), strict=True)
        if any(failed):
            raise _told_failure(ranks, failure)
        sent = next(each for each in offers if each is not None) if offer is None else offer
        return lambda: sent
    return mine if num_microbatches > len(share.plan.microbatches) else None


def turns(
    share: Share, agreement: Agreement, weigh: Weigh | None, reducer: Reducer, device: torch.device
) -> Generator[Turn]:
    """The microbatches in their turn, each moved to the device for its own forward and backward alone."""
    num_real = len(share.plan.microbatches)
    with contextlib.closing(share.microbatches()) as real:
        for index in range(agreement.num_microbatches):
            is_stand_in = index >= num_real
            if is_stand_in:
                assert agreement.stand_in is not None  # some rank has more than this one
                microbatch = agreement.stand_in()
            else:
                microbatch = next(real)
            weighed = {} if weigh is None else share.weighed(index, microbatch, weigh)
            counted = weighed if weigh is None or is_stand_in else share.weights[index]
            last = index == agreement.num_microbatches - 1
            with reducer.microbatch(reduce=last or share.plan.sync == "every", last=last):
                yield Turn(to_device(microbatch, device), index, counted, weighed, is_stand_in)
            del microbatch  # before the next is made
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
