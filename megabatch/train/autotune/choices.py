"""Chosen: what a recipe leaves open and a run has chosen, before its first update or in one that it goes on from."""

from dataclasses import dataclass, replace
from pathlib import Path

from megabatch import Learner
from megabatch.errors import MicrobatchLimit as Learned
from megabatch.losses import LossFunction
from megabatch.planning import TunedLimit
from megabatch.train.autotune.build_accumulator import build_accumulator
from megabatch.train.autotune.microbatch_limit import ChosenLimit, choose_limit, load_limit, longest
from megabatch.train.autotune.sync_policy import AUTO, LAST, ChosenSync, SyncChooser, load_policy
from megabatch.train.config import Config, UpdateConfig
from megabatch.train.data.load import Data
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import Laid
from megabatch.train.runtime.oom_limit import lowered_settings
from megabatch.train.runtime.ranks import Ranks


@dataclass(frozen=True)
class Chosen:
    """How much goes through the model at once, and when ranks sum."""

    bound: ChosenLimit | None  # None: the recipe gives it
    policy: ChosenSync

    @property
    def given(self) -> tuple[TunedLimit | None, str | None]:
        """Both, as far as they are known and not the recipe's."""
        return None if self.bound is None else self.bound.fit, self.policy.sync

    def said(self, update: UpdateConfig, learned: Learned | None) -> list[str]:
        """What is to be said of it, and of a bound that the recipe gives; ``learned``: since memory has run out."""
        of_bound = lowered_settings(update, learned) if self.bound is None else self.bound.words
        return [*of_bound, *self.policy.words]

    def meta(self, fit: TunedLimit | None) -> dict[str, object]:
        """What a checkpoint keeps; ``fit``: as it is by now."""
        return {**({} if self.bound is None else replace(self.bound, fit=fit).meta), **self.policy.meta}


def saved_choices(config: Config, ranks: Ranks, checkpoint: Path | None) -> Chosen:
    """Those of the checkpoint which the run goes on from, as far as they still hold."""
    bound = load_limit(config, ranks, checkpoint)
    return Chosen(bound, load_policy(config, ranks, bound, checkpoint))


def choose_rest(
    chosen: Chosen, config: Config, learner: Learner, loss_fn: LossFunction, data: Data, updates: Updates, laid: Laid,
    ranks: Ranks,
) -> Chosen:  # fmt: skip
    """What is still open, which the learner follows from here on. Measuring leaves nothing behind; collective."""
    bound = choose_limit(chosen.bound, learner.gradient, loss_fn, data, updates, laid, ranks)
    if chosen.policy.sync is not None:
        return Chosen(bound, chosen.policy)
    batch = updates.peek()
    own = learner.gradient.plan(batch).sync
    found = None if own == LAST else SyncChooser(own, config, learner, loss_fn, data, batch, laid, ranks).choose()
    if found is None:
        return Chosen(bound, replace(chosen.policy, sync=AUTO, words=()))
    if found.sync == LAST:
        learned = learner.gradient.oom_limit
        learner.gradient = build_accumulator(laid.model, config, found.fit, LAST)
        learner.gradient.lower_limit(learned)
        learner.gradient.reserve_for(learner.optimizer)
        if bound is not None:
            with laid.losses():
                learner.gradient.tune(longest(data, batch), loss_fn)  # nothing: it remembers the sample
    if bound is not None and found.fit is not None:
        bound = bound.lowered(found.fit)
    line = f"update.sync {found.sync}: {found.why}"
    return Chosen(bound, replace(chosen.policy, sync=found.sync, words=(*chosen.policy.words, line)))
