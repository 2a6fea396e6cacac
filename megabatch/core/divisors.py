"""The divisor of each term while an update is open, and the factor that its gradient lacks in the end."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megabatch.core.call import MicrobatchStep
from megabatch.core.contract import PAIR_NAME, describe_missing_gradient
from megabatch.errors import LossContractError


class Divisors:
    """Divisors by term: the weights that the first call announces. A factor corrects them when the update closes."""

    def __init__(self) -> None:
        self.by_term: dict[str, float] = {}
        # The announced weights over all ranks. Only some calls may name a term.
        self._calls: list[dict[str, float]] = []

    @property
    def announced(self) -> dict[str, float]:
        """Weights of the whole update that were told before its first call, by term."""
        return {}

    def add_call(self, weights: Mapping[str, float]) -> None:
        """Note the weights of a call over all ranks, by term. Empty without ``weigh``."""
        # Of one term, the first call's weight stays. Several terms have one call, unless `open` was told their weights.
        if not self._calls:
            self.by_term = _divisors_of(weights)
        self._calls.append(dict(weights))

    def check_terms(self, names: Sequence[str], several: Sequence[str], step: MicrobatchStep) -> None:
        """Raise `LossContractError` unless each differentiable term has a weight of its own.

        Args:
            names: Differentiable terms of a microbatch.
            several: Differentiable terms of the update so far.
            step: The microbatch.
        """
        _check_gradient(names)
        if len(several) > 1:
            self._check_several(several, step)
        elif step.announced and not _has_weights(step.announced, several):
            raise LossContractError(f"weigh names {sorted(step.announced)} but the differentiable term is {names[0]!r}")

    def _check_several(self, several: Sequence[str], step: MicrobatchStep) -> None:
        if len(self._calls) > 1:
            raise LossContractError(
                f"an update of several differentiable terms, {several}, is one forward_backward call; for more, tell "
                "the weight of each before the first: open(weights={name: weight})"
            )
        if not _has_weights(step.announced, several):
            raise LossContractError(
                f"the loss has the differentiable terms {several}, each with a denominator of its own; "
                "give weigh= as a mapping with the weight of each"
            )

    def divisor_of(self, name: str) -> float:
        """Return the divisor of a term, 1 if it has no weight yet."""
        return weight_of(self.by_term, name) or 1.0

    def missing_factor(
        self, terms: Sequence[str], weight_sum: Tensor, weight: float | None
    ) -> float | Tensor | None:  # fmt: skip
        """Return the factor that the gradient lacks: its divisor over the weight. 0.0: no weight. None: no factor.

        Args:
            terms: Differentiable terms of the update.
            weight_sum: The weight of the first that the losses returned, over all ranks.
            weight: Replaces the divisor.
        """
        # With several terms each total was divided by its own divisor, in the only call.
        if len(terms) > 1:
            return None if any(map(_has_weight, self._calls)) else 0.0
        divisor = self.divisor_of(terms[0])
        known = self._announced_weight(terms[0]) if weight is None else weight
        if known is None:
            # Reading a sum on a device would wait for the device.
            if weight_sum.device.type != "cpu":
                return torch.where(weight_sum > 0, divisor / weight_sum, 0.0)
            known = float(weight_sum)
        factor = divisor / known if known else 0.0
        return None if factor == 1.0 else factor

    def _announced_weight(self, name: str) -> float | None:
        """Return the sum of a term's weights over the calls. None unless every call announced one."""
        weights = [weight_of(announced, name) for announced in self._calls]
        return None if None in weights else sum(filter(None, weights))


class AnnouncedDivisors(Divisors):
    """Weights of the whole update that were told before its first call, by term: nothing is left to correct."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        super().__init__()
        self._weights = dict(weights)
        self.by_term = _divisors_of(weights)

    @property
    def announced(self) -> dict[str, float]:
        return self._weights

    def add_call(self, weights: Mapping[str, float]) -> None:
        """Keep the divisors that were told."""

    def check_terms(self, names: Sequence[str], several: Sequence[str], step: MicrobatchStep) -> None:
        _check_gradient(names)
        if not _has_weights(self._weights, several):
            raise LossContractError(
                f"open() was told the weights of {sorted(self._weights)} and the differentiable terms are {several}; "
                "tell open(weights=) one for each, by its name"
            )
        if step.announced and not _has_weights(step.announced, names):
            raise LossContractError(f"weigh names {sorted(step.announced)} but the differentiable terms are {names}")

    def missing_factor(
        self, terms: Sequence[str], weight_sum: Tensor, weight: float | None
    ) -> float | Tensor | None:  # fmt: skip
        return None if _has_weight(self._weights) else 0.0


def weight_of(weights: Mapping[str, float], name: str) -> float | None:
    """Return the weight of a term. A weight without a name belongs to the only differentiable term."""
    unnamed = weights.get(PAIR_NAME) if len(weights) == 1 else None
    return weights.get(name, unnamed)


def _check_gradient(names: Sequence[str]) -> None:
    if not names:
        raise LossContractError(f"no total of the loss carries a gradient; {describe_missing_gradient()}")


def _has_weights(weights: Mapping[str, float], names: Sequence[str]) -> bool:
    """Return True if each term has a weight, and no two share one."""
    return len(weights) >= len(names) and None not in [weight_of(weights, name) for name in names]


def _has_weight(weights: Mapping[str, float]) -> bool:
    return any(weights.values())


def _divisors_of(weights: Mapping[str, float]) -> dict[str, float]:
    # Of several terms, one without weight has no gradient.
    no_weight = 1.0 if len(weights) < 2 else math.inf
    return {name: weight or no_weight for name, weight in weights.items()}
