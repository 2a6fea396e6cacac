"""Search: what each choice needs and costs. Simulations decide between the choices that estimates leave open.

Estimates are calibrated by the simulations so far. The next simulation is that of the fastest choice that may fit,
until no other choice can be faster, or memory rules it out. Simulating every choice finds the same best one in 158 of
160 searches, and one that is at most 0.15 % faster in the others (benchmarks/plan_search.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megabatch.errors import MegabatchError
from megabatch.simulate import Device, Simulated, busy_seconds
from megabatch.train.config import ParallelConfig
from megabatch.train.config.byte_sizes import gib_text
from megabatch.train.model.architecture import silence
from megabatch.train.plan.estimate import Estimate
from megabatch.train.plan.grid import Choice
from megabatch.train.plan.simulation import Simulator

YES, TIGHT, NO = "yes", "tight", "no"
FITS = (YES, TIGHT, NO)
SIMULATION, CLOSED_FORM = "simulation", "closed form"
# Of an estimated peak: the estimate errs by less.
CERTAIN = 0.93
# Of the activations of a larger microbatch, by those of a smaller one.
GROWN = 0.85
# Of a time calibrated by a choice with the same recomputation, or by another: it errs by less.
NEAR, FAR = 0.9, 0.8
# Needed share of calibrated memory.
NEEDED = 0.9
# Simulations once a choice fits.
MAX_SIMULATIONS = 12
# Weight of a simulation of both ends of a pipeline, among these.
PIPELINE_WEIGHT = 3
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True)
class Work:
    """Seconds of a simulated update, to calibrate estimates by."""

    compute: float
    host: float  # to launch operations
    traffic: float  # that overlaps with computation
    copies: float  # over PCIe
    awaited: float
    compute_of_step: float
    host_of_step: float
    cpu_of_step: float  # on what is offloaded
    bubble: float  # time that a pipeline's rank waits for others, as a fraction of the rest


@dataclass(frozen=True)
class PlanRow:
    """One choice in the plan; bytes and seconds are of one rank and one update."""

    choice: Choice
    fits: str  # "tight": only if torch's allocator returns cached memory, or is told to
    why: str  # it fits or not
    peak_bytes: int  # alive at once
    reserved_bytes: int  # that torch's allocator would take of unlimited memory
    margined_bytes: int  # the same with `Device.margin`, which must fit
    sent_bytes: int
    seconds: float
    bound: str  # the limit of the speed, as `Phase.bound` has it
    by: str  # "simulation" or "closed form"
    microbatch_tokens: int  # at most
    at_peak: dict[str, int] = field(default_factory=dict[str, int])  # by category; empty if by closed form
    where: str = ""  # phase of the peak
    is_least: bool = False  # the memory is a lower bound: too much, or of an optimizer whose step is not simulated
    parallel: ParallelConfig = field(default_factory=ParallelConfig)  # of the recipe, or of one of its layouts
    work: Work | None = None
    host_bytes: int = 0  # of a rank, offloaded to its host
    update_tokens: float = 0.0  # of all ranks, without padding

    @property
    def cost(self) -> tuple[Any, ...]:
        """Sort key, the best first."""
        return FITS.index(self.fits), self.by == CLOSED_FORM, self.seconds, self.reserved_bytes

    @property
    def tokens_per_second(self) -> float:
        return self.update_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
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
            "margined_bytes": self.margined_bytes,
            "host_bytes": self.host_bytes,
            "wire_bytes": self.sent_bytes,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "bound": self.bound,
            "by": self.by,
            "is_lower_bound": self.is_least,
            "microbatch_tokens": self.microbatch_tokens,
            "parallel": self.parallel.model_dump(exclude={"reshard_after_forward"}),
        }


def search_choices(
    simulators: Sequence[Simulator], limit_bytes: int, advance: Callable[[int], None], limit: int = MAX_SIMULATIONS
) -> list[PlanRow]:
    """Return a row for every choice of every layout, the best first.

    Raises `MegabatchError` for what cannot be simulated.
    """
    search = _Search(simulators, limit_bytes, limit)
    while (wanted := search.next_candidate()) is not None:
        search.simulate(wanted)
        advance(1)
    return sort_rows([search.rows.get(candidate) or search.estimate_row(candidate) for candidate in search.candidates])


def sort_rows(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the rows, the fastest first, or another policy of sync that fits as well and sends less.

    The seconds leave out messages that overlap with computation, and no link hides all of them. A run chooses so too.
    """
    rows = sorted(rows, key=lambda row: row.cost)
    fastest = rows[0]
    fit_as_well = [row for row in rows if (row.fits, row.by) == (fastest.fits, fastest.by)]
    alike = [row for row in fit_as_well if row.parallel == fastest.parallel]
    alike = [row for row in alike if row.choice.differs_in_sync(fastest.choice)]
    best = min(alike, key=lambda row: row.sent_bytes)
    return [best, *(row for row in rows if row is not best)] if fastest.fits != NO else rows


