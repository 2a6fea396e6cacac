"""The noise of the gradient, measured as the run goes, for whoever chooses the size of its updates.

Every ``advice.every`` updates, one is made in two calls, of two halves of its samples that a coin has drawn. The norm
of the gradient between them and that of the whole tell the noise. The step uses the update's exact gradient.

McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1, for weighted sums. An update's
gradient is sum(g_i) / sum(w_i): of each sample the gradient of its total and its weight, its target tokens say. With G
the gradient of endless data, g_i = w_i G + r_i, and the part S of an update has the gradient G + sum(r_i) / W_S, W_S
the sum of its weights. Assumed is that residuals are of mean zero whatever the weights, and that the square of their
sum grows as its weight: E|sum r_i|^2 = s W_S. Then

    E|gradient of S|^2 = |G|^2 + s / W_S

for every part S that is drawn without regard to its samples. Two of them, the whole update W and a part w of it, give
both unknowns, without bias:

    |G|^2 = (W |whole|^2 - w |part|^2) / (W - w)          s = (|part|^2 - |whole|^2) / (1 / w - 1 / W)

The noise of a sample is s over the mean weight of one, and the noise scale is that over |G|^2: the samples at which an
update's gradient is as much noise as signal. Where noise does not grow as the weight but by the sample, halves drawn by
chance leave an error of the order of one over the number of samples. A microbatch is no such part: it is cut by length.
"""

import hashlib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor

from megabatch import MegabatchError, Plan
from megabatch.losses import loss_hooks
from megabatch.train.context import Callback, ForwardBackward, RunContext, check_whole
from megabatch.train.data.updates import part_of
from megabatch.train.model.optimizer import LARGEST_NORM
from megabatch.train.runtime.files import METRICS, read_rows

# Keys of an update's row.
NOISE, SIGNAL, SCALE = "gradient_noise", "gradient_signal", "noise_scale_samples"
# A running sum remembers the last ten measurements or so.
KEPT = 0.9
# Share of the last measurements by which a run is judged at its end.
RECENT = 0.5
# In standard errors.
SURE = 2.0


class Sum(NamedTuple):
    """Some samples of an update: their weight, and the squared norm of their gradient over it."""

    square: float
    weight: float


class Measured(NamedTuple):
    """One update's estimates. Each is right on average alone, and may be negative."""

    noise: float  # tr(Sigma), the variance of one sample's gradient, summed over parameters
    signal: float  # |G|^2


