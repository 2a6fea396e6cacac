"""Microbatch limit: the tokens of a microbatch, measured once if the recipe says "auto", and kept with the run.

The limit decides how sums are rounded. So a resumed run takes it from the checkpoint, unless the hardware or the layout
has changed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megabatch import CostModel
from megabatch.batching import Deferred
from megabatch.planning import MeasuredMicrobatch, TunedLimit
from megabatch.train.checkpoints.metadata import describe_conditions, first_difference, read_meta
from megabatch.train.config import Config
from megabatch.train.context import RunContext
from megabatch.train.data.load import Data
from megabatch.train.data.stream import Stream
from megabatch.train.data.updates import balancing_cost
from megabatch.train.runtime.oom_limit import OOM_LIMIT_FILE, load_oom_limit
from megabatch.train.runtime.ranks import Ranks

# Key of a checkpoint's metadata.
KEY = "bound"
EVEN, DEALT = "even_tokens", "dealt_tokens"
AUTO = "auto"
# Attention of the longest sample over its other work. Below the first, balance changes by less than a percent. Above
# the second, the clock was noisy, and balancing by more may cost more than it brings.
MIN_RATIO, MAX_RATIO = 1 / 8, 4
# Attention that is too cheap to measure counts as much as everything else at this many tokens.
NO_ATTENTION = 2**40


@dataclass(frozen=True)
class ChosenLimit:
    """The measured limit of a run."""

    fit: TunedLimit | None  # None: not measured yet
    made_for: Mapping[str, object]  # conditions; if any of them differs, the limit is measured again
    words: tuple[str, ...] = ()
    # By these, of the first measurement, updates are dealt for the run's life.
    even_tokens: int | None = None
    dealt_tokens: int | None = None

    @property
    def meta(self) -> dict[str, object]:
        fit = None if self.fit is None else asdict(self.fit)
        dealing = {EVEN: self.even_tokens, DEALT: self.dealt_tokens}
        return {KEY: {"made_for": dict(self.made_for), "fit": fit, **dealing}}


def load_limit(config: Config, ranks: Ranks, checkpoint: Path | None) -> ChosenLimit | None:
    """Return the limit of the checkpoint that the run resumes from; None if the recipe states one.

    Every rank reads the same.
    """
    if config.update.max_microbatch_tokens != AUTO:
        return None
    here = describe_conditions(config, ranks)
    saved = None if checkpoint is None else read_meta(checkpoint).get(KEY)
    if saved is None or saved.get("fit") is None:
        return ChosenLimit(None, here)
    difference = first_difference(saved["made_for"], here)
    if difference is not None:
        key, there, now = difference
        return ChosenLimit(None, here, (f"the bound is chosen anew: {key} was {there} and is {now}",))
    values = dict(saved["fit"])
    values["cost"] = CostModel(**values["cost"])
    values["measured"] = tuple(MeasuredMicrobatch(**fields) for fields in values["measured"])
    fit, oom_limit = TunedLimit(**values), load_oom_limit(config.run)
    tokens = fit.max_microbatch_tokens
    text = f"update.max_microbatch_tokens {tokens:,}: the checkpoint's, so that sums are rounded the same"
    if oom_limit is not None and oom_limit.tokens < tokens:
        at_most = f"{oom_limit.tokens:,} ({OOM_LIMIT_FILE})"
        text = f"{text}; since a microbatch did not fit in memory, one holds at most {at_most}"
    return ChosenLimit(fit, here, (text,), saved[EVEN], saved.get(DEALT))


def choose_limit(chosen: ChosenLimit | None, context: RunContext) -> ChosenLimit | None:
    """Measure the limit if it is open, and balance updates by what was measured. Collective.

    A limit from a checkpoint is measured again if the next update needs it.
    """
    if chosen is None:
        return None
    gradient, updates = context.learner.gradient, context.updates
    with context.model.losses():
        gradient.tune(longest(context.data, updates.peek()), context.loss_fn)
    if gradient.fit is None:
        return chosen
    words = (*(chosen.words if chosen.fit is None else ()), f"update.{gradient.fit.explain()}")
    if chosen.fit is None:
        # Other ranks may round another way.
        even = context.ranks.broadcast(even_tokens(gradient.fit.cost, gradient.fit.longest_tokens))
        tokens = context.ranks.broadcast(gradient.fit.max_microbatch_tokens)
        chosen = ChosenLimit(gradient.fit, chosen.made_for, words, even, tokens)
    elif gradient.fit != chosen.fit:
        chosen = replace(chosen, fit=gradient.fit, words=words)
    cost = None if chosen.even_tokens is None else balancing_cost(chosen.even_tokens)
    updates.deal_by(replace(updates.dealing, cost=cost, max_microbatch_tokens=chosen.dealt_tokens))
    if cost is None or context.ranks.dp_degree == 1:
        return chosen
    even = f"attention counts as much as the rest at {chosen.even_tokens:,} tokens"
    return replace(chosen, words=(*chosen.words, f"samples are dealt over ranks by cost: {even}"))


def relative_cost(cost: CostModel, longest_tokens: int) -> CostModel:
    """Return a measured cost in units of a token without attention, in powers of two."""
    even = even_tokens(cost, longest_tokens)
    launch = cost.seconds_per_microbatch / cost.seconds_per_token if cost.seconds_per_token else 0.0
    launch_tokens = 2 ** round(math.log2(launch)) if launch >= 1 else 0
    return balancing_cost(even or NO_ATTENTION, launch_tokens)


def even_tokens(cost: CostModel, longest_tokens: int) -> int | None:
    """Return the length at which attention costs a sample as much as everything else; None if attention is cheap.

    A power of two hardly depends on the machine's other load, and makes sums of costs exact on every rank.
    """
    attention = cost.seconds_per_pair * longest_tokens
    if attention <= 0 or attention < MIN_RATIO * cost.seconds_per_token:
        return None
    ratio = min(attention / cost.seconds_per_token, MAX_RATIO) if cost.seconds_per_token else MAX_RATIO
    return 2 ** max(0, round(math.log2(longest_tokens / ratio)))


def longest(data: Data, samples: Sequence[Any]) -> Sequence[Any]:
    """Return the next update's samples with the first replaced by the longest of the data; a stream's as they are."""
    if isinstance(data.train, Stream) or not samples:
        return samples
    train, index = data.train, int(data.train.lengths.argmax())
    if not isinstance(samples, Deferred):
        return [train[index], *samples[1:]]
    lengths = [int(train.lengths[index]), *samples.lengths[1:]]
    return Deferred(lambda row: samples[row] if row else train[index], lengths, look_ahead=0, measured=samples.measured)
