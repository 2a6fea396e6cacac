"""Planners to choose from. An accumulator reads its own once, when it is made: no call asks which one it is."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from megabatch.batching.samples import Batching
from megabatch.engine.call import MicrobatchPlanner
from megabatch.engine.extension import Extension
from megabatch.engine.update import OpenUpdate
from megabatch.errors import PlanError, require_count
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel, check_cost, check_limits
from megabatch.planning.planner import Planner
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.gradients import WideGradients

MOVED = {  # argument of earlier versions → what to give instead
    "memory_bytes": "planner=Auto(memory_bytes=2 * 2**30), and no limit beside it",
    "cost": "planner=Tokens(8192, cost=...) or Rows(4, cost=...), in place of the limit too",
    "padding": "batching=Padded({key: value})",
    "fills": "batching=Padded({key: value})",
    "one_row": "batching=OneRow()",
    "long_samples": "batching=InsideSamples()",
    "inside_samples": "batching=InsideSamples()",
    "same_bits": "planner=SameBits(Tokens(8192)), in place of the limit too",
    "shapes": "planner=Shapes(4, Tokens(8192)), in place of the limit too",
}
OWN_SPLIT = (
    "a Planner of your own splits whole samples, and InsideSamples, SharedPrefix, a cp axis and a pipeline split them "
    "by rules of their own; leave one of the two out"
)


class Parts(NamedTuple):
    """The parts of an accumulator for which a planner may have extensions."""

    model: Any
    wrapper: Wrapper
    wide: WideGradients
    planner: MicrobatchPlanner


class BuiltIn:
    """A planner as an argument: `Rows`, `Tokens`, `Auto`, `Shapes`, `SameBits`, or a rule of the user's."""

    fit: TunedLimit | None = None
    new_update: type[OpenUpdate] = OpenUpdate
    new_gradients: type[WideGradients] = WideGradients

    @property
    def limits(self) -> tuple[int | None, int | None]:
        """Samples and tokens of a microbatch, each None where it is no limit; both None to measure one."""
        return None, None

    @property
    def known_cost(self) -> CostModel | None:
        """The cost that the user gave."""
        return None

    @property
    def common_settings(self) -> str:
        """The settings that all ranks share, in words."""
        return "a limit of its own"

    def limited(self, limit: "Rows | Tokens") -> "BuiltIn":
        """Return a planner of the same kind with another limit."""
        return limit

    def check(self, wrapper: Wrapper, batching: Batching, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype in which gradients are added. Raises `PlanError` for what the planner does not go with."""
        return dtype

    def new_planner(self, usual: Any) -> Any:
        """Return what makes the planner of calls, in place of the ``usual`` one."""
        return usual

    def extensions(self, parts: Parts) -> list[Extension]:
        """Return what the planner attaches to the accumulator."""
        return []


class _Limit(BuiltIn):
    """A limit as a number, with a cost."""

    cost: CostModel | str | None  # a field of the classes below

    def __post_init__(self) -> None:
        if self.cost != "measure":
            check_cost(self.cost, ' or "measure"')

    @property
    def known_cost(self) -> CostModel | None:
        return self.cost if isinstance(self.cost, CostModel) else None

    def extensions(self, parts: Parts) -> list[Extension]:
        if self.cost != "measure":
            return []
        from megabatch.autotune.cost_meter import CostMeter

        return [CostMeter(parts.wrapper, parts.planner)]


@dataclass(frozen=True)
class Rows(_Limit):
    """At most ``samples`` samples in a microbatch: ``micro_batch_size``, and a cost.

    Args:
        samples: Samples per forward.
        cost: Seconds and bytes of a microbatch, used to split samples and to predict the cost of a plan. None uses
            relative defaults. "measure" times the microbatches of your updates and splits by that: the gradient is the
            same, but its last bits follow the clock.
    """

    samples: int
    cost: CostModel | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("micro_batch_size", self.samples)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        return self.samples, None


@dataclass(frozen=True)
class Tokens(_Limit):
    """At most ``tokens`` padded tokens in a microbatch: ``max_microbatch_tokens``, and a cost.

    Args:
        tokens: Padded tokens per forward, a hard limit.
        cost: As for `Rows`.
    """

    tokens: int
    cost: CostModel | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("max_microbatch_tokens", self.tokens)

    @property
    def limits(self) -> tuple[int | None, int | None]:
        return None, self.tokens


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

        return [MicrobatchTuner(parts.model, parts.wrapper, parts.wide, self.memory_bytes)]


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

    @property
    def new_gradients(self) -> type[WideGradients]:  # pyright: ignore[reportIncompatibleVariableOverride]
        from megabatch.wrappers.exact_gradients import ExactGradients

        return ExactGradients

    def check(self, wrapper: Wrapper, batching: Batching, dtype: torch.dtype | None) -> torch.dtype | None:
        from megabatch.planners.same_bits import check_settings

        return check_settings(wrapper, batching, dtype)

    def new_planner(self, usual: Any) -> Any:
        from megabatch.planners.same_bits import SameBitsPlanner

        if usual is not MicrobatchPlanner:
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

        if usual is not MicrobatchPlanner:
            raise PlanError(OWN_SPLIT)
        return partial(RulePlanner, rule=self.rule)


def _check_limit(name: str, limit: object, kinds: tuple[type, ...]) -> None:
    if not isinstance(limit, kinds):
        expected = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise PlanError(f"{name} has the limit {limit!r:.60}; give {expected} of megabatch.planners")


def choose_planner(
    planner: object, micro_batch_size: int | None, max_microbatch_tokens: int | str | TunedLimit | None
) -> BuiltIn:
    """Return the planner that the arguments of an accumulator name. Raises `PlanError` for two, and for another kind.

    Without any, the limit is measured.
    """
    limits = {"micro_batch_size": micro_batch_size, "max_microbatch_tokens": max_microbatch_tokens}
    if planner is not None:
        beside = next((name for name, value in limits.items() if value is not None), None)
        if beside is not None:
            raise PlanError(f"planner= and {beside}= both split the samples; leave one of the two out")
        if isinstance(planner, Planner):
            return OwnRule(planner)
        if isinstance(planner, BuiltIn):
            return planner
        if isinstance(planner, type):
            raise PlanError(f"planner is the class {planner.__name__}; give an object, such as Tokens(8192)")
        raise PlanError(
            f"planner is {planner!r:.60}; give Rows, Tokens, Auto, Shapes or SameBits of megabatch.planners, or an "
            "object of a subclass of megabatch.Planner"
        )
    if isinstance(max_microbatch_tokens, TunedLimit):
        check_limits(micro_batch_size, "auto")
        return Auto(fit=max_microbatch_tokens)
    rows, tokens = check_limits(micro_batch_size, max_microbatch_tokens)
    if rows is not None:
        return Rows(rows)
    return Auto() if tokens is None else Tokens(tokens)


def usual_planner(wrapper: Wrapper) -> Any:
    """Return what makes the planner of calls for a wrapper, ``MicrobatchPlanner`` or another."""
    if wrapper.new_planner is not None:
        return wrapper.new_planner
    if not wrapper.ranks.context_groups:
        return MicrobatchPlanner
    from megabatch.planners.stretch_planner import StretchPlanner

    return StretchPlanner


class OtherPlanners(Extension):
    """Looks at what the planner of a saved state has left, after all other extensions."""

    def load_state_dict(self, gradient: Any, state: dict[str, Any]) -> None:
        """Drop the cost of another setting, on which nothing depends. Raises `PlanError` for shapes."""
        for name in ("cost", "units"):
            state.pop(name, None)
        if "shapes" in state:
            raise PlanError("the state has shapes; give the Shapes with which it was saved")


def refuse_moved(arguments: dict[str, Any]) -> None:
    """Raise an error for arguments that the accumulator does not take."""
    for name in arguments:
        if name in MOVED:
            raise PlanError(f"{name}= is no argument of GradientAccumulator; give {MOVED[name]}")
        raise TypeError(f"GradientAccumulator() got an unexpected keyword argument {name!r}")