@dataclass
class Calls:
    """This rank's samples of every call of an update, and the microbatches of the calls made."""

    parts: list[list[int]]  # samples of each call, by their places in the update
    num_made: int = 0
    ran: list[list[int]] = field(default_factory=list[list[int]])  # microbatches
    num_split: int = 0  # of them, that did not fit in memory

    def left(self, batch: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield the number and the samples of each call that is still to be made."""
        for number in range(self.num_made, len(self.parts)):
            yield number, part_of(batch, self.parts[number])

    def note(self, plan: Plan) -> None:
        """Take in how the call that was just made was cut."""
        places = self.parts[self.num_made]
        self.ran += [[places[row] for row in rows] for rows in plan.microbatches]
        self.num_split += plan.num_split
        self.num_made += 1


class NoiseScale(Callback):
    """Make some updates in two halves and measure the noise of their gradients. Collective."""

    splits_updates = True

    def __init__(self, context: RunContext) -> None:
        learner = context.learner
        self._every, self._seed = context.config.advice.every or 1, context.config.run.seed
        self._max_norm = learner.max_norm
        self._parameters = [parameter for parameter in learner.model.parameters() if parameter.requires_grad]
        # Sum of the open update.
        self._part: Sum | None = None
        self._scale = Scale()
        # Samples of the last measured update.
        self._size = 0
        # True once the loss is known to have one term.
        self._has_one_term = False

    def start(self, context: RunContext) -> None:
        """Go on after the rows of the run."""
        rows = read_rows(context.folder / METRICS) if context.ranks.is_main else []
        measurements = [[row[NOISE], row[SIGNAL]] for row in rows if NOISE in row]
        self._scale, self._size = Scale(), context.updates.size
        for noise, signal in context.ranks.broadcast(measurements):
            self._scale.add(Measured(noise, signal))

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Make the update in one call, or in two halves if it is measured."""
        check_whole(context)
        learner = context.learner
        self._part, learner.max_norm = None, self._max_norm
        if (learner.step + 1) % self._every:
            forward_backward(batch)
            self._check_terms(context)
            return
        learner.max_norm = self._max_norm or LARGEST_NORM
        with context.model.losses():
            learner.gradient.tune(batch, context.loss_fn)
        plan = learner.gradient.plan(batch)
        calls = Calls(halves(context.updates.ids, self._seed, learner.step + 1))
        for number, part in calls.left(batch):
            forward_backward(part)
            calls.note(context.plan)
            if number == 0:
                self._check_terms(context)
                self._part = self._open_sum(context)
        context.plan = replace(plan, microbatches=tuple(map(tuple, calls.ran)), num_split=calls.num_split)

    def after_update(self, context: RunContext) -> None:
        """Add what was measured to the row."""
        part, self._part = self._part, None
        values, update = context.values, context.update
        if part is None or update is None or not values["finite"]:
            return
        total = Sum(values["grad_norm"] ** 2, values["weight"])
        measured = measure_noise(part, total, update.num_samples)
        if measured is None:
            return
        self._scale.add(measured)
        self._size = context.expected_samples
        context.row |= {NOISE: measured.noise, SIGNAL: measured.signal}
        if self._scale.samples is not None:
            context.row[SCALE] = self._scale.samples

    def end(self, context: RunContext) -> None:
        """Say what the measurements come to."""
        context.summary += words_of(self._scale.recent(), self._size)

    def _open_sum(self, context: RunContext) -> Sum:
        """Return what is accumulated now, over all ranks."""
        opened = context.learner.gradient.open_update
        sums = {} if opened is None else opened.sums
        (weight,) = context.ranks.sum_of_data([float(sums[name].weight) for name in self._names(context)[:1]] or [0.0])
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        # Such a loss is divided before the backward, by the weight of the call.
        divided = loss_hooks(context.loss_fn).weigh is not None
        return Sum((norm if divided else norm / weight) ** 2 if weight else 0.0, weight)

    def _check_terms(self, context: RunContext) -> None:
        """Raise where a gradient is of several sums with a weight each, which is not one sum over one weight."""
        if self._has_one_term:
            return
        names = self._names(context)
        self._has_one_term = len(names) == 1
        if len(names) > 1:
            raise MegabatchError(
                f"advice.every is set and the loss has the terms {', '.join(names)}, each with a weight of its own, of "
                "which the gradient has no one noise scale; leave advice.every out"
            )

    def _names(self, context: RunContext) -> list[str]:
        """Return the terms that have carried a gradient."""
        opened = context.learner.gradient.open_update
        return [] if opened is None else opened.differentiable


def halves(ids: Sequence[int | str], seed: int, step: int) -> list[list[int]]:
    """Return the places of this rank's samples in the first half and in the second: a coin of each sample decides.

    It falls the same on any number of ranks. Samples are drawn whatever they are, and by themselves: halves of one size
    on each rank would be drawn from what was dealt by length.
    """
    coins = [hashlib.sha256(f"{seed} {step} {name}".encode("utf-8", "surrogateescape")).digest()[0] & 1 for name in ids]
    return [[place for place, coin in enumerate(coins) if coin == half] for half in (0, 1)]


def measure_noise(part: Sum, total: Sum, num_samples: int) -> Measured | None:
    """Return the estimates of one update, or None if the part is nothing or all of it, or not finite."""
    if not 0 < part.weight < total.weight or not all(map(math.isfinite, (*part, *total))):
        return None
    signal = (total.weight * total.square - part.weight * part.square) / (total.weight - part.weight)
    noise = (part.square - total.square) / (1 / part.weight - 1 / total.weight)
    return Measured(noise * num_samples / total.weight, signal)


@dataclass
class Scale:
    """The noise scale of a run, over its measurements: a quotient of sums, since a mean of quotients is none."""

    measurements: list[Measured] = field(default_factory=list[Measured])
    _noise: float = 0.0
    _signal: float = 0.0

    def add(self, measured: Measured) -> None:
        """Take in another measurement; what was before counts less and less."""
        self.measurements.append(measured)
        self._noise = KEPT * self._noise + measured.noise
        self._signal = KEPT * self._signal + measured.signal

    @property
    def samples(self) -> float | None:
        """The noise scale of now, or None if the measurements do not tell it."""
        return self._noise / self._signal if self._signal > 0 and self._noise > 0 else None

    def recent(self) -> list[Measured]:
        return self.measurements[-max(1, round(RECENT * len(self.measurements))) :]


class NoiseEstimate(NamedTuple):
    """The noise scale of several measurements."""

    samples: float | None  # the noise scale; None where |G|^2 is not told from nothing
    error: float  # its standard error
    at_least: float  # what it exceeds, nearly surely


def estimate(measurements: Sequence[Measured]) -> NoiseEstimate | None:
    """Return the noise scale as a quotient of means, its standard error by linearisation; None for too few."""
    if len(measurements) < 4:
        return None
    noise, signal = (statistics.fmean(values) for values in zip(*measurements, strict=True))
    signal_error = error_of([measurement.signal for measurement in measurements])
    if noise <= 0:
        return None
    at_least = noise / (max(signal, 0.0) + SURE * signal_error)
    if signal <= SURE * signal_error:
        return NoiseEstimate(None, math.inf, at_least)
    scale = noise / signal
    residuals = [measurement.noise - scale * measurement.signal for measurement in measurements]
    return NoiseEstimate(scale, error_of(residuals) / signal, at_least)


def error_of(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def words_of(measurements: Sequence[Measured], size: int) -> list[str]:
    """Return two lines about updates of ``size`` samples, or none for too few measurements."""
    result = estimate(measurements)
    if result is None:
        return []
    source = f"the last {len(measurements)} measurements of their noise (docs/batch-size.md)"
    if result.samples is None:
        return [
            f"gradients agree up to more than {rounded(result.at_least)} samples an update, by {source}",
            f"updates of {size} were nearly all noise: how many more samples would serve cannot be told from them",
        ]
    scale = result.samples
    return [
        f"gradients agree up to some {rounded(scale)} samples an update, give or take {rounded(result.error)}, by "
        f"{source}",
        f"updates had {size}: {advice(size / scale)}",
    ]


def advice(share: float) -> str:
    if share < 0.5:
        return "with twice as many each step goes almost twice as far, if the learning rate follows"
    if share <= 2:
        return "about where more samples an update begin to cost more than they bring"
    return "with half as many each step goes almost as far"


def rounded(number: float) -> str:
    """Format with two digits: such an estimate has no more."""
    digits = 1 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, digits):,.{max(0, min(digits, 3))}f}"
