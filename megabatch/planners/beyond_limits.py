"""Planners that are more than a limit as a number: measured, in few shapes, with the same bits, or a rule of yours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from megabatch.core.accumulator import Parts
from megabatch.core.call import MicrobatchStep
from megabatch.core.contract import LossFunction, Term
from megabatch.core.extension import Extension
from megabatch.core.gradients import Gradients
from megabatch.core.samples import Batching
from megabatch.core.update import OpenUpdate
from megabatch.core.wrapper import Wrapper
from megabatch.errors import PlanError, require_count
from megabatch.planners.built_in import BuiltIn, Rows, Tokens
from megabatch.planners.filling_planner import FillingPlanner
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel
from megabatch.planning.planner import Planner
from megabatch.planning.settings import check_cost, check_limits

OWN_SPLIT = (
    "a Planner of your own splits whole samples, and InsideSamples, SharedPrefix, a cp axis and a pipeline split them "
    "by rules of their own; leave one of the two out"
)


@dataclass(frozen=True)
class Auto(BuiltIn):
    """Choose the largest limit of tokens that fits in memory, or one that is as fast.

    The first `forward_backward` measures a few microbatches, which leave nothing behind.

    Args:
        memory_bytes: Bytes that this rank may use on its device. None uses 90 % of the free memory.
        fit: The ``fit`` of another accumulator for the same model, which is then not measured again.
    """

    memory_bytes: int | None = None
    fit: TunedLimit | None = None

    @property
    def common_settings(self) -> str:
        return "Auto"

    def __post_init__(self) -> None:
        if self.memory_bytes is not None:
            require_count("memory_bytes", self.memory_bytes)
        if self.fit is not None:
            if not isinstance(cast(object, self.fit), TunedLimit):
                raise PlanError(f"Auto has the fit {self.fit!r:.60}; give the fit of another accumulator")
            # It may come from a file.
            check_limits(None, self.fit.max_microbatch_tokens)
            check_cost(self.fit.cost)

    def extensions(self, parts: Parts) -> list[Extension]:
        from megabatch.autotune.tuner import MicrobatchTuner

        return [MicrobatchTuner(partial(_compute_terms, parts), parts.wrapper, parts.wide, self.memory_bytes)]


def _compute_terms(
    parts: Parts, loss_fn: LossFunction, divisors: Mapping[str, float], step: MicrobatchStep
) -> dict[str, Term]:
    """Return the terms of a loss for a microbatch of a measured update, as the update of a call would."""
    from megabatch.guards.divided_loss import LossRun

    return LossRun(divisors, parts.wrapper, loss_fn, parts.model).terms_of(step)


class _Around(BuiltIn):
    """A planner around a limit."""

    limit: Any  # a field of the classes below

    @property
    def limits(self) -> tuple[int | None, int | None]:
        return self.limit.limits

    @property
    def known_cost(self) -> CostModel | None:
        return self.limit.known_cost

    @property
    def fit(self) -> TunedLimit | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.limit.fit

    @property
    def common_settings(self) -> str:
        return type(self).__name__

    def limited(self, limit: Rows | Tokens) -> BuiltIn:
        return replace(cast(Any, self), limit=limit)


@dataclass(frozen=True)
class Shapes(_Around):
    """Fill each microbatch up to one of at most ``count`` shapes, rows x tokens.

    ``torch.compile`` with ``dynamic=False`` then compiles as many graphs. The first `forward_backward` chooses the
    shapes from the lengths of all ranks, and `state_dict` keeps them. This needs a model of transformers without
    experts and without code of your own, and ``losses.next_token`` or ``losses.classification``. With `OneRow` few
    tokens fill up. Padded rows take many more, and a longer sample in a later call adds a shape.

    Args:
        count: The largest number of shapes.
        limit: The limit of a microbatch: `Rows`, `Tokens` or `Auto`, the default.
    """

    count: int
    limit: Rows | Tokens | Auto = field(default_factory=Auto)

    def __post_init__(self) -> None:
        require_count("Shapes", self.count)
        _check_limit("Shapes", self.limit, (Rows, Tokens, Auto))

    @property
    def common_settings(self) -> str:
        return f"Shapes({self.count}, {type(self.limit).__name__})"

    def extensions(self, parts: Parts) -> list[Extension]:
        from megabatch.autotune.few_shapes import FewShapes

        return [*self.limit.extensions(parts), FewShapes(self.count, parts.wrapper, parts.planner)]


@dataclass(frozen=True)
class SameBits(_Around):
    """Give gradients, norms, losses and metrics the same bits on any number of data ranks.

    This needs shares of ``UpdateSampler(same_bits=True)`` and, with FSDP2,
    ``MixedPrecisionPolicy(reduce_dtype=torch.float64)``. Gradients are added in float64, and a parameter that no sample
    uses has a gradient of zeros.

    Args:
        limit: The limit of a microbatch, as the sampler has it: `Rows` or `Tokens`.
    """

    limit: Rows | Tokens

    def __post_init__(self) -> None:
        _check_limit("SameBits", self.limit, (Rows, Tokens))

    @property
    def new_update(self) -> type[OpenUpdate]:  # pyright: ignore[reportIncompatibleVariableOverride]
        from megabatch.planners.same_bits import SameBitsUpdate

        return SameBitsUpdate

    def new_gradients(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> Gradients:
        from megabatch.wrappers.exact_gradients import ExactGradients

        return ExactGradients(parameters, dtype)

    def check(self, wrapper: Wrapper, batching: Batching, dtype: torch.dtype | None) -> torch.dtype | None:
        from megabatch.planners.same_bits import check_settings

        return check_settings(wrapper, batching, dtype)

    def new_planner(self, usual: Any) -> Any:
        from megabatch.planners.same_bits import SameBitsPlanner

        if usual is not FillingPlanner:
            raise PlanError("SameBits splits whole samples, and InsideSamples cuts them; leave one of the two out")
        return SameBitsPlanner

    def extensions(self, parts: Parts) -> list[Extension]:
        from megabatch.planners.same_bits import OptimizerCheck

        return [*self.limit.extensions(parts), OptimizerCheck(parts.wrapper)]


@dataclass(frozen=True)
class OwnRule(BuiltIn):
    """A `Planner` of the user's."""

    rule: Planner

    def check(self, wrapper: Wrapper, batching: Batching, dtype: torch.dtype | None) -> torch.dtype | None:
        if batching.has_own_plan:
            raise PlanError(OWN_SPLIT)
        return dtype

    def new_planner(self, usual: Any) -> Any:
        from megabatch.planners.rule_planner import RulePlanner

        if usual is not FillingPlanner:
            raise PlanError(OWN_SPLIT)
        return partial(RulePlanner, rule=self.rule)


def _check_limit(name: str, limit: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(limit, kinds):
        expected = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise PlanError(f"{name} has the limit {limit!r:.60}; give {expected} of megabatch.planners")
