"""Bound: how much goes through the model at once, where the recipe leaves that open; chosen once, kept with the run.

A cut decides how a sum is rounded, and nothing else of what is learned. So that a resumed run rounds the same, it takes
the bound from its checkpoint, unless it has come to other hardware or another layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megabatch import CostModel, GradientAccumulator
from megabatch.autotune import device_text
from megabatch.batching import Deferred
from megabatch.errors import MicrobatchLimit
from megabatch.losses import LossFunction
from megabatch.planning import MeasuredMicrobatch, TunedLimit
from megabatch.train.checkpoints.metadata import first_difference, read_meta
from megabatch.train.config import Config
from megabatch.train.data.balancing import dealt_text, even_tokens
from megabatch.train.data.load import Data
from megabatch.train.data.stream import Stream
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import ParallelModel
from megabatch.train.runtime.oom_limit import OOM_LIMIT_FILE, load_oom_limit
from megabatch.train.runtime.ranks import Ranks

KEY = "bound"  # of a checkpoint's meta
EVEN = "even_tokens"
AUTO = "auto"


@dataclass(frozen=True)
class Bound:
    """What was measured for the tokens of a microbatch, where the recipe leaves them open."""

    fit: TunedLimit | None  # None: not measured yet
    made_for: Mapping[str, object]  # where any of it differs, it is chosen anew
    words: tuple[str, ...] = ()
    even_tokens: int | None = None  # by which samples are dealt over ranks: of the first fit, for as long as it is kept

    @property
    def meta(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        fit = None if self.fit is None else asdict(self.fit)
        return {KEY: {"made_for": dict(self.made_for), "fit": fit, EVEN: self.even_tokens}}

    def lowered(self, fit: TunedLimit) -> "Bound":
        """With another fit in the place of its own."""
        own, other = (None if each is None else f"update.{each.explain()}" for each in (self.fit, fit))
        return replace(self, fit=fit, words=tuple(other if each == own else each for each in self.words))


def saved_bound(config: Config, ranks: Ranks, checkpoint: Path | None) -> Bound | None:
    """That of the checkpoint which the run goes on from; None where the recipe gives one. Every rank reads the same."""
    if config.update.max_microbatch_tokens != AUTO:
        return None
    here = circumstances(config, ranks)
    if checkpoint is None:
        return Bound(None, here)
    saved = read_meta(checkpoint).get(KEY)
    if saved is None or saved.get("fit") is None:
        return Bound(None, here)
    difference = first_difference(saved["made_for"], here)
    if difference is not None:
        key, there, now = difference
        return Bound(None, here, (f"the bound is chosen anew: {key} was {there} and is {now}",))
    fit = fit_of(saved["fit"])
    kept = kept_text(fit.max_microbatch_tokens, load_oom_limit(config.run))
    return Bound(fit, here, (kept,), saved.get(EVEN))  # of an earlier version: dealt by length, as before


def kept_text(tokens: int, learned: MicrobatchLimit | None) -> str:
    """What is said of a bound that a run goes on with."""
    text = f"update.max_microbatch_tokens {tokens:,}: the checkpoint's, so that sums are rounded the same"
    if learned is None or learned.tokens >= tokens:
        return text
    return f"{text}; since a microbatch did not fit in memory, one holds at most {learned.tokens:,} ({OOM_LIMIT_FILE})"


def circumstances(config: Config, ranks: Ranks) -> dict[str, object]:
    """What the memory of a microbatch depends on, beside the model, the data and the size of an update; collective.

    The same on every rank, on devices of several kinds too: all of them choose anew, or none does.
    """
    keys = {
        "update": ("memory", "sync", "accumulate_dtype", "one_row"),
        "model": ("dtype", "compute_dtype", "attention", "activation_checkpointing", "compile"),
        "optim": ("name", "function", "ema_decay"),
        "data": ("look_ahead",),
        "parallel": tuple(type(config.parallel).model_fields),
    }
    of_recipe = {
        f"{section}.{key}": getattr(getattr(config, section), key) for section in keys for key in keys[section]
    }
    devices = sorted(set(ranks.gather(device_text(ranks.device))))
    return {"device": " and ".join(devices), "number of ranks": ranks.size, **of_recipe}


def fit_of(saved: Mapping[str, Any]) -> TunedLimit:
    """A fit as a checkpoint keeps it."""
    values = dict(saved)
    values["cost"] = CostModel(**saved["cost"])
    values["measured"] = tuple(MeasuredMicrobatch(**each) for each in saved["measured"])
    return TunedLimit(**values)


def choose(
    bound: Bound | None, gradient: GradientAccumulator, loss_fn: LossFunction, data: Data, updates: Updates,
    laid: ParallelModel, ranks: Ranks,
) -> Bound | None:  # fmt: skip
    """The bound, measured where it is still open, and updates dealt by what was measured; collective.

    Nothing else is left behind. One that a checkpoint kept is measured anew where the next update needs it; and what
    it was measured with is remembered, for a larger update.
    """
    if bound is None:
        return None
    with laid.losses():
        gradient.tune(longest(data, updates.peek()), loss_fn)
    if gradient.fit is None:  # no sample is left
        return bound
    words = (*(bound.words if bound.fit is None else ()), f"update.{gradient.fit.explain()}")
    if bound.fit is None:
        bound = Bound(gradient.fit, bound.made_for, words, agreed(even_tokens(gradient.fit), ranks))
    elif gradient.fit != bound.fit:  # a stream goes on with a longer sample than any before
        bound = replace(bound, fit=gradient.fit, words=words)
    updates.deal_by(bound.even_tokens)
    dealt = () if updates.even_tokens is None else (dealt_text(updates.even_tokens),)
    return replace(bound, words=(*bound.words, *dealt))


def agreed(tokens: int | None, ranks: Ranks) -> int | None:
    """The first rank's number: others may be of another make, and round another way, and all deal the same."""
    return int(ranks.gather(str(tokens or 0))[0]) or None


def longest(data: Data, samples: Sequence[Any]) -> Sequence[Any]:
    """The next update's samples, the first of them exchanged for the longest of all, but of a stream."""
    if isinstance(data.train, Stream) or not samples:
        return samples
    train, index = data.train, int(data.train.lengths.argmax())
    if not isinstance(samples, Deferred):
        return [train[index], *samples[1:]]
    lengths = [int(train.lengths[index]), *samples.lengths[1:]]  # in the unit in which the samples' are told
    return Deferred(
        lambda asked: samples[asked] if asked else train[index], lengths, look_ahead=0, measured=samples.measured
    )
