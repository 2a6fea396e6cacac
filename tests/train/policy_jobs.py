"""Jobs of the ranks in the tests of the policy that a run chooses; see on_ranks.py."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from megabatch import CostModel, loss
from megabatch.autotune.memory import Budget
from megabatch.autotune.tuner import PolicyMemory
from megabatch.losses.contract import Weigh, weigh_of
from megabatch.planning.limits import MeasuredMicrobatch, TunedLimit
from megabatch.train.autotune.choices import TunedChoices, choose_rest
from megabatch.train.autotune.fsdp_comm_bytes import measure_comm
from megabatch.train.autotune.microbatch_limit import ChosenLimit
from megabatch.train.autotune.sync_policy import (
    GATHER_ONCE,
    LAST,
    ChosenSync,
    SyncChooser,
    SyncDecision,
    max_over_ranks,
)
from megabatch.train.config import Config
from megabatch.train.config.parallel_layout import layout_of
from megabatch.train.config.recipe import load_config
from megabatch.train.context import RunContext
from megabatch.train.loop import prepare_run
from megabatch.train.model.build_accumulator import build_accumulator
from megabatch.train.runtime.heartbeat import Heartbeat
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from megabatch.train.runtime.signals import StopSignal
from tests.comm.counting import Collectives
from tests.comm.jobs import held

SOME = f"{GATHER_ONCE}:2"
CAP = 2**40  # more than there is: what is free stays the limit, and it is measured however little is asked for
CAPS = {
    "half of it": 0.5,
    "all of it": 6.0,
}  # of what the first candidate keeps more, above what the wrapper's own policy needs
TOKENS, LONGEST, BYTES_PER_TOKEN = 400, 40, 1000.0  # of a bound; its longest sample, of which there is none so long
ROOM = {  # bytes beyond what "gather_once" keeps more
    "room": 0.0, "a little less": -20 * BYTES_PER_TOKEN, "half of the bound": -200 * BYTES_PER_TOKEN,
    "no room": -361 * BYTES_PER_TOKEN,
}  # fmt: skip
OVER = {"never": [-1.0], "once": [20 * BYTES_PER_TOKEN, 0.0], "twice": [20 * BYTES_PER_TOKEN, 1.0, -1.0]}
OVER["always"] = [20 * BYTES_PER_TOKEN, 1.0] * 2
NUM_MEASURED = 9  # gloo lets go of what was sent at its own time, and then a measurement is too high


def context_of(ranks: Ranks, recipe: Path, overrides: Sequence[str]) -> RunContext:
    """The recipe's, made and not run."""
    config = load_config(recipe, list(overrides))
    there = replace(ranks, layout=layout_of(config.parallel, ranks.size))
    return prepare_run(config, there, StopSignal(speaks=False), Heartbeat(Rendezvous(), None))


def capped(config: Config, num_bytes: float, **update: Any) -> Config:
    """The config under a cap, which no recipe may have beside a bound."""
    memory = {"memory": f"{int(num_bytes)}B"}
    return config.model_copy(update={"update": config.update.model_copy(update={**memory, **update})})


class Steady(SyncChooser):
    """Chooses in a process that uses the same of its memory all the time, but for what is measured."""

    budget: Budget | None = None

    def _measure(self, *given: Any, budget: Budget | None = None, **named: Any) -> PolicyMemory:
        return super()._measure(*given, **named, budget=self.budget or budget)

    def more_bytes(self, sync: str | None = None) -> float:
        """Bytes that a candidate keeps beyond the wrapper's own policy. None: the one that sends least. Collective."""
        found = self.candidates(self._num_microbatches(self._learner.gradient))
        return next(each.more_bytes for each in found if sync in (None, each.sync))


def choosing_of(context: RunContext) -> Steady:
    """The chooser that measures, whatever the trainer has chosen."""
    learner, batch = context.learner, context.updates.peek()
    learner.gradient = build_accumulator(context.model.model, context.config, learner.gradient.fit)
    return Steady(learner.gradient.plan(batch).sync, replace(context, config=capped(context.config, CAP)), batch)


def least_of(choosing: Steady, ranks: Ranks) -> float:
    """The memory of a microbatch of one sample under the wrapper's own policy."""
    choosing.budget = choosing._measure(choosing._own, 1, None).budget
    peaks = [choosing._measure(choosing._own, 1, None).peak_bytes for _ in range(NUM_MEASURED)]
    return max_over_ranks([min(peaks)], ranks)[0]


def under_caps(ranks: Ranks, recipe: Path, overrides: Sequence[str]) -> dict[str, SyncDecision | None]:
    """The choices with room for half of what the first candidate keeps more, and for all of it."""
    choosing = choosing_of(context_of(ranks, recipe, overrides))
    least, more, found = least_of(choosing, ranks), choosing.more_bytes(), dict[str, SyncDecision | None]()
    for name, share in CAPS.items():
        assert choosing.budget is not None
        above = choosing.budget.used if share < 1 else least  # nothing that is measured makes room for it all there
        choosing.budget = replace(choosing.budget, limit=above + share * more)
        found[name] = choosing.choose()
    return found


