"""Sync policy: when ranks sum their gradients, chosen once if the recipe says "auto", and kept with the run.

Every policy computes the same gradient. The run takes the one that fits in memory and sends least, as `megabatch plan`
does. "last" keeps the whole gradient of sharded parameters until the last microbatch, and "gather_once" all gathered
parameters, so both must be measured to fit. If all parameters do not fit, "gather_once:K" keeps as many groups of
them as do. Every rank decides from the same numbers.
"""

import math
import socket
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megabatch import GradientAccumulator, Plan
from megabatch.autotune import PolicyMemory, check_measurable, free_on, measure_policy
from megabatch.errors import MegabatchError, PlanError
from megabatch.planning import TunedLimit, num_gathered_once
from megabatch.train.autotune.fsdp_comm_bytes import measure_comm
from megabatch.train.autotune.microbatch_limit import ChosenLimit, longest
from megabatch.train.checkpoints.metadata import describe_conditions, first_difference, read_meta
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.config.byte_sizes import GIB, gb_text, gib_text
from megabatch.train.context import RunContext
from megabatch.train.data.stream import Stream
from megabatch.train.model.build_accumulator import build_accumulator, collate_of, memory_bytes_of
from megabatch.train.parallel.wrap import accumulation_of
from megabatch.train.runtime.oom_limit import OOM_LIMIT_FILE, load_oom_limit
from megabatch.train.runtime.ranks import Ranks

KEY = "sync"  # of a checkpoint's metadata
AUTO, LAST, GATHER_ONCE = "auto", "last", "gather_once"
KEPT = {LAST: "whole gradient", GATHER_ONCE: "gathered model"}  # between microbatches, by policy
FREE_FACTOR = 1000  # if this many times what a policy keeps is free, it fits without a measurement
REASON = "chosen for this run, since it fits and sends least"  # in place of the library's reason
AS_SAVED = "the checkpoint's, so that sums are rounded the same"


@dataclass(frozen=True)
class ChosenSync:
    """The policy of a run."""

    sync: str | None  # None: not chosen yet; "auto": the wrapper's own
    made_for: Mapping[str, object]  # conditions; if any of them differs, the policy is chosen again
    words: tuple[str, ...] = ()
    is_asked: bool = False  # by the recipe

    @property
    def meta(self) -> dict[str, object]:
        """The policy as a checkpoint keeps it."""
        return {KEY: {"made_for": dict(self.made_for), "sync": self.sync}}

    def shown(self, plan: Plan) -> Plan:
        """Return the plan with the true reason for its policy."""
        is_own = self.sync != LAST and not num_gathered_once(self.sync or AUTO)
        return plan if self.is_asked or is_own else replace(plan, reason=REASON)


def load_policy(config: Config, ranks: Ranks, limit: ChosenLimit | None, checkpoint: Path | None) -> ChosenSync:
    """Return the policy of the recipe, or of the checkpoint that the run resumes from; open without one.

    Every rank reads the same. If the checkpoint's ``limit`` is measured again, the policy is chosen again.
    """
    here = {
        **describe_conditions(config, ranks),
        **{f"update.{key}": getattr(config.update, key) for key in ("micro_batch_size", "max_microbatch_tokens")},
    }
    if config.update.sync != AUTO:
        return ChosenSync(config.update.sync, here, is_asked=True)
    if checkpoint is None or load_oom_limit(config.run) is not None:
        return ChosenSync(None, here)
    saved: dict[str, Any] = read_meta(checkpoint)[KEY]
    if (difference := first_difference(saved["made_for"], here)) is not None:
        key, there, now = difference
        return ChosenSync(None, here, (f"update.sync is chosen anew: {key} was {there} and is {now}",))
    if limit is not None and limit.fit is None:
        return ChosenSync(None, here)
    return ChosenSync(
        saved["sync"], here, () if saved["sync"] == AUTO else (f"update.sync {saved['sync']}: {AS_SAVED}",)
    )


@dataclass(frozen=True)
class SyncDecision:
    """A policy, the reason, and the limit that goes with it, if that has changed."""

    sync: str
    why: str
    fit: TunedLimit | None = None
    room_bytes: float = 0.0  # that a policy had which was refused


@dataclass(frozen=True)
class Candidate:
    """A policy that sends less than the wrapper's own and keeps more; bytes of the rank with the most."""

    sync: str
    whole_bytes: float  # that it keeps between microbatches
    more_bytes: float  # that it keeps beyond the wrapper's own
    sent_bytes: float  # of an update
    own: str  # the wrapper's own policy
    own_bytes: float  # that the own policy sends in an update

    @property
    def kept(self) -> str:
        """What it keeps, for a person."""
        return KEPT.get(self.sync, "partly gathered model")

    def taken(self, why: str, fit: TunedLimit | None) -> SyncDecision:
        """Return the decision for it."""
        times = f"{self.own_bytes / self.sent_bytes:.2f} times as much"
        why = f"its {self.kept} {why}, and {self.own} would send {gb_text(self.own_bytes)} an update, {times}"
        return SyncDecision(self.sync, why, fit)

    def too_large(self, peak: float, limit: float) -> SyncDecision:
        """Return the decision against it."""
        why = f"{self.sync} would keep the {self.kept} of {gib_text(self.whole_bytes)} ({_peak_text(peak, limit)})"
        why = f"{why}, to send {self.sent_bytes / self.own_bytes:.2f} of the {gb_text(self.own_bytes)} of an update"
        return SyncDecision(self.own, why, room_bytes=self.more_bytes + limit - peak)


