"""Noise: how far the gradients of samples agree, from the norms of a part of an update and of all of it. Pure.

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

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

KEPT = 0.9  # of a running sum, from one measurement to the next: the last ten or so count
RECENT = 0.5  # of all measurements, the last ones, by which a run is judged at its end
SURE = 2.0  # standard errors


class Sum(NamedTuple):
    """Some samples of an update: their weight, and the squared norm of their gradient over it."""

    square: float
    weight: float


class Measured(NamedTuple):
    """One update's estimates. Each is right on average alone, and may be negative."""

    noise: float  # tr(Sigma), the variance of one sample's gradient, summed over parameters
    signal: float  # |G|^2


def measured(part: Sum, whole: Sum, num_samples: int) -> Measured | None:
    """The estimates of one update of so many samples; None where the part is nothing or all of it, or not finite."""
    if not 0 < part.weight < whole.weight or not all(map(math.isfinite, (*part, *whole))):
        return None
    signal = (whole.weight * whole.square - part.weight * part.square) / (whole.weight - part.weight)
    noise = (part.square - whole.square) / (1 / part.weight - 1 / whole.weight)
    return Measured(noise * num_samples / whole.weight, signal)


@dataclass
class Scale:
    """The noise scale of a run, over its measurements: a quotient of sums, since a mean of quotients is none."""

    measurements: list[Measured] = field(default_factory=list[Measured])
    _noise: float = 0.0
    _signal: float = 0.0

    def add(self, each: Measured) -> None:
        """Take in another measurement; what was before counts less and less."""
        self.measurements.append(each)
        self._noise = KEPT * self._noise + each.noise
        self._signal = KEPT * self._signal + each.signal

    @property
    def samples(self) -> float | None:
        """The noise scale of now; None where the measurements do not tell it."""
        return self._noise / self._signal if self._signal > 0 and self._noise > 0 else None

    def recent(self) -> list[Measured]:
        """The later ones of all measurements."""
        return self.measurements[-max(1, round(RECENT * len(self.measurements))) :]


class Estimate(NamedTuple):
    """What measurements say together."""

    samples: float | None  # the noise scale; None where |G|^2 is not told from nothing
    error: float  # its standard error
    at_least: float  # what it exceeds, nearly surely


def estimate(measurements: Sequence[Measured]) -> Estimate | None:
    """The noise scale by a quotient of means, its standard error by linearisation; None where there are too few."""
    if len(measurements) < 4:
        return None
    noise, signal = (statistics.fmean(values) for values in zip(*measurements, strict=True))
    signal_error = error_of([each.signal for each in measurements])
    if noise <= 0:
        return None
    at_least = noise / (max(signal, 0.0) + SURE * signal_error)
    if signal <= SURE * signal_error:
        return Estimate(None, math.inf, at_least)
    scale = noise / signal
    return Estimate(scale, error_of([each.noise - scale * each.signal for each in measurements]) / signal, at_least)


def error_of(values: Sequence[float]) -> float:
    """The standard error of the mean of the values."""
    return statistics.stdev(values) / math.sqrt(len(values))


def words_of(measurements: Sequence[Measured], size: int) -> list[str]:
    """What the measurements say of updates of ``size`` samples, in two lines; none where there are too few."""
    found = estimate(measurements)
    if found is None:
        return []
    source = f"the last {len(measurements)} measurements of their noise (docs/batch-size.md)"
    if found.samples is None:
        return [
            f"gradients agree up to more than {rounded(found.at_least)} samples an update, by {source}",
            f"updates of {size} were nearly all noise: how many more samples would serve cannot be told from them",
        ]
    scale = found.samples
    return [
        f"gradients agree up to some {rounded(scale)} samples an update, give or take {rounded(found.error)}, by "
        f"{source}",
        f"updates had {size}: {advice(size / scale)}",
    ]


def advice(share: float) -> str:
    """What it means that an update has that share of the noise scale's samples."""
    if share < 0.5:
        return "with twice as many each step goes almost twice as far, if the learning rate follows"
    if share <= 2:
        return "about where more samples an update begin to cost more than they bring"
    return "with half as many each step goes almost as far"


def rounded(number: float) -> str:
    """With two digits, as many as such an estimate has."""
    digits = 1 - math.floor(math.log10(number)) if number > 0 else 0
    return f"{round(number, digits):,.{max(0, min(digits, 3))}f}"
