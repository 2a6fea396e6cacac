"""Dealing by measurements: what microbatches cost and how fast each rank is, settled on by all ranks of a run.

Every rank has the same seconds of all ranks (`RankTiming`), so that speeds need no further message. The samples of an
update stay the same, and so does its gradient up to rounding.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from megabatch import CostModel, MegabatchError
from megabatch.train.autotune.microbatch_limit import relative_cost
from megabatch.train.context import Callback, RunContext
from megabatch.train.data.updates import Dealing

# Ranks settle after this many measured updates, then after twice as many, and so on.
FIRST = 4
# Number of newest updates that count.
WINDOW = 32
# The share of an update's seconds for which it is worth to deal otherwise.
LEAST_GAIN = 0.05
# The gain that a run reports, and the measured updates that show it.
SAID_GAIN, SAID_AFTER = 0.1, 8
# Below this factor between speeds, updates stay dealt as they are.
LEAST_CHANGE = 1.1
# Speeds are multiples of 1 / 64, since smaller differences are noise.
FINENESS = 64


class RankSpeeds(NamedTuple):
    """Measured speeds of the data ranks, and what dealing by them saves."""

    speeds: tuple[float, ...]  # relative to the fastest
    seconds: float  # of the slowest rank in an update, as it is dealt now
    balanced_seconds: float  # if all ranks finish together

    @property
    def gain(self) -> float:
        """Fraction of the seconds that dealing by the speeds saves."""
        return 1 - self.balanced_seconds / self.seconds

    @property
    def names(self) -> str:
        slowest = min(range(len(self.speeds)), key=self.speeds.__getitem__)
        return f"rank {slowest} has {self.speeds[slowest]:.2f} times the speed of the fastest"


class SpeedMeter:
    """Estimates speeds from the seconds that ranks took, and those that their samples explain."""

    def __init__(self) -> None:
        self._updates: deque[tuple[Sequence[float], Sequence[float]]] = deque(maxlen=WINDOW)

    def add(self, measured: Sequence[float], predicted: Sequence[float]) -> None:
        """Take in an update. One in which a rank had no samples says nothing of that rank."""
        if all(measured) and all(predicted):
            self._updates.append((measured, predicted))

    def speeds(self) -> RankSpeeds | None:
        """Return the speeds: medians over the updates. None before the first update."""
        if not self._updates:
            return None
        num_ranks = len(self._updates[0][0])
        rates = [median(predicted[rank] / measured[rank] for measured, predicted in self._updates)
                 for rank in range(num_ranks)]  # fmt: skip
        fastest = max(rates)
        speeds = tuple(max(1, round(FINENESS * rate / fastest)) / FINENESS for rate in rates)
        # From the rates, since dealing by them does not end what varies from update to update.
        slowest = median(
            max(seconds / rate for seconds, rate in zip(predicted, rates, strict=True))
            for _, predicted in self._updates
        )
        balanced = median(sum(predicted) for _, predicted in self._updates) / sum(rates)
        return RankSpeeds(speeds, slowest, balanced)


class MeasuredDealing(Callback):
    """Settle on a cost (``update.cost``) and on speeds (``update.balance``), by which updates are dealt. Collective.

    With ``update.balance = "off"`` it says once what dealing by speeds would gain, where that is worth it.

    Raises `MegabatchError` for speeds that nothing measures.
    """

    def __init__(self, context: RunContext, *, has_seconds: bool) -> None:
        update = context.config.update
        self._uses_speeds, self._measures_cost = update.balance == "measured", update.cost == "measure"
        if self._uses_speeds and not has_seconds:
            raise MegabatchError(
                'update.balance is "measured", and the time of each rank is measured under DistributedDataParallel '
                'with a loss of single samples only; set parallel.wrapper = "ddp", or leave update.balance out'
            )
        self._updates, self._ranks = context.updates, context.ranks
        self._meter, self._num_updates, self._has_said = SpeedMeter(), 0, False
        if self._uses_speeds or self._measures_cost:
            context.positions["dealing"] = self

    def state_dict(self) -> dict[str, Any]:
        """Return what updates are dealt by, as JSON."""
        cost, speeds = self._updates.dealing.cost, self._updates.dealing.speeds
        return {"speeds": speeds, "cost": None if cost is None else list(numbers_of(cost))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Deal as before. Speeds of another number of ranks are measured again."""
        dealing, speeds, cost = self._updates.dealing, state["speeds"], state["cost"]
        if self._measures_cost and cost is not None:
            dealing = replace(dealing, cost=CostModel(*cost))
        if self._uses_speeds and speeds is not None and len(speeds) == self._ranks.dp_degree:
            dealing = replace(dealing, speeds=tuple(speeds))
        self._updates.deal_by(dealing)

    def after_update(self, context: RunContext) -> None:
        """Take in the seconds of an update. After some updates, settle."""
        self._num_updates += 1
        # The first update allocates memory.
        if context.rank_seconds is not None and self._num_updates > 1:
            self._meter.add(*context.rank_seconds)
        count = self._num_updates - 1
        if count < FIRST or count & (count - 1):
            return
        dealing = self._settle_speeds(context, self._updates.dealing)
        if self._measures_cost:
            cost = context.learner.gradient.cost
            longest = max(context.plan.lengths, default=1)
            costs = context.ranks.gather(None if cost is None else numbers_of(relative_cost(cost, longest)))
            first_cost = next((cost for cost in costs if cost is not None), None)
            dealing = dealing if first_cost is None else replace(dealing, cost=CostModel(*first_cost))
        self._updates.deal_by(dealing)

    def _settle_speeds(self, context: RunContext, dealing: Dealing) -> Dealing:
        reading = self._meter.speeds()
        if reading is None or reading.gain < LEAST_GAIN:
            return dealing
        seconds = f"{reading.balanced_seconds:.2g} s instead of {reading.seconds:.2g} s ({reading.gain:.0%} less)"
        if self._uses_speeds:
            self._meter = SpeedMeter()
            if not differ(reading.speeds, dealing.speeds or (1.0,) * len(reading.speeds)):
                return dealing
            context.console.say(
                f"updates are dealt by measured speeds from {context.step + 1} on: {reading.names}; forward and "
                f"backward should take {seconds}"
            )
            return replace(dealing, speeds=reading.speeds)
        is_known = reading.gain >= SAID_GAIN and self._num_updates > SAID_AFTER
        can_use_speeds = not (context.config.update.same_bits or context.config.update.one_row)
        if is_known and not self._has_said and can_use_speeds:
            self._has_said = True
            context.console.say(
                f'ranks differ in speed: {reading.names}; with update.balance = "measured", forward and backward of an '
                f"update would take {seconds}"
            )
        return dealing


def differ(speeds: Sequence[float], former: Sequence[float]) -> bool:
    """Return True if the speed of a rank has changed by more than noise."""
    return any(max(speed / old, old / speed) > LEAST_CHANGE for speed, old in zip(speeds, former, strict=True))


def numbers_of(cost: CostModel) -> tuple[float, float, float]:
    """Return the numbers that split and deal samples."""
    return cost.seconds_per_microbatch, cost.seconds_per_token, cost.seconds_per_pair