def with_bounds(ranks: Ranks, recipe: Path, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The choice beside a limit with so much room left for the gathered model, and the limit that goes with it."""
    context = context_of(ranks, recipe, overrides)
    more, learner, parallel_model = choosing_of(context).more_bytes(GATHER_ONCE), context.learner, context.model
    config = context.config = capped(context.config, CAP, micro_batch_size=None, max_microbatch_tokens="auto")
    found: dict[str, dict[str, Any]] = {}
    for name, room in ROOM.items():
        fit = fit_with(more + room)
        learner.gradient = build_accumulator(parallel_model.model, config, fit)
        context.choices = TunedChoices(ChosenLimit(fit, {}, (f"update.{fit.explain()}",)), ChosenSync(None, {}))
        chosen = choose_rest(context)
        gradient, after = learner.gradient, learner.gradient.fit
        assert chosen.bound is not None
        assert after is not None
        assert chosen.bound.fit == after
        assert gradient.plan(context.updates.peek()).sync == chosen.policy.sync
        found[name] = {
            "sync": chosen.policy.sync, "tokens": after.max_microbatch_tokens,
            "more": after.cost.bytes_fixed - fit.cost.bytes_fixed == more,
            "said": chosen.text(config.update, None),
        }  # fmt: skip
    return found


class Scripted(SyncChooser):
    """Chooses by numbers that are given."""

    over_bytes: list[float]  # the limit, each time that something is measured

    def _measure(self, *given: Any, **named: Any) -> PolicyMemory:
        return PolicyMemory(1e6 + self.over_bytes.pop(0), 0.0, 1e6, 1e6, Budget(0.0, 0.0, 0.0))


def measured_over(ranks: Ranks, recipe: Path, overrides: Sequence[str]) -> dict[str, SyncDecision | None]:
    """The choice beside a limit if a policy is measured to need more than it should, once or twice."""
    context = context_of(ranks, recipe, overrides)
    model, learner, batch = context.model.model, context.learner, context.updates.peek()
    config = capped(context.config, CAP, micro_batch_size=None, max_microbatch_tokens="auto")
    more = choosing_of(context).more_bytes(GATHER_ONCE)
    learner.gradient = build_accumulator(model, config, fit_with(more))
    found: dict[str, SyncDecision | None] = {}
    for name, over_bytes in OVER.items():
        scripted = Scripted("every", replace(context, config=config), batch)
        scripted.over_bytes = list(over_bytes)
        found[name] = scripted.choose()
        assert not scripted.over_bytes
    return found


def fit_with(room_bytes: float) -> TunedLimit:
    """A bound, with so much left of the memory that it was made for."""
    cost = CostModel(seconds_per_microbatch=1e6, bytes_fixed=1e6, bytes_per_token=BYTES_PER_TOKEN)
    limit = cost.peak_bytes(1, TOKENS) + room_bytes
    return TunedLimit(TOKENS, cost, LONGEST, (MeasuredMicrobatch(1, 1e6),), limit, limit)


def counted(ranks: Ranks, recipe: Path, given: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """For each list of overrides and each policy: what an update sends and keeps, and what was expected."""
    return [
        counts_of(context_of(ranks, recipe, overrides), sync)
        for overrides in given
        for sync in (None, LAST, GATHER_ONCE, SOME)
    ]


def counts_of(context: RunContext, sync: str | None) -> dict[str, Any]:
    """The collectives of a second update, the bytes of its gradient between two microbatches, and both as expected."""
    model, batch, loss_fn = context.model.model, context.updates.peek(), context.loss_fn
    gradient = build_accumulator(model, context.config, None, sync)
    kept: list[int] = []

    @loss(weigh=cast(Weigh, weigh_of(loss_fn)))
    def noting(model: Any, microbatch: Any) -> Any:
        kept.append(sum(each.nbytes for each in held(model)) if len(kept) == 2 else 0)
        return loss_fn(model, microbatch)

    for _ in range(2):  # the first call of a loss also checks it
        kept.clear()
        with Collectives() as collectives:
            gradient.forward_backward(batch, noting)
        gradient.finalize()
    assert gradient.last_plan is not None
    reductions, policy = measure_comm(model, None), gradient.last_plan.sync
    return {
        "sync": policy,
        "table": collectives.table(),
        "kept": kept[2],
        "num_microbatches": gradient.last_plan.num_microbatches,
        "sent": reductions.sent_bytes(policy, gradient.last_plan.num_microbatches, 1),
        "more": reductions.more_bytes(LAST),
        "whole": reductions.whole_bytes(LAST),
    }
