"""Plan and plan(): which samples share a microbatch, in what order, and when gradients are reduced.

Pure: lengths in, a frozen plan out. It knows no tensor, model or process group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megabatch.errors import MicrobatchLimit, PlanError, require_count
from megabatch.planning.cost import CostModel, check_cost
from megabatch.planning.partition import balance, best_fit, split

# Without a measured cost, one more microbatch is worth a sixteenth of what the cap says the hardware takes at once.
LAUNCH_SHARE = 16
Parts = Mapping[int, Sequence[tuple[int, ...]]]  # of microbatches that did not fit in memory, by their index


@dataclass(frozen=True)
class Plan:
    """One rank's part of an update, cut into microbatches."""

    microbatches: tuple[tuple[int, ...], ...]  # indices into ``lengths``; () is a dummy microbatch
    lengths: tuple[int, ...]  # tokens of this rank's samples
    samples: tuple[int, ...] = ()  # which of the planned samples they are
    sync: str = "last"  # "last": reduce once, with the last microbatch; "every": with each
    reason: str = ""  # why this sync
    seconds: float | None = None  # predicted by the cost model that was given
    peak_bytes: float | None = None
    num_split: int = 0  # microbatches that did not fit in memory and were run in parts
    one_shape: bool = False  # whether each is filled up to the most samples and the longest of all, as in a pipeline
    padded: bool = True  # whether samples are filled up to the longest of their microbatch

    @property
    def num_microbatches(self) -> int:
        """Forward and backward passes of this rank: the gradient accumulation steps."""
        return len(self.microbatches)

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return sum(self.lengths)

    @property
    def padded_tokens(self) -> int:
        """Tokens that go through the model: rows times the longest row where they are padded; no dummy microbatches."""
        cut = [rows for rows in self.microbatches if rows]
        if self.one_shape:
            return len(cut) * max(map(len, cut), default=0) * max(self.lengths, default=0)
        return sum(map(self.tokens_of, cut))

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are padding, in [0, 1)."""
        return 1 - self.num_tokens / self.padded_tokens if self.num_tokens else 0.0

    def tokens_of(self, rows: Sequence[int]) -> int:
        """Tokens that samples take together, with their padding."""
        lengths = self.lengths_of(rows)
        return len(lengths) * max(lengths, default=0) if self.padded else sum(lengths)

    def lengths_of(self, rows: Sequence[int]) -> list[int]:
        """Real tokens of some samples."""
        return [self.lengths[row] for row in rows]

    def bound_of(self, parts: Sequence[Sequence[int]]) -> MicrobatchLimit:
        """What holds each of some microbatches."""
        return MicrobatchLimit(max(map(len, parts)), max(map(self.tokens_of, parts)))

    def in_parts(self, parts: Parts) -> "Plan":
        """The plan as it was run."""
        cut = (parts.get(index, [rows]) for index, rows in enumerate(self.microbatches))
        return replace(self, microbatches=tuple(rows for each in cut for rows in each), num_split=len(parts))

    def explain(self) -> str:
        """The plan in words, for a person: one line a fact."""
        dummies = sum(not rows for rows in self.microbatches)
        rows = [len(rows) for rows in self.microbatches if rows] or [0]
        spread = f"{min(rows)}" if min(rows) == max(rows) else f"{min(rows)} to {max(rows)}"
        samples = _count(len(self.lengths), "sample", "s")
        microbatches = _count(self.num_microbatches, "microbatch", "es")
        lines = [
            f"{samples} in {microbatches} of {spread}"
            + (f", {dummies} of them dummy microbatches of no weight" if dummies else ""),
            f"{self.num_tokens:,} real tokens, {self.padded_tokens:,} computed: {self.padding:.1%} padding",
            f"sync {self.sync}" + (f": {self.reason}" if self.reason else ""),
        ]
        if self.num_split:
            lines.append(f"{_count(self.num_split, 'microbatch', 'es')} did not fit in memory and ran in parts")
        if self.seconds is not None:
            lines.append(f"predicted {self.seconds:.3g} seconds")
        if self.peak_bytes:
            lines.append(f"predicted peak {self.peak_bytes / 2**30:.2f} GiB")
        return "\n".join(lines)


def plan(
    lengths: Sequence[int],
    *,
    dp_degree: int = 1,
    micro_batch_size: int | None = None,
    max_microbatch_tokens: int | None = None,
    cost: CostModel | None = None,
) -> list[Plan]:
    """Deal an update's samples over ``dp_degree`` ranks and cut each share into microbatches.

    Returns a plan per rank; each runs the same number of microbatches, the shorter shares end with dummy microbatches.
    Exactly one of ``micro_batch_size`` (samples) and ``max_microbatch_tokens`` (padded tokens, a hard cap)
    must be given. Raises `PlanError` for anything that cannot be planned.
    """
    check_bound(micro_batch_size, max_microbatch_tokens)
    check_cost(cost)
    require_count("dp_degree", dp_degree)
    check_lengths(lengths, max_microbatch_tokens)
    price = cost or CostModel(seconds_per_microbatch=(max_microbatch_tokens or 0) / LAUNCH_SHARE)
    shares = balance([price.sample_seconds(length) for length in lengths], dp_degree)
    cuts: list[list[tuple[int, ...]]] = []
    for share in shares:
        own = [lengths[sample] for sample in share]
        cuts.append(split(own, price.seconds, max_rows=micro_batch_size, max_tokens=max_microbatch_tokens))
    num_microbatches = max(len(cut) for cut in cuts)
    plans: list[Plan] = []
    for share, cut in zip(shares, cuts, strict=True):
        own = tuple(lengths[sample] for sample in share)
        made = Plan(pad_with_dummies(cut, num_microbatches), own, tuple(share))
        plans.append(made if cost is None else priced(made, cost))
    return plans


def without_padding(lengths: Sequence[int], plan: Plan, max_microbatch_tokens: int | None) -> Plan:
    """The plan of one rank's samples where nothing is padded: as few microbatches as best fit finds under the cap.

    Without a cap samples are counted, and stay as they were cut.
    """
    if max_microbatch_tokens is not None:
        rows = best_fit([max(1, length) for length in lengths], max_microbatch_tokens)
        plan = replace(plan, microbatches=tuple(map(tuple, rows)))
    return replace(plan, padded=False)


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def pad_with_dummies(microbatches: Sequence[tuple[int, ...]], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """The microbatches, followed by as many dummy microbatches as make ``num_microbatches``."""
    return (*microbatches, *[()] * (num_microbatches - len(microbatches)))


def split_in_halves(rows: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The samples of a microbatch in two parts, or in one where there is only one sample."""
    middle = (len(rows) + 1) // 2
    return [each for each in (rows[:middle], rows[middle:]) if each]


