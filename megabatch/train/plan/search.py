"""Search: what each choice needs and costs. Estimates skip what cannot win; simulations decide the rest."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megabatch.simulate import Moment, Simulated
from megabatch.train.config.byte_sizes import gib_text
from megabatch.train.model.architecture import quiet
from megabatch.train.plan.estimate import Estimate, estimate_cost
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.simulation import Simulator

YES, TIGHT, NO = "yes", "tight", "no"
FITS = (YES, TIGHT, NO)
SIMULATION, CLOSED_FORM = "simulation", "closed form"
CERTAIN = 0.93  # of an estimated peak: the estimate errs by less
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class PlanRow:
    """One choice in the plan; bytes and seconds are of one rank and one update."""

    choice: Choice
    fits: str  # "tight": only if torch's allocator returns cached memory, or is told to
    why: str  # it fits or not
    peak_bytes: int  # alive at once
    reserved_bytes: int  # that torch's allocator would take of unlimited memory
    sent_bytes: int
    seconds: float
    bound: str  # what limits the speed: "compute", "memory bandwidth" or "traffic"
    by: str  # "simulation" or "closed form"
    microbatch_tokens: int  # of the longest samples
    at_peak: dict[str, int] = field(default_factory=dict[str, int])  # by category; empty if by closed form
    where: str = ""  # phase of the peak
    history: tuple[Moment, ...] = field(default=(), repr=False)  # of memory

    @property
    def cost(self) -> tuple[Any, ...]:
        """Sort key, the best first."""
        return FITS.index(self.fits), self.by == CLOSED_FORM, self.seconds, self.reserved_bytes

    def as_json(self) -> dict[str, Any]:
        """Return the row under names that stay."""
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


def search_choices(simulator: Simulator, limit_bytes: int, advance: Callable[[int], None]) -> list[PlanRow]:
    """Return a row for every choice, the best first. Raises `MegabatchError` for what cannot be simulated."""
    found, choices = _Search(simulator, limit_bytes), simulator.grid.choices()
    while len(found.rows) < len(choices):
        before = len(found.rows)
        if (wanted := found.judge(choices)) is not None:
            found.rows[wanted] = run_simulation(simulator, limit_bytes, wanted)
        advance(len(found.rows) - before)
    return sort_rows(list(found.rows.values()))


def sort_rows(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows, the fastest first, or another policy of sync that fits as well and sends less.

    The seconds leave out messages that overlap with computation, and no link hides all of them. A run chooses so too.
    """
    rows = sorted(rows, key=lambda row: row.cost)
    fastest = rows[0]
    fit_as_well = [row for row in rows if (row.fits, row.by) == (fastest.fits, fastest.by)]
    alike = [row for row in fit_as_well if row.choice.differs_in_sync(fastest.choice)]
    best = min(alike, key=lambda row: row.sent_bytes)
    return [best, *(row for row in rows if row is not best)] if fastest.fits != NO else rows


def run_simulation(simulator: Simulator, limit_bytes: int, choice: Choice) -> PlanRow:
    """Simulate a choice and return its row."""
    with quiet():
        found = simulator.simulate(choice)
    return simulated_row(choice, found, limit_bytes, choice.micro_batch_size * simulator.sample.length_tokens)


def simulated_row(choice: Choice, found: Simulated, limit_bytes: int, tokens: int) -> PlanRow:
    """Return the row of a simulation; ``tokens`` are those of its microbatch."""
    needed_bytes = reserved_bytes(found)
    fits, why = judge_memory(found, limit_bytes, needed_bytes)
    return PlanRow(
        choice, fits, why, found.peak_bytes, needed_bytes, found.sent_bytes, found.seconds, found.bound,
        SIMULATION, tokens, found.at_peak, found.where, found.history,
    )  # fmt: skip


def judge_memory(found: Simulated, limit_bytes: int, needed_bytes: int) -> tuple[str, str]:
    """Return if a simulated update fits, and why; ``needed_bytes`` are its `reserved_bytes`."""
    limit = gib_text(limit_bytes)
    if found.peak_bytes > limit_bytes:
        return NO, f"{gib_text(found.peak_bytes)} alive at once in {found.where}, {limit} there"
    if not _has_allocator(found):
        return YES, f"{gib_text(found.peak_bytes)} of {limit}"
    if needed_bytes <= limit_bytes:
        return YES, f"{gib_text(needed_bytes)} reserved of {limit}"
    if found.reserved(limit_bytes, expandable=True).fits:
        return TIGHT, f"its cache does not fit into {limit} in pieces; set {EXPANDABLE}"
    if (reserved := found.reserved(limit_bytes)).fits:
        return TIGHT, f"the allocator runs out of {limit} and gives back its cache, {reserved.retries} times"
    return NO, f"the pieces that {gib_text(found.peak_bytes)} come in do not fit into {limit}"