def run_simulation(simulator: Simulator, limit_bytes: int, choice: Choice) -> PlanRow:
    with silence():
        simulated = simulator.simulate(choice)
    needed_bytes = reserved_bytes(simulated)
    fits, why = judge_memory(simulated, limit_bytes, needed_bytes)
    return PlanRow(
        choice, fits, why, simulated.peak_bytes, needed_bytes, with_margin(needed_bytes, simulated.device),
        simulated.sent_bytes, simulated.seconds, simulated.bound, SIMULATION,
        choice.most_tokens(simulator.sample.length_tokens), simulated.at_peak, simulated.where,
        is_least=simulator.is_least, parallel=simulator.config.parallel, work=_work_of(simulated),
        host_bytes=simulated.host_bytes, update_tokens=simulator.update_tokens,
    )  # fmt: skip


def _work_of(simulated: Simulated) -> Work:
    phases = [(simulated.times[name], phase) for name, phase in simulated.phases.items()]
    awaited = sum(times * phase.fill * phase.awaited_seconds for times, phase in phases)
    host, overlapped, idle, copies = (
        sum(times * getattr(phase, f"{name}_seconds") for times, phase in phases)
        for name in ("host", "overlapped", "idle", "copy")
    )
    step = simulated.phases["step"]
    launches = step.host_seconds - step.cpu_seconds
    bubble = idle / (simulated.seconds - idle)
    return Work(
        simulated.compute_seconds, host - step.cpu_seconds, overlapped, copies, awaited, step.compute_seconds,
        launches, step.cpu_seconds, bubble,
    )  # fmt: skip


def judge_memory(simulated: Simulated, limit_bytes: int, needed_bytes: int) -> tuple[str, str]:
    """Return if a simulated update fits, and why; ``needed_bytes`` are its `reserved_bytes`."""
    limit = gib_text(limit_bytes)
    if simulated.peak_bytes > limit_bytes:
        return NO, f"{gib_text(simulated.peak_bytes)} alive at once in {simulated.where}, {limit} there"
    if simulated.device.is_cpu:
        return YES, f"{gib_text(simulated.peak_bytes)} of {limit}"
    margined_bytes = with_margin(needed_bytes, simulated.device)
    with_it = f"{gib_text(margined_bytes)} with the margin of {simulated.device.margin:.1%}"
    if margined_bytes <= limit_bytes:
        return YES, f"{gib_text(needed_bytes)} reserved of {limit}, {with_it}"
    if needed_bytes <= limit_bytes:
        return TIGHT, f"{gib_text(needed_bytes)} reserved of {limit}, but {with_it}"
    if simulated.reserved(limit_bytes, expandable=True).fits:
        return TIGHT, f"its cache does not fit into {limit} in pieces; set {EXPANDABLE}"
    if (reserved := simulated.reserved(limit_bytes)).fits:
        return TIGHT, f"the allocator runs out of {limit} and gives back its cache, {reserved.retries} times"
    return NO, f"the pieces that {gib_text(simulated.peak_bytes)} come in do not fit into {limit}"


def reserved_bytes(simulated: Simulated) -> int:
    """Return what the allocator would take of unlimited memory; on a CPU, the bytes alive."""
    return simulated.peak_bytes if simulated.device.is_cpu else simulated.reserved().peak_bytes