def check_bound(micro_batch_size: int | None, max_microbatch_tokens: int | None) -> None:
    """Raise `PlanError` unless exactly one of the two bounds is given, as a positive whole number."""
    if micro_batch_size is None and max_microbatch_tokens is None:
        raise PlanError(
            "neither of micro_batch_size and max_microbatch_tokens given; "
            "give one: samples per forward, or padded tokens per forward"
        )
    check_bounds(micro_batch_size, max_microbatch_tokens)


def check_bounds(
    micro_batch_size: int | None, max_microbatch_tokens: int | str | None
) -> tuple[int | None, int | None]:
    """Both bounds, "auto" as None. Raises `PlanError` where both are given, or one that is no positive whole number."""
    if micro_batch_size is not None and max_microbatch_tokens is not None:
        raise PlanError(
            "both of micro_batch_size and max_microbatch_tokens given; "
            "give one: samples per forward, or padded tokens per forward"
        )
    if micro_batch_size is not None:
        require_count("micro_batch_size", micro_batch_size)
    if max_microbatch_tokens is None or max_microbatch_tokens == "auto":
        return micro_batch_size, None
    return micro_batch_size, require_count("max_microbatch_tokens", max_microbatch_tokens)


def priced(plan: Plan, cost: CostModel) -> Plan:
    """The plan with what it costs, dummy microbatches left out."""
    cut = [rows for rows in plan.microbatches if rows]
    return replace(
        plan,
        seconds=sum(_seconds(plan.lengths_of(rows), cost, padded=plan.padded) for rows in cut),
        peak_bytes=max((cost.peak_bytes(1, plan.tokens_of(rows)) for rows in cut), default=0.0),
    )


def _seconds(lengths: Sequence[int], cost: CostModel, *, padded: bool) -> float:
    """Of one microbatch. Not padded, each sample costs what its own tokens do."""
    if padded:
        return cost.seconds(len(lengths), max(lengths))
    return cost.seconds_per_microbatch + sum(map(cost.sample_seconds, lengths))


def check_lengths(lengths: Sequence[int], max_microbatch_tokens: int | None) -> None:
    """Raise `PlanError` where a length is no count, or the longest does not fit under the cap."""
    most = math.inf if max_microbatch_tokens is None else max_microbatch_tokens
    if _are_counts(lengths) and _largest(lengths) <= most:
        return
    for sample, length in enumerate(lengths):
        require_count(f"the length of sample {sample}", length, least=0)
    sample = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    if len(lengths) and (length := lengths[sample]) > most:
        raise PlanError(
            f"sample {sample} has {length} tokens, more than max_microbatch_tokens={max_microbatch_tokens} allows; "
            f"raise it to {length} or shorten the sample"
        )


def _are_counts(lengths: Sequence[int]) -> bool:
    """Whether it is plain that none is negative or no whole number; there may be millions."""
    if isinstance(lengths, np.ndarray):
        return lengths.dtype.kind in "iu" and lengths.ndim == 1 and (not lengths.size or int(lengths.min()) >= 0)
    return set(map(type, lengths)) <= {int} and min(lengths, default=0) >= 0


def _largest(lengths: Sequence[int]) -> int:
    return int(lengths.max(initial=0)) if isinstance(lengths, np.ndarray) else max(lengths, default=0)
