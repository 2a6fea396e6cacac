"""Limits that were measured: the largest microbatch that fits in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from megabatch.planning.plan import CostModel

LEAST_GAIN = 0.1  # larger microbatches that process at most this much more tokens per second are not tried


@dataclass(frozen=True)
class MeasuredMicrobatch:
    """Measured memory of a microbatch of ``rows`` samples, each as long as the longest; the most over all ranks."""

    rows: int
    num_bytes: float  # at the peak, beyond what stays from microbatch to microbatch
    seconds: float | None = None  # of its forward and backward, on the slowest rank


@dataclass(frozen=True)
class TunedLimit:
    """A limit for microbatches that was measured to fit: the ``fit`` of a `GradientAccumulator` without a limit.

    Pass it as ``max_microbatch_tokens`` to a new accumulator for the same model, which then measures nothing. It is a
    tree of plain numbers: ``dataclasses.asdict`` gives what JSON can hold. Rebuild ``cost`` as a `CostModel`.
    """

    max_microbatch_tokens: int
    cost: CostModel
    longest_tokens: int  # of the samples that were measured
    measured: tuple[MeasuredMicrobatch, ...]  # in their turn
    limit_bytes: float  # for everything on a rank: parameters, gradients, the optimizer's states, a microbatch
    allowed_bytes: float  # of it for an update: its samples, gradients and microbatches; the least over all ranks
    outgrown_rows: int | None = None  # samples of a rank, where only their number ended the search; None: memory did

    def is_outgrown(self, rows: float, padded_tokens: float) -> bool:
        """Return True if a rank with so many samples could use a larger limit than any that was measured."""
        return (
            self.outgrown_rows is not None and rows > self.outgrown_rows and padded_tokens > self.max_microbatch_tokens
        )

    def explain(self) -> str:
        """Describe the choice for a person in one line."""
        rows = ", ".join(str(microbatch.rows) for microbatch in self.measured)
        largest = self.max_microbatch_tokens
        within = [microbatch for microbatch in self.measured if microbatch.rows * self.longest_tokens <= largest]
        return (
            f"max_microbatch_tokens {self.max_microbatch_tokens:,}: predicted peak "
            f"{in_gib(self.cost.peak_bytes(1, self.max_microbatch_tokens))} of {in_gib(self.limit_bytes)}, measured "
            f"with {rows} samples of {self.longest_tokens:,} tokens"
            + (
                f"; larger ones would be at most {LEAST_GAIN:.0%} faster"
                if self.outgrown_rows is None and gains_little(within)
                else ""
            )
        )


def in_gib(num_bytes: float) -> str:
    """Format bytes for a person."""
    return f"{num_bytes / 2**30:.2f} GiB"


def gains_little(measured: Sequence[MeasuredMicrobatch]) -> bool:
    """Return True if no larger microbatch would process `LEAST_GAIN` more tokens per second than the largest of these.

    Each further row takes the time that rows between the largest two have taken. The rest is a launch, which more rows
    would share.
    """
    timed = sorted((microbatch.rows, microbatch.seconds) for microbatch in measured if microbatch.seconds is not None)
    if len(timed) < 2:
        return False
    (fewer, before), (rows, seconds) = timed[-2:]
    per_row = max(0.0, seconds - before) / (rows - fewer)
    return seconds <= (1 + LEAST_GAIN) * rows * per_row
