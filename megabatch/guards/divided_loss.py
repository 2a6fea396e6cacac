"""A loss that takes the divisor: it runs its own backward, chunk by chunk, and divides its totals itself."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from megabatch.core.call import MicrobatchStep
from megabatch.core.contract import LossFunction, Term, differentiable, takes_divisor, terms_of
from megabatch.core.divisors import weight_of
from megabatch.core.gradients import drop_gradients
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError
from megabatch.inspection import random_state
from megabatch.inspection.tree import clone


class LossRun:
    """Runs a loss on the microbatches of an open update.

    Args:
        divisors: The divisor of each term that has one already.
        wrapper: The model's wrapper.
        loss_fn: The loss.
        model: What the loss gets.
    """

    def __init__(self, divisors: Mapping[str, float], wrapper: Wrapper, loss_fn: LossFunction, model: Any) -> None:
        self._divisors, self._wrapper, self._loss_fn, self._model = divisors, wrapper, loss_fn, model

    def terms_of(self, step: MicrobatchStep) -> dict[str, Term]:
        """Return the terms of the loss for a microbatch, undivided. Raises `LossContractError`."""
        if not takes_divisor(self._loss_fn):
            return terms_of(self._loss_fn(self._model, step.microbatch))
        if not self._divisors:
            raise LossContractError(
                "the loss takes the divisor, which has to be known before its first microbatch; say how it is counted "
                "with @megabatch.loss(weigh=...)"
            )
        scale = math.inf if step.is_dummy else 1 / self._wrapper.loss_factor
        divided = self._divided(step, scale)
        named = self._weighed_of(divided)
        has_run_backward = not any(term.total.requires_grad for term in divided.values())
        for name in named:
            total, weight = divided[name]
            if has_run_backward:
                total = total.detach().requires_grad_()
            factor = scale * (weight_of(self._divisors, name) or 1.0)
            divided[name] = Term(total * factor if math.isfinite(factor) else total, weight)
        return divided

    def check_divided(self, step: MicrobatchStep) -> None:
        """Raise `LossContractError` for a loss that takes the divisor and does not divide its total by it.

        The loss runs twice, in evaluation mode and without gradients. A loss that runs its own backward cannot do that.
        On a plain model it runs once, with an infinite divisor, which adds nothing to a gradient.
        """
        if not takes_divisor(self._loss_fn) or not self._divisors:
            return
        try:
            with torch.no_grad():
                one, half = self._tried(step, 1.0), self._tried(step, 2.0)
            wrong = {name: one[name] for name in one if abs(one[name] - 2 * half[name]) > 0.01 * abs(one[name])}
        except Exception:
            # A backward in the loss may raise anything.
            if self._wrapper.kind_name != Wrapper.kind_name:
                return
            fresh = [parameter for parameter in self._wrapper.parameters if parameter.grad is None]
            with torch.enable_grad():
                wrong = {name: total for name, total in self._tried(step, math.inf).items() if total}
            drop_gradients(fresh)
        for name, total in wrong.items():
            raise LossContractError(
                f"the loss takes the divisor and its total {name!r} does not shrink with it ({total:.6g}); return "
                "(total / divisor, weight), and divide what it differentiates"
            )

    def _tried(self, step: MicrobatchStep, scale: float) -> dict[str, float]:
        """Return the divided totals for a multiple of the divisor. Restore everything except gradients."""
        modes = {module: module.training for model in self._wrapper.models for module in model.modules()}
        counting, self._wrapper.is_counting = self._wrapper.is_counting, False
        try:
            for module in modes:
                module.training = False
            with random_state.replay(random_state.note(self._wrapper.device)):
                terms = self._divided(replace(step, microbatch=clone(step.microbatch)), scale)
        finally:
            self._wrapper.is_counting = counting
            for module, mode in modes.items():
                module.training = mode
        return {name: float(terms[name].total.detach()) for name in self._weighed_of(terms)}

    def _divided(self, step: MicrobatchStep, scale: float) -> dict[str, Term]:
        """Call the loss with a multiple of the divisor. Return its terms."""
        scaled = {name: divisor * scale for name, divisor in self._divisors.items()}
        divisor = scaled if len(scaled) > 1 else next(iter(scaled.values()))
        return terms_of(cast(Any, self._loss_fn)(self._model, step.microbatch, divisor=divisor))

    def _weighed_of(self, terms: Mapping[str, Term]) -> list[str]:
        """Return the names of the terms that are divided. The others are metrics."""
        carrying = differentiable(terms)
        return carrying or [name for name in terms if name in self._divisors or len(terms) == 1]
