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
        self._calls: list[dict[str, float]] = []  # announced weights over all ranks; only some calls may name a term

    @property
    def told(self) -> dict[str, float]:
        """Weights of the whole update that were told before its first call, by term."""
        return {}

    def add_call(self, weights: Mapping[str, float]) -> None:
        """Note the weights of a call over all ranks, by term. Empty without ``weigh``."""
        if not self._calls:  # with several untold terms this is the only call
            self.by_term = _divisors_of(weights)
        self._calls.append(dict(weights))

    def check_terms(self, names: Sequence[str], several: Sequence[str], step: MicrobatchStep) -> None:
        """Raise `LossContractError` unless each differentiable term has a weight of its own.

        Args:
            names: Differentiable terms of a microbatch.
            several: Differentiable terms of the update so far.
            step: The microbatch.
        """
        if not names:
            raise LossContractError(f"no total of the loss carries a gradient; {describe_missing_gradient()}")
        if len(several) > 1 and len(self._calls) > 1:
            raise LossContractError(
                f"an update of several differentiable terms, {several}, is one forward_backward call; for more, tell "
                "the weight of each before the first: open(weights={name: weight})"
            )
        unweighed = [name for name in several if weight_of(step.announced, name) is None]
        if len(several) > 1 and (unweighed or len(step.announced) < len(several)):
            raise LossContractError(
                f"the loss has the differentiable terms {several}, each with a denominator of its own; "
                "give weigh= as a mapping with the weight of each"
            )
        if unweighed and step.announced:
            raise LossContractError(f"weigh names {sorted(step.announced)} but the differentiable term is {names[0]!r}")

    def missing_factor(
        self, terms: Sequence[str], weight_sum: Tensor, weight: float | None
    ) -> float | Tensor | None:  # fmt: skip
        """Return the factor that the gradient lacks: its divisor over the weight. 0.0: no weight. None: no factor.

        Args:
            terms: Differentiable terms of the update.
            weight_sum: The weight of the first that the losses returned, over all ranks.
            weight: Replaces the divisor.
        """
        if len(terms) > 1:  # each total was divided by its own divisor, in the only call
            return None if any(any(announced.values()) for announced in self._calls) else 0.0
        divisor = weight_of(self.by_term, terms[0]) or 1.0
        known = weight
        if known is None and all(self._calls):
            counted = [weight_of(announced, terms[0]) for announced in self._calls]
            known = None if None in counted else sum(number or 0.0 for number in counted)
        if known is None and weight_sum.device.type != "cpu":  # reading it would wait for the device
            return torch.where(weight_sum > 0, divisor / weight_sum, 0.0)
        known = float(weight_sum) if known is None else known
        factor = divisor / known if known else 0.0
        return None if factor == 1.0 else factor


class ToldDivisors(Divisors):
    """Weights of the whole update that were told before its first call, by term: nothing is left to correct."""

    def __init__(self, told: Mapping[str, float]) -> None:
        super().__init__()
        self._told, self.by_term = dict(told), _divisors_of(told)

    @property
    def told(self) -> dict[str, float]:
        return self._told

    def add_call(self, weights: Mapping[str, float]) -> None:
        """Keep the divisors that were told."""

    def check_terms(self, names: Sequence[str], several: Sequence[str], step: MicrobatchStep) -> None:
        if not names:
            raise LossContractError(f"no total of the loss carries a gradient; {describe_missing_gradient()}")
        untold = [name for name in several if weight_of(self._told, name) is None]
        if untold or len(self._told) < len(several):
            raise LossContractError(
                f"open() was told the weights of {sorted(self._told)} and the differentiable terms are {several}; tell "
                "open(weights=) one for each, by its name"
            )
        unweighed = [name for name in names if weight_of(step.announced, name) is None]
        if step.announced and (unweighed or len(step.announced) < len(names)):
            raise LossContractError(f"weigh names {sorted(step.announced)} but the differentiable terms are {names}")

    def missing_factor(
        self, terms: Sequence[str], weight_sum: Tensor, weight: float | None
    ) -> float | Tensor | None:  # fmt: skip
        return None if any(self._told.values()) else 0.0


def weight_of(weights: Mapping[str, float], name: str) -> float | None:
    """Return the weight of a term. A weight without a name belongs to the only differentiable term."""
    return weights.get(name, weights.get(PAIR_NAME) if len(weights) == 1 else None)


def _divisors_of(weights: Mapping[str, float]) -> dict[str, float]:
    no_weight = 1.0 if len(weights) < 2 else math.inf  # a term without weight has no gradient
    return {name: weight or no_weight for name, weight in weights.items()}
