"""Bound: how much goes through the model at once, where the recipe leaves that open; chosen once, kept with the run.

A cut decides how a sum is rounded, and nothing else of what is learned. So that a resumed run rounds the same, it takes
the bound from its checkpoint, unless it has come to other hardware or another layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megabatch import CostModel, GradientAccumulator
from megabatch.contract import LossFunction
from megabatch.memory import HighWater, device_text
from megabatch.train import checkpoint
from megabatch.train.config import Config
from megabatch.train.console import Console
from megabatch.train.data.load import Data
from megabatch.train.data.stream import Stream
from megabatch.train.data.updates import Updates
from megabatch.train.model.build import Laid
from megabatch.train.plan.sizes import gib_text
from megabatch.train.ranks import Ranks

KEY = "bound"  # of a checkpoint's meta
AUTO = "auto"
COMPARED = 2  # update of this process after which everything is there that stays


@dataclass(frozen=True)
class Bound:
    """Padded tokens of a microbatch, where the recipe leaves them open, and where they come from."""

    max_microbatch_tokens: int | None  # None: not chosen yet
    made_for: Mapping[str, object]  # where any of it differs, it is chosen anew
    words: tuple[str, ...] = ()
    cost: CostModel | None = None  # of a microbatch, by which samples are cut

    @property
    def meta(self) -> dict[str, object]:
        """What a checkpoint keeps."""
        cost = None if self.cost is None else asdict(self.cost)
        kept = {"max_microbatch_tokens": self.max_microbatch_tokens, "made_for": dict(self.made_for), "cost": cost}
        return {KEY: kept}


def saved_bound(config: Config, ranks: Ranks) -> Bound | None:
    """That of the checkpoint which the run goes on from; None where the recipe gives one. Every rank reads the same."""
    if config.update.max_microbatch_tokens != AUTO:
        return None
    here: dict[str, object] = {
        "device": device_text(ranks.device),
        "update.memory": config.update.memory,
        "number of ranks": ranks.size,
        **{f"parallel.{key}": value for key, value in config.parallel.model_dump().items()},
    }
    folder = Path(config.run.folder)
    if not config.run.resume or not checkpoint.has_checkpoint(folder):
        return Bound(None, here)
    saved = checkpoint.read_meta(checkpoint.latest(folder)).get(KEY)
    if saved is None:
        return Bound(None, here)
    difference = checkpoint.first_difference(saved["made_for"], here)
    if difference is not None:
        key, there, now = difference
        return Bound(None, here, (f"the bound is chosen anew: {key} was {there} and is {now}",))
    tokens = saved["max_microbatch_tokens"]
    words = f"update.max_microbatch_tokens {tokens:,}: the checkpoint's, so that sums are rounded the same"
    return Bound(tokens, here, (words,), CostModel(**saved["cost"]))


def with_bound(config: Config, bound: Bound | None) -> Config:
    """The recipe as if it had said the bound."""
    if bound is None or bound.max_microbatch_tokens is None:
        return config
    update = config.update.model_copy(update={"max_microbatch_tokens": bound.max_microbatch_tokens, "memory": None})
    return config.model_copy(update={"update": update})


def choose(
    bound: Bound | None, gradient: GradientAccumulator, loss_fn: LossFunction, data: Data, updates: Updates, laid: Laid
) -> Bound | None:
    """The bound, measured where it is still open; collective. Nothing is left behind."""
    if bound is None or bound.max_microbatch_tokens is not None:
        return bound
    with laid.losses():
        gradient.choose_bound(longest(data, updates.peek()), loss_fn)
    fit = gradient.fit
    if fit is None:  # no sample is left
        return bound
    words = (*bound.words, f"update.{fit.explain()}")
    return Bound(fit.max_microbatch_tokens, bound.made_for, words, fit.cost)


def longest(data: Data, samples: Sequence[Any]) -> list[Any]:
    """As many samples as the next update has here, each the longest of all; of a stream its next ones."""
    if isinstance(data.train, Stream):
        return list(samples)
    return [data.train[int(data.train.lengths.argmax())]] * len(samples)


class Compared:
    """Holds what was predicted for an update's memory against what it came to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._num_updates = ranks, 0
        self._high_water: HighWater | None = None

    def begin(self) -> None:
        """Before an update."""
        self._num_updates += 1
        self._high_water = HighWater(self._ranks.device) if self._num_updates == COMPARED else None

    def row(self, predicted_bytes: float | None, console: Console) -> dict[str, float]:
        """After it: both peaks, of the rank that came highest in each; empty but for one update. Collective."""
        if self._num_updates != COMPARED or self._high_water is None or predicted_bytes is None:
            return {}
        peaks = [float(text) for text in self._ranks.gather(repr(self._high_water.bytes() or 0.0))]
        predicted = [float(text) for text in self._ranks.gather(repr(predicted_bytes))]
        if not all(peaks):  # a system that does not tell
            return {}
        peak, expected = max(peaks), max(predicted)
        console.say(f"memory came to {gib_text(peak)}, {peak / expected:.2f} of the {gib_text(expected)} predicted")
        return {"peak_gib": peak / 2**30, "predicted_peak_gib": expected / 2**30}
