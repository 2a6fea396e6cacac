"""The limits and the cost that a user gives, checked."""

import math
from dataclasses import fields

from megabatch.errors import PlanError, require_count
from megabatch.planning.plan import CostModel


def require_one_limit(micro_batch_size: int | None, max_microbatch_tokens: int | None) -> None:
    """Raise `PlanError` unless exactly one of the two bounds is given, as a positive whole number."""
    if micro_batch_size is None and max_microbatch_tokens is None:
        raise PlanError(
            "neither of micro_batch_size and max_microbatch_tokens given; "
            "give one: samples per forward, or padded tokens per forward"
        )
    check_limits(micro_batch_size, max_microbatch_tokens)
    if max_microbatch_tokens is not None:
        require_count("max_microbatch_tokens", max_microbatch_tokens)


def check_limits(
    micro_batch_size: int | None, max_microbatch_tokens: int | str | None
) -> tuple[int | None, int | None]:
    """Return both limits, "auto" as None. Raises `PlanError` for both at once and for one that is no positive count."""
    if micro_batch_size is not None and max_microbatch_tokens is not None:
        raise PlanError(
            "both of micro_batch_size and max_microbatch_tokens given; "
            "give one: samples per forward, or padded tokens per forward"
        )
    if micro_batch_size is not None:
        require_count("micro_batch_size", micro_batch_size)
    if max_microbatch_tokens is None or max_microbatch_tokens == "auto":
        return micro_batch_size, None
    return micro_batch_size, require_count("max_microbatch_tokens", max_microbatch_tokens)


def check_cost(cost: object, others: str = "") -> CostModel | None:
    """Return ``cost``. Raises `PlanError` unless it is a `CostModel` or None; ``others`` names what else may be."""
    if cost is not None and not isinstance(cost, CostModel):
        raise PlanError(f"cost is {cost!r}; expected a CostModel{others}, or leave it out")
    for field_of_cost in fields(cost) if cost is not None else ():
        value = getattr(cost, field_of_cost.name)
        if not 0 <= value < math.inf:
            raise PlanError(f"cost has {field_of_cost.name}={value}; expected a finite number, not negative")
    return cost