def with_margin(num_bytes: int, device: Device) -> int:
    return int(num_bytes * (1 + device.margin))


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A choice in a layout; two are never equal."""

    simulator: Simulator
    choice: Choice
    estimate: Estimate

    def is_alike(self, candidate: "_Candidate") -> bool:
        """Return True for a choice of the same layout, with the same recomputation."""
        return self.choice.recompute == candidate.choice.recompute and self.simulator is candidate.simulator

    def size(self) -> tuple[Any, ...]:
        """Return a sort key, the smallest first."""
        choice, parallel = self.choice, self.simulator.config.parallel
        return parallel.tp * parallel.pp, choice.micro_batch_size, bool(choice.recompute), self.estimate.peak_bytes


class _Search:
    """Candidates and the rows of those that have been simulated."""

    def __init__(self, simulators: Sequence[Simulator], limit_bytes: int, max_simulations: int) -> None:
        self._limit_bytes, self._most, self._has_layouts = limit_bytes, max_simulations, len(simulators) > 1
        self.rows: dict[_Candidate, PlanRow] = {}
        self.candidates = [
            _Candidate(simulator, choice, simulator.estimate(choice))
            for simulator in simulators
            for choice in simulator.grid.choices()
        ]

    def simulate(self, candidate: _Candidate) -> None:
        """Simulate a candidate. A layout that cannot be simulated leaves the search, unless it is the last."""
        try:
            self.rows[candidate] = run_simulation(candidate.simulator, self._limit_bytes, candidate.choice)
        except MegabatchError:
            lost = candidate.simulator
            candidates = [remaining for remaining in self.candidates if remaining.simulator is not lost]
            if not candidates:
                raise
            self.candidates = candidates
            self.rows = {simulated: row for simulated, row in self.rows.items() if simulated.simulator is not lost}

    def next_candidate(self) -> _Candidate | None:
        """Return the candidate that may be the fastest of those that seem to fit; None if the best is known."""
        fitting = [candidate for candidate, row in self.rows.items() if row.fits == YES]
        best = min(fitting, key=lambda candidate: self.rows[candidate].seconds, default=None)
        spent = sum(PIPELINE_WEIGHT if row.simulator.ends else 1 for row in self.rows)
        if spent >= self._most and (best is not None or self._has_layouts):
            return None
        is_open = [
            candidate
            for candidate in self.candidates
            if candidate not in self.rows and self._least_bytes(candidate) <= self._limit_bytes
        ]
        # A small microbatch with its activations says most of the others.
        if not self.rows:
            return min(is_open, key=_Candidate.size, default=None)
        if best is not None:
            is_open = [opening for opening in is_open if self._may_win(opening, best)]
        return min(is_open, key=self._most_promising, default=None)

    def _least_bytes(self, candidate: _Candidate) -> int:
        """Return a lower bound of the memory, by the estimate and by simulations that need no more."""
        sizes = candidate.simulator.sizes
        held = candidate.simulator.num_held
        rows = [row for simulated, row in self.rows.items() if simulated.simulator is candidate.simulator]
        rows = [row for row in rows if held(candidate.choice) >= held(row.choice)]
        bounds = [min_peak_bytes(candidate.choice, row, sizes.head_bytes) for row in rows]
        return max(int(candidate.estimate.peak_bytes * CERTAIN), *bounds, 0)

    def _may_win(self, candidate: _Candidate, best: _Candidate) -> bool:
        """Return True if a candidate may be faster than the best, or send less at the same speed, and may fit."""
        near = self._nearest(candidate)
        is_larger = candidate.is_alike(near) and candidate.choice.needs_as_much_as(near.choice)
        if is_larger and NEEDED * self._margined_bytes(candidate, near) > self._limit_bytes:
            return False
        simulator = candidate.simulator
        differs_in_sync = simulator is best.simulator and candidate.choice.differs_in_sync(best.choice)
        if differs_in_sync and candidate.estimate.sent_bytes < best.estimate.sent_bytes:
            return True
        fitting = [rival for rival, row in self.rows.items() if row.fits == YES and rival.simulator is simulator]
        # Fewer microbatches leave ranks idle for longer.
        is_pipeline = bool(simulator.ends)
        if not is_pipeline and any(rival.choice.takes_no_longer_than(candidate.choice) for rival in fitting):
            return False
        return self._least_seconds(candidate, near) < self.rows[best].seconds

    def _most_promising(self, candidate: _Candidate) -> tuple[bool, float]:
        near = self._nearest(candidate)
        needed_bytes = self._margined_bytes(candidate, near)
        seems_large = needed_bytes > self._limit_bytes
        return seems_large, needed_bytes if seems_large else self._least_seconds(candidate, near)

    def _nearest(self, candidate: _Candidate) -> _Candidate:
        choice = candidate.choice

        def distance(simulated: _Candidate) -> tuple[Any, ...]:
            steps = abs(simulated.choice.micro_batch_size.bit_length() - choice.micro_batch_size.bit_length())
            return (
                simulated.simulator is not candidate.simulator, simulated.choice.recompute != choice.recompute, steps,
                simulated.choice.sync != choice.sync, simulated.choice.reshard != choice.reshard,
            )  # fmt: skip

        return min(self.rows, key=distance)

    def _least_seconds(self, candidate: _Candidate, near: _Candidate) -> float:
        return self._seconds(candidate, near) * (NEAR if candidate.is_alike(near) else FAR)

    def _seconds(self, candidate: _Candidate, near: _Candidate) -> float:
        """Return the estimated seconds, calibrated by a simulation."""
        work, estimate, near_estimate = self.rows[near].work, candidate.estimate, near.estimate
        assert work is not None
        compute = (work.compute - work.compute_of_step) * estimate.compute_seconds / near_estimate.compute_seconds
        microbatches = candidate.choice.num_microbatches / near.choice.num_microbatches
        # A backward is two forwards.
        forwards = (3 + bool(candidate.choice.recompute)) / (3 + bool(near.choice.recompute))
        layers = candidate.simulator.num_layers / max(1, near.simulator.num_layers) or 1
        host = (work.host - work.host_of_step) * microbatches * forwards * layers

        def calibrate(name: str, simulated: float) -> float:
            estimated = getattr(near_estimate, name)
            is_calibrated = near.simulator is candidate.simulator and estimated
            return getattr(estimate, name) * (simulated / estimated if is_calibrated else 1.0)

        traffic, copies = calibrate("traffic_seconds", work.traffic), calibrate("copy_seconds", work.copies)
        awaited, bubble = calibrate("awaited_seconds", work.awaited), calibrate("bubble", work.bubble)
        is_cpu = candidate.simulator.device.is_cpu
        busy = busy_seconds(compute + work.compute_of_step, host + work.host_of_step, traffic, is_cpu=is_cpu)
        return max(busy, copies) * (1 + bubble) + awaited + work.cpu_of_step

    def _margined_bytes(self, candidate: _Candidate, near: _Candidate) -> int:
        return with_margin(self._needed_bytes(candidate, near), candidate.simulator.device)

    def _needed_bytes(self, candidate: _Candidate, near: _Candidate) -> int:
        """Return the estimated memory, calibrated by a simulation."""
        row, choice, simulator = self.rows[near], candidate.choice, candidate.simulator
        if near.simulator is not simulator:
            return int(candidate.estimate.peak_bytes * row.reserved_bytes / near.estimate.peak_bytes)
        if (choice.recompute or near.choice.recompute) and choice.micro_batch_size >= near.choice.micro_batch_size:
            return row.reserved_bytes + candidate.estimate.peak_bytes - near.estimate.peak_bytes
        # Memory grows as the simulated activations do.
        alike = replace(choice, micro_batch_size=near.choice.micro_batch_size)
        estimate = simulator.estimate(alike)
        more = choice.micro_batch_size / near.choice.micro_batch_size - 1
        more *= simulator.num_held(choice) / simulator.num_held(near.choice)
        grown = more * max(0, row.at_peak.get("activations", 0) - simulator.sizes.head_bytes)
        return int(row.reserved_bytes + estimate.peak_bytes - near.estimate.peak_bytes + grown)

    def estimate_row(self, candidate: _Candidate) -> PlanRow:
        estimate, limit = candidate.estimate, gib_text(self._limit_bytes)
        near = self._nearest(candidate) if self.rows else None
        peak = needed = bound = self._least_bytes(candidate)
        margined = with_margin(needed, candidate.simulator.device)
        fits, why = NO, f"at least {gib_text(bound)} alive at once, {limit} there"
        if near is not None and bound <= self._limit_bytes:
            needed = max(bound, self._needed_bytes(candidate, near))
            peak = int(needed * self.rows[near].peak_bytes / self.rows[near].reserved_bytes)
            margined = with_margin(needed, candidate.simulator.device)
            fits = YES if margined <= self._limit_bytes else TIGHT if peak <= self._limit_bytes else NO
            why = f"about {gib_text(needed)} reserved of {limit}, {gib_text(margined)} with the margin"
        return PlanRow(
            candidate.choice, fits, why, peak, needed, margined, estimate.sent_bytes,
            estimate.seconds if near is None else self._seconds(candidate, near), estimate.bound, CLOSED_FORM,
            candidate.choice.most_tokens(candidate.simulator.sample.length_tokens),
            is_least=bound > self._limit_bytes, parallel=candidate.simulator.config.parallel,
            update_tokens=candidate.simulator.update_tokens,
        )  # fmt: skip


def min_peak_bytes(choice: Choice, row: PlanRow, fixed_bytes: int = 0) -> int:
    """Return a lower bound of a choice's peak from the simulation of another that needs no more; 0 without one.

    The bound is that one's peak with as many activations as the larger microbatch has. ``fixed_bytes`` are the
    activations that do not grow with the microbatch, at most.
    """
    if row.by != SIMULATION or not choice.needs_as_much_as(row.choice):
        return 0
    # Gradients are reduced at other times.
    is_other_sync = choice.sync != row.choice.sync
    is_between = choice.num_microbatches == 1 < row.choice.num_microbatches
    names = ("gradients", "unsharded gradients") if is_other_sync or is_between else ()
    fixed = sum(row.at_peak.get(name, 0) for name in (*names, *["communication"] * is_other_sync))
    more = choice.micro_batch_size / row.choice.micro_batch_size - 1
    # With recomputation most activations are of the head and of one layer, and their peak moves.
    kept_bytes = 0 if row.choice.recompute else max(0, row.at_peak.get("activations", 0) - fixed_bytes)
    return int(row.peak_bytes - fixed + more * GROWN * kept_bytes)