def reserved_bytes(found: Simulated) -> int:
    """Return what the allocator would take of unlimited memory; on a CPU, the bytes alive."""
    return found.reserved().peak_bytes if _has_allocator(found) else found.peak_bytes


def _has_allocator(found: Simulated) -> bool:
    return found.device.name != "cpu"  # torch caches a GPU's memory only


class _Search:
    """The rows so far. One row may make the simulation of another choice unnecessary."""

    def __init__(self, simulator: Simulator, limit_bytes: int) -> None:
        self._simulator, self._limit_bytes = simulator, limit_bytes
        self.rows: dict[Choice, PlanRow] = {}

    def judge(self, choices: Sequence[Choice]) -> Choice | None:
        """Make the rows that need no simulation; return the choice to simulate next, if there is one."""
        wanted: Choice | None = None
        for choice in (choice for choice in choices if choice not in self.rows):
            kept = replace(choice, recompute=False)  # which takes less time
            waits = kept != choice and kept in choices and kept not in self.rows
            estimate = self._estimate(choice)
            row = self._too_large(choice, estimate) or self._derived(choice, estimate, self.rows.get(kept))
            if row is not None:
                self.rows[choice] = row
            elif wanted is None and not waits:
                wanted = choice
        return wanted

    def _estimate(self, choice: Choice) -> Estimate:
        simulator = self._simulator
        return estimate_cost(choice, simulator.sizes, simulator.sample.length_tokens, simulator.device)

    def _too_large(self, choice: Choice, estimate: Estimate) -> PlanRow | None:
        """Return the row of a choice whose estimate, or whose simulation with less, exceeds the limit."""
        fixed = self._simulator.sizes.head_bytes
        bounds = [min_peak_bytes(choice, row, fixed) for row in self.rows.values()]
        least = max([estimate.peak_bytes * CERTAIN, *bounds])
        if least <= self._limit_bytes:
            return None
        why = f"at least {gib_text(least)} alive at once, {gib_text(self._limit_bytes)} there"
        peak, tokens = (
            max(int(least), estimate.peak_bytes),
            choice.micro_batch_size * self._simulator.sample.length_tokens,
        )
        return PlanRow(
            choice, NO, why, peak, peak, estimate.sent_bytes, estimate.seconds, estimate.bound, CLOSED_FORM, tokens
        )

    def _derived(self, choice: Choice, estimate: Estimate, kept: PlanRow | None) -> PlanRow | None:
        """Return the row of a choice that recomputes activations where they fit if they are kept.

        It cannot be the best. Differences to the row with ``kept`` activations are those of the estimates.
        """
        if kept is None or kept.choice == choice or kept.fits != YES:
            return None
        limit_bytes, kept_estimate = self._limit_bytes, self._estimate(kept.choice)
        reserved = kept.reserved_bytes + estimate.peak_bytes - kept.peak_bytes
        return PlanRow(
            choice,
            fits=YES if reserved <= limit_bytes else TIGHT if estimate.peak_bytes <= limit_bytes else NO,
            why=f"about {gib_text(reserved)} reserved of {gib_text(limit_bytes)}",
            peak_bytes=estimate.peak_bytes,
            reserved_bytes=reserved,
            sent_bytes=kept.sent_bytes + estimate.sent_bytes - kept_estimate.sent_bytes,
            seconds=kept.seconds * estimate.seconds / kept_estimate.seconds,
            bound=estimate.bound,
            by=CLOSED_FORM,
            microbatch_tokens=kept.microbatch_tokens,
        )


def min_peak_bytes(choice: Choice, row: PlanRow, fixed_bytes: int = 0) -> int:
    """Return a lower bound of a choice's peak from the simulation of another that needs no more; 0 without one.

    The bound is that one's peak with as many activations as the larger microbatch has. ``fixed_bytes`` are the
    activations that do not grow with the microbatch, at most.
    """
    if row.by != SIMULATION or not choice.needs_as_much_as(row.choice):
        return 0
    gradients = row.at_peak.get("gradients", 0) + row.at_peak.get("unsharded gradients", 0)
    kept = gradients if choice.num_microbatches == 1 < row.choice.num_microbatches else 0  # between microbatches
    more = choice.micro_batch_size / row.choice.micro_batch_size - 1
    grows = CERTAIN * max(0, row.at_peak.get("activations", 0) - fixed_bytes)
    return int(row.peak_bytes - kept + more * grows)
