"""Plan: the samples of each microbatch, their order and their predicted cost.

Pure: lengths in, a frozen plan out. It knows no tensor, model or process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megabatch.errors import PlanError, require_count
from megabatch.planning.plan_numbers import PlanNumbers

LAUNCH_SHARE = 16  # without a measured cost, launching a microbatch costs a sixteenth of the cap's tokens
Parts = Mapping[int, Sequence[tuple[int, ...]]]  # of microbatches that did not fit in memory, by their index


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of one microbatch of ``rows`` samples padded to ``longest`` tokens.

    With ``tokens = rows * longest``::

        seconds = seconds_per_microbatch + tokens * (seconds_per_token + longest * seconds_per_pair)
        bytes = bytes_fixed + tokens * bytes_per_token

    The defaults are relative, not measured: one token costs 1, and attention costs as much as the rest at 4,096
    tokens. They choose sensible microbatches, but they do not predict a time.

    Args:
        seconds_per_microbatch: Cost of a launch, in seconds.
        seconds_per_token: Cost of the matrix products, which are linear in the tokens.
        seconds_per_pair: Cost of attention for each pair of positions, which is quadratic in the length.
        bytes_fixed: Bytes that do not depend on the microbatch: parameters, gradients, optimizer states.
        bytes_per_token: Bytes of activations for each padded token.
    """

    seconds_per_microbatch: float = 0.0
    seconds_per_token: float = 1.0
    seconds_per_pair: float = 1 / 4096
    bytes_fixed: float = 0.0
    bytes_per_token: float = 0.0

    def seconds(self, rows: int, longest: int) -> float:
        """Return the seconds of one forward and backward of ``rows`` x ``longest`` padded tokens."""
        tokens = rows * longest
        return self.seconds_per_microbatch + tokens * (self.seconds_per_token + longest * self.seconds_per_pair)

    def sample_seconds(self, length: int) -> float:
        """Return the seconds of one sample's own tokens, without launch cost and padding."""
        return self.seconds(1, length) - self.seconds_per_microbatch

    def peak_bytes(self, rows: int, longest: int) -> float:
        """Return the peak memory of one microbatch of ``rows`` x ``longest`` padded tokens, in bytes."""
        return self.bytes_fixed + rows * longest * self.bytes_per_token


@dataclass(frozen=True)
class Plan(PlanNumbers):
    """One rank's share of an update, split into microbatches.

    Attributes:
        microbatches: The samples of each microbatch, as indices into ``lengths``. An empty tuple is a dummy microbatch.
        lengths: Tokens of each of this rank's samples.
        samples: Index of each of these samples among all that were planned.
        sync: "last" reduces gradients with the last microbatch, "every" with each, and "replica_last" (HSDP)
            reduce-scatters with each and all-reduces with the last. "gather_once" (FSDP2) reduces as the wrapper's
            default does, and gathers parameters with the first microbatch only.
        reason: The reason for this ``sync``, in words.
        seconds: Predicted seconds of all microbatches. None without a cost model.
        peak_bytes: Predicted peak memory, in bytes. None without a cost model.
        num_split: Microbatches that did not fit in memory and ran in parts.
        steps: Number of microbatches of each schedule step of a pipeline, with dummies. Those of a step are padded to
            one shape. Empty without a pipeline.
        padded: True if samples are padded to the longest of their microbatch.
        shared: Leading tokens of each sample that are computed in an earlier sample of its microbatch, whose row it
            shares. 0 for a sample that begins a row. Empty if no sample shares a prefix.
        shapes: Rows and tokens that a microbatch is filled up to, by its samples. Empty without `Shapes`.
    """

    microbatches: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    samples: tuple[int, ...] = ()
    sync: str = "last"
    reason: str = ""
    seconds: float | None = None
    peak_bytes: float | None = None
    num_split: int = 0
    steps: tuple[int, ...] = ()
    padded: bool = True
    shared: tuple[int, ...] = ()
    shapes: Mapping[tuple[int, ...], tuple[int, int]] = field(default_factory=dict, hash=False)

    def in_parts(self, parts: Parts) -> "Plan":
        """Return the plan as it ran, with split microbatches replaced by their parts."""
        microbatches: list[tuple[int, ...]] = []
        for index, rows in enumerate(self.microbatches):
            microbatches += parts.get(index, [rows])
        return replace(self, microbatches=tuple(microbatches), num_split=len(parts))

    def explain(self) -> str:
        """Describe the plan for a person, one fact per line."""
        from megabatch.planning.plan_text import explain_plan

        return explain_plan(self)


def pad_with_dummies(microbatches: Sequence[tuple[int, ...]], num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Append dummy microbatches until there are ``num_microbatches``."""
    return (*microbatches, *[()] * (num_microbatches - len(microbatches)))


def check_lengths(lengths: Sequence[int], max_microbatch_tokens: int | None) -> None:
    """Raise `PlanError` for a length that is no count, and for one above the cap."""
    # There may be millions of lengths, so look at all of them at once first.
    if isinstance(lengths, np.ndarray):
        are_counts = lengths.dtype.kind in "iu" and lengths.ndim == 1 and int(lengths.min(initial=0)) >= 0
        largest = int(lengths.max(initial=0)) if are_counts else 0
    else:
        are_counts = set(map(type, lengths)) <= {int} and min(lengths, default=0) >= 0
        largest = max(lengths, default=0) if are_counts else 0
    if are_counts and (max_microbatch_tokens is None or largest <= max_microbatch_tokens):
        return
    for sample, length in enumerate(lengths):
        require_count(f"the length of sample {sample}", length, least=0)
    sample = max(range(len(lengths)), key=lengths.__getitem__, default=0)
    if max_microbatch_tokens is not None and len(lengths) and (length := lengths[sample]) > max_microbatch_tokens:
        raise PlanError(
            f"sample {sample} has {length} tokens, more than max_microbatch_tokens={max_microbatch_tokens} allows; "
            f"raise it to {length} or shorten the sample"
        )


def priced(plan: Plan, cost: CostModel) -> Plan:
    """Return the plan with its predicted seconds and peak bytes. Dummy microbatches cost nothing."""
    cut = [rows for rows in plan.microbatches if rows]
    return replace(
        plan,
        seconds=sum(_seconds(plan.row_lengths(rows), cost, padded=plan.padded) for rows in cut),
        peak_bytes=max((cost.peak_bytes(1, plan.tokens_of(rows)) for rows in cut), default=0.0),
    )


def _seconds(lengths: Sequence[int], cost: CostModel, *, padded: bool) -> float:
    """Price one microbatch. Without padding each sample costs its own tokens."""
    if padded:
        return cost.seconds(len(lengths), max(lengths))
    return cost.seconds_per_microbatch + sum(map(cost.sample_seconds, lengths))