class SyncChooser:
    """The choice between the wrapper's own policy and those that send less and keep more. Every method is collective.

    Args:
        own: The wrapper's own policy.
        batch: This rank's samples of the next update.
    """

    def __init__(self, own: str, context: RunContext, batch: Sequence[Any]) -> None:
        self._own, self._config, self._learner, self._loss_fn = own, context.config, context.learner, context.loss_fn
        self._data, self._batch, self._laid, self._ranks = context.data, batch, context.model, context.ranks
        self._comm = measure_comm(self._laid.model, accumulation_of(self._config.update))
        (self._most_samples,) = max_over_ranks([len(batch)], self._ranks)

    def choose(self) -> SyncDecision | None:
        """Choose; None without a choice: nothing is sharded, or an update has one microbatch."""
        if self._comm.num_shards == 1:
            return None
        num_microbatches, fit = self._num_microbatches(self._learner.gradient), self._learner.gradient.fit
        if num_microbatches <= 1:  # or none: the run is at its end
            return None
        if load_oom_limit(self._config.run) is not None:
            return SyncDecision(self._own, f"a microbatch did not fit in memory ({OOM_LIMIT_FILE}), and it keeps least")
        (free, problem), refused, candidates = self._free(), None, self.candidates(num_microbatches)
        while candidates:
            each = candidates.pop(0)
            found = self._try(each, fit, num_microbatches, free, problem)
            if found.sync == each.sync:
                return found
            refused = refused or found
            if each.sync == GATHER_ONCE and not problem:
                candidates = _sort([*candidates, *self._part(found.room_bytes, fit, num_microbatches)])
        return refused

    def candidates(self, num_microbatches: int) -> list[Candidate]:
        """Return the policies that send less than the own one, the least first; of equals the one that keeps less."""
        return _sort(self._candidate(sync, num_microbatches) for sync in KEPT)

    def _candidate(self, sync: str, num_microbatches: int) -> Candidate:
        comm = self._comm
        here = [comm.sent_bytes(each, num_microbatches, 1) for each in (sync, self._own)]
        here += [comm.whole_bytes(sync), comm.more_bytes(sync)]
        sent, own, whole, more = max_over_ranks(here, self._ranks)
        return Candidate(sync, whole, more, sent, self._own, own)

    def _part(self, room_bytes: float, fit: TunedLimit | None, num_microbatches: int) -> list[Candidate]:
        """Return the policy that keeps as many groups of parameters gathered as have room; none if that is none."""
        parts = [f"{GATHER_ONCE}:{count}" for count in range(1, len(self._comm.groups))]

        def has_no_room(sync: str) -> bool:
            more_bytes = self._candidate(sync, num_microbatches).more_bytes
            if fit is None:
                return more_bytes > room_bytes
            lowered = leave_room(fit, more_bytes)
            return lowered is None or self._num_beside(lowered, sync) > num_microbatches

        count = bisect_left(parts, True, key=has_no_room)
        return [self._candidate(sync, num_microbatches) for sync in parts[:count][-1:]]

    def _try(
        self, candidate: Candidate, fit: TunedLimit | None, num_microbatches: int, free: float, problem: str
    ) -> SyncDecision:
        """Decide between one policy and the wrapper's own."""
        if self._config.update.memory is None and candidate.whole_bytes * FREE_FACTOR <= free:
            return candidate.taken(f"is {gib_text(candidate.whole_bytes)} of the {gib_text(free)} that are free", fit)
        if problem:
            return SyncDecision(self._own, f"{problem}, and it keeps least")
        try:
            return self._with_room(candidate, fit, num_microbatches) if fit else self._as_stated(candidate)
        except PlanError as error:
            raise MegabatchError(f"{error}; or state update.sync, for which nothing is measured") from error

    def _as_stated(self, candidate: Candidate) -> SyncDecision:
        """Choose with the recipe's limit."""
        update, spare = self._config.update, candidate.more_bytes
        rows = min(update.micro_batch_size or self._most_samples, self._most_samples)
        tokens = update.max_microbatch_tokens
        tokens = tokens if isinstance(tokens, int) else None
        own = self._measure(self._own, rows, tokens, spare)
        if not own.fits(spare):
            return candidate.too_large(own.peak_bytes + spare, own.limit_bytes)
        measured = self._measure(candidate.sync, rows, tokens, budget=own.budget)
        return _decide(candidate, measured, own.peak_bytes + spare)

    def _with_room(
        self, candidate: Candidate, fit: TunedLimit, num_microbatches: int, over_bytes: float | None = None
    ) -> SyncDecision:
        """Choose with the measured limit, lowered to leave room for what the policy keeps.

        ``over_bytes`` are those over the memory limit in a first try. There is one more try.
        """
        more_bytes = candidate.more_bytes + (over_bytes or 0.0)
        lowered = leave_room(fit, more_bytes)
        if lowered is None:
            least = fit.cost.peak_bytes(1, fit.longest_tokens) + more_bytes
            return candidate.too_large(least, fit.limit_bytes)
        tokens = lowered.max_microbatch_tokens
        needed = self._num_beside(lowered, candidate.sync)
        if needed > num_microbatches:
            why = f"beside its {candidate.kept} {candidate.sync} has room for microbatches of {tokens:,} tokens"
            return SyncDecision(
                self._own, f"{why}, and an update would be {needed} of them instead of {num_microbatches}"
            )
        measured = self._measure(candidate.sync, self._most_samples, tokens)
        if over_bytes is None and not measured.fits():
            return self._with_room(candidate, fit, num_microbatches, measured.num_bytes - measured.allowed_bytes)
        return _decide(candidate, measured, lowered.cost.peak_bytes(1, tokens), lowered)

    def _measure(
        self, sync: str, rows: int, tokens: int | None, spare_bytes: float = 0.0, budget: Any = None
    ) -> PolicyMemory:
        with self._laid.losses():
            found = measure_policy(
                sync, self._laid.model, longest(self._data, self._batch), self._loss_fn,
                optimizer=self._learner.optimizer, rows=rows, tokens=tokens, spare_bytes=spare_bytes,
                memory_bytes=memory_bytes_of(self._config), accumulate_dtype=accumulation_of(self._config.update),
                budget=budget, collate=collate_of(self._config),
            )  # fmt: skip
        assert found is not None  # an update of several microbatches has a sample
        return found

    def _free(self) -> tuple[float, str]:
        """Return the least free memory of a rank, and why nothing can be measured, if so; the same on every rank."""
        free, problem, hosts = 0.0, "", self._ranks.gather(socket.gethostname())
        num_sharing = hosts.count(socket.gethostname()) if self._ranks.device.type == "cpu" else 1  # a host's memory
        try:
            free = free_on(self._ranks.device) / num_sharing
            check_measurable(self._ranks.device)
        except PlanError as error:
            problem = str(error)
        if isinstance(self._data.train, Stream) and self._config.data.pack_tokens is None:
            problem = "the longest sample of a stream is not known"
        return min(self._ranks.gather(free)), self._ranks.first_problem(problem) or ""

    def _num_microbatches(self, gradient: GradientAccumulator) -> int:
        """Count the microbatches of an update of the largest size, on the rank with the most."""
        (here,) = max_over_ranks([gradient.plan(self._batch).num_microbatches], self._ranks)
        (num_samples,) = self._ranks.sum_of_data([len(self._batch)])
        return math.ceil(here * max(1.0, sizes_of(self._config.update).largest / max(1.0, num_samples)))

    def _num_beside(self, fit: TunedLimit, sync: str) -> int:
        """Count the microbatches of an update under a limit that leaves room for a policy."""
        return self._num_microbatches(build_accumulator(self._laid.model, self._config, fit, sync))


