"""Policy: when ranks sum their gradients, where the recipe leaves that open; chosen once, kept with the run.

Every policy has the same gradient. Of those that fit in memory the one is taken that sends least, as `megabatch plan`
does; "last", which keeps the whole gradient of sharded parameters until the last microbatch, must have been measured
to fit. All that it is chosen from is the same on every rank.
"""

import json
import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megabatch import GradientAccumulator, Learner, Plan
from megabatch.autotune import PolicyMemory, check_measurable, free_on, measure_policy
from megabatch.errors import MegabatchError, PlanError
from megabatch.losses import LossFunction
from megabatch.planning import TunedLimit
from megabatch.train.autotune.accumulator import accumulator_of, cap_of, collate_of
from megabatch.train.autotune.fsdp_comm_bytes import reductions_of
from megabatch.train.autotune.microbatch_limit import Bound, circumstances, longest
from megabatch.train.checkpoints.metadata import first_difference, read_meta
from megabatch.train.config import Config
from megabatch.train.config.batch_size import sizes_of
from megabatch.train.config.byte_sizes import GIB, gb_text, gib_text
from megabatch.train.data.load import Data
from megabatch.train.data.stream import Stream
from megabatch.train.model.build import ParallelModel
from megabatch.train.model.wrap import accumulation_of
from megabatch.train.runtime.oom_limit import OOM_LIMIT_FILE, load_oom_limit
from megabatch.train.runtime.ranks import Ranks

KEY = "sync"  # of a checkpoint's meta
AUTO, LAST = "auto", "last"
MICROBATCHES_A_CALL = 8  # of a rank, of an update in several calls (checkpoint.partial), each of which reduces once
SLIGHT = 1000  # times what is kept more: where so much is free, a hundred times of it is kept free anyway
REASON = "chosen for this run, since it fits and sends least"  # the library says that it was asked for
AS_SAVED = "the checkpoint's, so that sums are rounded the same"


