"""Planners to choose from. An accumulator reads its own once, when it is made: no call asks which one it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from megabatch.core.accumulator import Parts
from megabatch.core.extension import Extension
from megabatch.core.gradients import Gradients
from megabatch.core.samples import Batching
from megabatch.core.update import OpenUpdate
from megabatch.core.wrapper import Wrapper
from megabatch.errors import PlanError, require_count
from megabatch.planners.filling_planner import FillingPlanner
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel
from megabatch.planning.planner import Planner
from megabatch.planning.settings import check_cost, check_limits

MOVED = {  # argument of earlier versions, of the trainer or of a batching → what to give instead
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


class BuiltIn:
    """A planner as an argument: `Rows`, `Tokens`, `Auto`, `Shapes`, `SameBits`, or a rule of the user's."""

    fit: TunedLimit | None = None
    new_update: type[OpenUpdate] = OpenUpdate

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

    def new_gradients(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> Gradients:
        """Return what adds up gradients in a dtype; None is that of each parameter."""
        if dtype is None:
            return Gradients()
        from megabatch.wrappers.wide_gradients import WideGradients

        return WideGradients(parameters, dtype)

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
            from megabatch.planners.beyond_limits import OwnRule

            return OwnRule(planner)
        if isinstance(planner, BuiltIn):
            return planner
        if isinstance(planner, type):
            raise PlanError(f"planner is the class {planner.__name__}; give an object, such as Tokens(8192)")
        raise PlanError(
            f"planner is {planner!r:.60}; give Rows, Tokens, Auto, Shapes or SameBits of megabatch.planners, or an "
            "object of a subclass of megabatch.Planner"
        )
    fit = None
    if isinstance(max_microbatch_tokens, TunedLimit):
        fit, max_microbatch_tokens = max_microbatch_tokens, "auto"
    rows, tokens = check_limits(micro_batch_size, max_microbatch_tokens)
    if rows is not None:
        return Rows(rows)
    if tokens is not None:
        return Tokens(tokens)
    from megabatch.planners.beyond_limits import Auto

    return Auto(fit=fit)


def usual_planner(wrapper: Wrapper) -> Any:
    """Return what makes the planner of calls for a wrapper, `FillingPlanner` or another."""
    if not wrapper.ranks.context_groups:
        return wrapper.new_planner or FillingPlanner
    if wrapper.is_pipeline:
        from megabatch.planners.cut_sequences import StretchSchedulePlanner

        return partial(StretchSchedulePlanner, pipeline=cast(Any, wrapper).pipeline)
    from megabatch.planners.cut_sequences import FillingStretchPlanner

    return FillingStretchPlanner


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