def _sort(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return those that send less than the wrapper's own, the least first; of equals the one that keeps less."""
    found = (each for each in candidates if each.sent_bytes < each.own_bytes)
    return sorted(found, key=lambda each: (each.sent_bytes, each.more_bytes))


def _decide(candidate: Candidate, measured: PolicyMemory, peak: float, fit: TunedLimit | None = None) -> SyncDecision:
    """Decide once a policy is measured; ``peak`` is the expected one."""
    peak = max(peak, measured.peak_bytes)
    if not measured.fits():
        return candidate.too_large(peak, measured.limit_bytes)
    why = f"of {gib_text(candidate.whole_bytes)} fits ({_peak_text(peak, measured.limit_bytes)})"
    return candidate.taken(why, fit)


def max_over_ranks(values: Sequence[float], ranks: Ranks) -> list[Any]:
    """Return the maximum of each value over ranks. Collective."""
    return [max(each) for each in zip(*ranks.gather(list(values)), strict=True)]


def leave_room(fit: TunedLimit, more_bytes: float) -> TunedLimit | None:
    """Return the limit with room for more bytes beside it; None if not even the longest sample has room."""
    cost = replace(fit.cost, bytes_fixed=fit.cost.bytes_fixed + more_bytes)
    left = fit.limit_bytes - cost.bytes_fixed
    tokens = min(fit.max_microbatch_tokens, int(left / max(cost.bytes_per_token, 1e-9)) if left > 0 else 0)
    if tokens < fit.longest_tokens:
        return None
    is_lower = tokens < fit.max_microbatch_tokens
    return replace(
        fit, max_microbatch_tokens=tokens, cost=cost, allowed_bytes=fit.allowed_bytes,
        outgrown_rows=None if is_lower else fit.outgrown_rows,
    )  # fmt: skip


def _peak_text(peak: float, limit: float) -> str:
    return f"peak {peak / GIB:.2f} GiB of {limit / GIB:.2f} GiB"