@dataclass(frozen=True)
class Policy:
    """When ranks sum, and what it was chosen for."""

    sync: str | None  # None: not chosen yet; "auto": as the wrapper does it by itself
    made_for: Mapping[str, object]  # where any of it differs, it is chosen anew
    words: tuple[str, ...] = ()
    is_asked: bool = False  # by the recipe

    @property
    def meta(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        return {KEY: {"made_for": dict(self.made_for), "sync": self.sync}}

    def shown(self, plan: Plan) -> Plan:
        """The plan, with the reason that is true."""
        return plan if self.is_asked or self.sync != LAST else replace(plan, reason=REASON)


def saved_policy(config: Config, ranks: Ranks, bound: Bound | None, checkpoint: Path | None) -> Policy:
    """That of the recipe, or of the checkpoint which the run goes on from; open otherwise. Every rank reads the same.

    ``bound`` is what was read of it beside: where that is measured anew, the policy is too.
    """
    here = {
        **circumstances(config, ranks),
        **{f"update.{key}": getattr(config.update, key) for key in ("micro_batch_size", "max_microbatch_tokens")},
    }
    if config.update.sync != AUTO:
        return Policy(config.update.sync, here, is_asked=True)
    if checkpoint is None or load_oom_limit(config.run) is not None:
        return Policy(None, here)
    saved: dict[str, Any] | None = read_meta(checkpoint).get(KEY)
    if saved is None:  # of a version that left it to the wrapper
        return Policy(AUTO, here)
    if (difference := first_difference(saved["made_for"], here)) is not None:
        key, there, now = difference
        return Policy(None, here, (f"update.sync is chosen anew: {key} was {there} and is {now}",))
    if bound is not None and bound.fit is None:
        return Policy(None, here)
    return Policy(saved["sync"], here, () if saved["sync"] == AUTO else (f"update.sync {saved['sync']}: {AS_SAVED}",))


@dataclass(frozen=True)
class Found:
    """A policy, why, and the bound that goes with it, where that was measured and is another."""

    sync: str
    why: str
    fit: TunedLimit | None = None


class Choosing:
    """Chooses between "last" and the wrapper's own policy, which keeps no more than it must. Collective.

    Args:
        own: The latter.
        batch: This rank's samples of the next update.
    """

    def __init__(
        self, own: str, config: Config, learner: Learner, loss_fn: LossFunction, data: Data, batch: Sequence[Any],
        laid: ParallelModel, ranks: Ranks,
    ) -> None:  # fmt: skip
        self._own, self._config, self._learner, self._loss_fn = own, config, learner, loss_fn
        self._data, self._batch, self._laid, self._ranks = data, batch, laid, ranks
        self._reductions = reductions_of(laid.model, accumulation_of(config.update))
        sizes = [self._reductions.whole_bytes, self._reductions.more_bytes, len(batch)]
        self._whole_bytes, self._more_bytes, self._most_samples = most(sizes, ranks)

    def found(self) -> Found | None:
        """The policy; None where there is nothing to choose: nobody to share with, or one microbatch an update."""
        if self._reductions.num_shards == 1:
            return None
        num_microbatches, fit = self._num_microbatches(self._learner.gradient), self._learner.gradient.fit
        if num_microbatches <= self._num_calls(num_microbatches):  # or none: the run is at its end
            return None
        if load_oom_limit(self._config.run) is not None:
            return Found(
                self._own, f"a microbatch did not fit in memory ({OOM_LIMIT_FILE}), and it keeps less than {LAST}"
            )
        sent, less = self._sent(self._own, num_microbatches), self._sent(LAST, num_microbatches)
        free, problem = self._free()
        if self._config.update.memory is None and self._whole_bytes * SLIGHT <= free:
            why = f"its whole gradient is {gib_text(self._whole_bytes)} of the {gib_text(free)} that are free"
            return Found(LAST, f"{why}{self._saves(sent, less)}", fit)
        if problem:
            return Found(self._own, f"{problem}, and it keeps less than {LAST}")
        try:
            return self._beside(fit, num_microbatches, sent, less) if fit else self._as_stated(sent, less)
        except PlanError as error:
            raise MegabatchError(f"{error}; or state update.sync, for which nothing is measured") from error

    def _as_stated(self, sent: float, less: float) -> Found:
        """With the bound that the recipe states; what is sent under the wrapper's own policy, and under "last"."""
        update, spare = self._config.update, self._more_bytes
        rows = min(update.micro_batch_size or self._most_samples, self._most_samples)
        tokens = update.max_microbatch_tokens
        tokens = tokens if isinstance(tokens, int) else None
        own = self._taken(self._own, rows, tokens, spare)
        if not own.fits(spare):
            return self._too_large(own.peak_bytes + spare, own.limit_bytes, sent, less)
        last = self._taken(LAST, rows, tokens, budget=own.budget)
        return self._judged(last, own.peak_bytes + spare, sent, less)

    def _beside(
        self, fit: TunedLimit, num_microbatches: int, sent: float, less: float, over_bytes: float | None = None
    ) -> Found:
        """With as much of the measured bound as there is room for beside the whole gradient.

        ``over_bytes``: what was measured beyond the limit when that was tried; it is tried once more.
        """
        more_bytes = self._more_bytes + (over_bytes or 0.0)
        lowered = beside(fit, more_bytes)
        if lowered is None:
            least = fit.cost.peak_bytes(1, fit.longest_tokens) + more_bytes
            return self._too_large(least, fit.limit_bytes, sent, less)
        tokens = lowered.max_microbatch_tokens
        needed = self._num_microbatches(accumulator_of(self._laid.model, self._config, lowered, LAST))
        if needed > num_microbatches:
            why = f"beside its whole gradient {LAST} has room for microbatches of {tokens:,} tokens"
            return Found(self._own, f"{why}, and an update would be {needed} of them instead of {num_microbatches}")
        last = self._taken(LAST, self._most_samples, tokens)
        if over_bytes is None and not last.fits():
            return self._beside(fit, num_microbatches, sent, less, last.num_bytes - last.allowed_bytes)
        return self._judged(last, lowered.cost.peak_bytes(1, tokens), sent, less, lowered)

    def _judged(
        self, last: PolicyMemory, peak: float, sent: float, less: float, fit: TunedLimit | None = None
    ) -> Found:
        """The choice, once "last" is measured too; ``peak``: as it was expected."""
        peak = max(peak, last.peak_bytes)
        if not last.fits():
            return self._too_large(peak, last.limit_bytes, sent, less)
        why = f"its whole gradient of {gib_text(self._whole_bytes)} fits ({room(peak, last.limit_bytes)})"
        return Found(LAST, f"{why}{self._saves(sent, less)}", fit)

    def _saves(self, sent: float, less: float) -> str:
        return f", and {self._own} would send {gb_text(sent)} an update, {sent / less:.2f} times as much"

    def _too_large(self, peak: float, limit: float, sent: float, less: float) -> Found:
        why = f"{LAST} would keep the whole gradient of {gib_text(self._whole_bytes)} ({room(peak, limit)})"
        return Found(self._own, f"{why}, to send {less / sent:.2f} of the {gb_text(sent)} of an update")

    def _taken(
        self, sync: str, rows: int, tokens: int | None, spare_bytes: float = 0.0, budget: Any = None
    ) -> PolicyMemory:
        with self._laid.losses():
            found = measure_policy(
                sync, self._laid.model, longest(self._data, self._batch), self._loss_fn,
                optimizer=self._learner.optimizer, rows=rows, tokens=tokens, spare_bytes=spare_bytes,
                memory_bytes=cap_of(self._config), accumulate_dtype=accumulation_of(self._config.update), budget=budget,
                collate=collate_of(self._config),
            )  # fmt: skip
        assert found is not None  # an update of several microbatches has a sample
        return found

    def _free(self) -> tuple[float, str]:
        """What each rank has free, at the least, and why nothing can be measured, "" where it can; alike on all."""
        free, problem, num_sharing = 0.0, "", self._num_sharing
        try:
            free = free_on(self._ranks.device) / num_sharing
            check_measurable(self._ranks.device)
        except PlanError as error:
            problem = str(error)
        if isinstance(self._data.train, Stream) and self._config.data.pack_tokens is None:
            problem = "the longest sample of a stream is not known"
        told = [json.loads(text) for text in self._ranks.gather(json.dumps([free, problem]))]
        return min(free for free, _ in told), next((problem for _, problem in told if problem), "")

    @property
    def _num_sharing(self) -> int:
        """Ranks that share this one's memory: on a CPU those of its host."""
        hosts = self._ranks.gather(socket.gethostname())
        return hosts.count(socket.gethostname()) if self._ranks.device.type == "cpu" else 1

    def _num_microbatches(self, gradient: GradientAccumulator) -> int:
        """Of an update of the largest size, on the rank that has the most."""
        (here,) = most([gradient.plan(self._batch).num_microbatches], self._ranks)
        (num_samples,) = self._ranks.sum_of_data([len(self._batch)])
        return math.ceil(here * max(1.0, sizes_of(self._config.update).largest / max(1.0, num_samples)))

    def _num_calls(self, num_microbatches: int) -> int:
        """How often ranks sum under "last"."""
        return -(-num_microbatches // MICROBATCHES_A_CALL) if self._config.checkpoint.partial else 1

    def _sent(self, sync: str, num_microbatches: int) -> float:
        """What a rank sends in an update, at most."""
        here = self._reductions.sent_bytes(sync, num_microbatches, self._num_calls(num_microbatches))
        (sent,) = most([here], self._ranks)
        return sent


def most(values: Sequence[float], ranks: Ranks) -> list[Any]:
    """Each value of the rank that has the most; collective."""
    told: list[list[float]] = [json.loads(text) for text in ranks.gather(json.dumps(list(values)))]
    return [max(each) for each in zip(*told, strict=True)]


def beside(fit: TunedLimit, more_bytes: float) -> TunedLimit | None:
    """The bound that has room for so many bytes beside it; None where not even the longest sample has."""
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


def room(peak: float, limit: float) -> str:
    """What it comes to."""
    return f"peak {peak / GIB:.2f} GiB of {limit / GIB:.2f} GiB"
