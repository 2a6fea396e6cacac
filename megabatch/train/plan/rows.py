"""Rows: what a choice needs and costs, and whether it fits; from a run under fake tensors, or from the closed form."""

from dataclasses import dataclass, field
from typing import Any

from megabatch.simulate import Moment, Simulated
from megabatch.train.config.byte_sizes import gib_text
from megabatch.train.plan.choices import Choice
from megabatch.train.plan.closed import Estimate

YES, TIGHT, NO = "yes", "tight", "no"
FITS = (YES, TIGHT, NO)
RUN, CLOSED_FORM = "simulation", "closed form"
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Row:
    """One line of the table; bytes and seconds are of one rank and one update."""

    choice: Choice
    fits: str  # "tight": if torch's allocator gives back what it has cached, or is told to
    why: str  # it does or does not, in words
    peak_bytes: int  # alive at once
    reserved_bytes: int  # that torch's allocator would take, if there were no end of memory
    sent_bytes: int
    seconds: float
    bound: str  # by what most of the seconds are: "compute", "memory bandwidth" or "traffic"
    by: str  # "simulation" or "closed form"
    microbatch_tokens: int  # of the longest samples
    at_peak: dict[str, int] = field(default_factory=dict[str, int])  # by category; nothing from the closed form
    where: str = ""  # phase of the peak
    history: tuple[Moment, ...] = field(default=(), repr=False)  # of memory

    @property
    def cost(self) -> tuple[Any, ...]:
        """What makes it worse than another."""
        return FITS.index(self.fits), self.by == CLOSED_FORM, self.seconds, self.reserved_bytes

    def as_json(self) -> dict[str, Any]:
        """Its numbers, under names that stay."""
        choice = self.choice
        return {
            "micro_batch_size": choice.micro_batch_size,
            "num_microbatches": choice.num_microbatches,
            "sync": choice.sync,
            "reshard_after_forward": choice.reshard,
            "activation_checkpointing": choice.recompute,
            "fused": choice.fused,
            "fits": self.fits,
            "why": self.why,
            "peak_bytes": self.peak_bytes,
            "peak_bytes_by_category": self.at_peak,
            "peak_phase": self.where,
            "reserved_bytes": self.reserved_bytes,
            "wire_bytes": self.sent_bytes,
            "seconds": self.seconds,
            "bound": self.bound,
            "by": self.by,
            "microbatch_tokens": self.microbatch_tokens,
        }


def simulated_row(choice: Choice, found: Simulated, limit_bytes: int, tokens: int) -> Row:
    """The row of a run."""
    fits, why = verdict(found, limit_bytes)
    return Row(
        choice, fits, why, found.peak_bytes, reserved_bytes(found), found.sent_bytes, found.seconds, found.bound, RUN,
        tokens, found.at_peak, found.where, found.history,
    )  # fmt: skip


def verdict(found: Simulated, limit_bytes: int) -> tuple[str, str]:
    """Whether it fits, and why: by the allocator, whose cache takes more than the tensors."""
    there = gib_text(limit_bytes)
    if found.peak_bytes > limit_bytes:
        return NO, f"{gib_text(found.peak_bytes)} alive at once in {found.where}, {there} there"
    if not has_allocator(found):
        return YES, f"{gib_text(found.peak_bytes)} of {there}"
    reserved = found.reserved(limit_bytes)
    if reserved.fits and not reserved.retries:
        return YES, f"{gib_text(reserved.peak_bytes)} reserved of {there}"
    if found.reserved(limit_bytes, expandable=True).fits:
        return TIGHT, f"its cache does not fit into {there} in pieces; set {EXPANDABLE}"
    if reserved.fits:
        return TIGHT, f"the allocator runs out of {there} and gives back its cache, {reserved.retries} times"
    return NO, f"the pieces that {gib_text(found.peak_bytes)} come in do not fit into {there}"


def reserved_bytes(found: Simulated) -> int:
    """What the allocator would take of a device without end; what is alive, where memory is not cached."""
    return found.reserved().peak_bytes if has_allocator(found) else found.peak_bytes


def has_allocator(found: Simulated) -> bool:
    """Whether memory is that of a GPU, which torch caches."""
    return found.device.name != "cpu"


def hopeless_row(choice: Choice, guess: Estimate, peak_bytes: int, why: str, tokens: int) -> Row:
    """The row of what cannot fit."""
    peak_bytes = max(peak_bytes, guess.peak_bytes)
    return Row(
        choice, NO, why, peak_bytes, peak_bytes, guess.sent_bytes, guess.seconds, guess.bound, CLOSED_FORM, tokens
    )


def derived_row(choice: Choice, guess: Estimate, near: Row, near_guess: Estimate, limit_bytes: int) -> Row:
    """The row of what is near to another one, by what the closed form says of the difference."""
    is_alike = choice.recompute == near.choice.recompute  # the closed form counts kept activations too low
    more_bytes = guess.peak_bytes - (near_guess.peak_bytes if is_alike else near.peak_bytes)
    peak_bytes, reserved = near.peak_bytes + more_bytes, near.reserved_bytes + more_bytes
    fits = YES if reserved <= limit_bytes else TIGHT if peak_bytes <= limit_bytes else NO
    fits = max(fits, near.fits, key=FITS.index)
    sent_bytes = near.sent_bytes + guess.sent_bytes - near_guess.sent_bytes
    seconds = near.seconds * guess.seconds / near_guess.seconds
    why = f"about {gib_text(reserved)} reserved of {gib_text(limit_bytes)}"
    return Row(
        choice, fits, why, peak_bytes, reserved, sent_bytes, seconds, guess.bound, CLOSED_FORM, near.microbatch_tokens
    )
