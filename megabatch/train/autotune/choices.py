"""The microbatch limit and the sync policy of a run, where the recipe leaves them open.

They are chosen before the first update, or read from the checkpoint that the run resumes from.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from megabatch import JointLoss, Plan
from megabatch.errors import MicrobatchLimit
from megabatch.planning import TunedLimit
from megabatch.train.autotune.microbatch_limit import ChosenLimit, choose_limit, load_limit, longest
from megabatch.train.autotune.sync_policy import AUTO, LAST, ChosenSync, SyncChooser, load_policy
from megabatch.train.config import Config, UpdateConfig
from megabatch.train.context import RunContext
from megabatch.train.model.build_accumulator import build_accumulator
from megabatch.train.runtime.oom_limit import lowered_settings
from megabatch.train.runtime.ranks import Ranks


@dataclass(frozen=True)
class TunedChoices:
    """The microbatch limit and the sync policy of a run."""

    bound: ChosenLimit | None  # None: the recipe gives it
    policy: ChosenSync

    @property
    def given(self) -> tuple[TunedLimit | None, str | None]:
        """Both, as far as they are known and not the recipe's."""
        return None if self.bound is None else self.bound.fit, self.policy.sync

    def text(self, update: UpdateConfig, learned: MicrobatchLimit | None) -> list[str]:
        """Return the lines about them; ``learned``: the limit since memory ran out."""
        of_bound = lowered_settings(update, learned) if self.bound is None else self.bound.words
        return [*of_bound, *self.policy.words]

    def meta(self, fit: TunedLimit | None) -> dict[str, object]:
        """Return what a checkpoint keeps; ``fit``: the limit of now."""
        return {**({} if self.bound is None else replace(self.bound, fit=fit).meta), **self.policy.meta}

    def shown(self, plan: Plan) -> Plan:
        """Return the plan with the reason of its sync policy."""
        return self.policy.shown(plan)


def saved_choices(config: Config, ranks: Ranks, checkpoint: Path | None) -> TunedChoices:
    """Return the choices of the checkpoint that still hold."""
    bound = load_limit(config, ranks, checkpoint)
    return TunedChoices(bound, load_policy(config, ranks, bound, checkpoint))


def choose_rest(context: RunContext) -> TunedChoices:
    """Choose what is still open. The learner follows it from here on; measuring leaves nothing behind. Collective."""
    chosen, learner, model = context.choices, context.learner, context.model
    bound = choose_limit(chosen.bound, context)
    keeps_gradient = (  # no other accumulator, with another sync policy, can take the place of the learner's
        "bias_rate" in (context.config.model.experts or {})
        or isinstance(context.loss_fn, JointLoss)
        or isinstance(model.model, list)
    )
    if chosen.policy.sync is not None or keeps_gradient:
        return TunedChoices(bound, chosen.policy)
    batch, found = context.updates.peek(), None
    own = learner.gradient.plan(batch).sync
    if own != LAST:
        found = SyncChooser(own, context, batch).choose()
    if found is None:
        return TunedChoices(bound, replace(chosen.policy, sync=AUTO, words=()))
    if found.sync != own:
        learned, state = learner.gradient.oom_limit, learner.gradient.state_dict()
        learner.gradient = build_accumulator(model.model, context.config, found.fit, found.sync)
        learner.gradient.lower_limit(learned)
        learner.gradient.load_state_dict(state)
        learner.gradient.reserve_for(learner.optimizer)
        if bound is not None:
            with model.losses():
                learner.gradient.tune(longest(context.data, batch), context.loss_fn)  # it remembers the sample
    if bound is not None and found.fit is not None:
        bound = bound.lowered(found.fit)
    line = f"update.sync {found.sync}: {found.why}"
    return TunedChoices(bound, replace(chosen.policy, sync=found.sync, words=(*chosen.policy.words, line)))
