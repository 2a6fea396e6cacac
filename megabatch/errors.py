"""Every error that megabatch raises on purpose.

Each message is one line: what was seen, what was expected, and what to change.
"""

import math
import operator
from numbers import Real
from typing import NamedTuple, SupportsIndex

__all__ = ["LossContractError", "MegabatchError", "MicrobatchLimit", "PlanError", "in_one_line"]


class MicrobatchLimit(NamedTuple):
    """Most samples and most padded tokens that a microbatch may hold.

    `GradientAccumulator.oom_limit` is one after a microbatch did not fit in memory; so is the ``shortage.bound`` of the
    `MegabatchError` that ends an update for want of memory.
    """

    samples: int
    tokens: int  # with padding


class Shortage(NamedTuple):
    """A microbatch that did not fit in memory."""

    rank: int
    samples: tuple[int, ...]  # of the batch that it was given; empty where that is not known
    bound: MicrobatchLimit | None  # half of it, to start again with; None where that is nothing


class MegabatchError(Exception):
    """Base of every error raised on purpose; its text is one line, fit to be shown to a user."""

    shortage: Shortage | None = None  # where memory ran out
    loses_update: bool = False  # whether the open update cannot go on
    strands_others = False  # one rank may raise it alone, while others wait in a collective: the alarm tells them


class PlanError(MegabatchError, ValueError):
    """What was asked for cannot be planned: a size, a cap, a mesh axis, a wrapper, a policy or a batch."""


class LossContractError(MegabatchError, ValueError):
    """A loss function broke its contract: return a sum and the weight it is divided by, and never divide."""


def in_one_line(error: BaseException) -> str:
    """Return the type and the text of an error on one line, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def require_count(name: str, value: object, *, least: int = 1) -> int:
    """``value`` as a whole number, numpy's and torch's included, or a `PlanError` that names the setting."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise PlanError(f"{name} is {value!r}; it counts things and must be a whole number of at least {least}")
    return operator.index(value)


def require_positive(name: str, value: object) -> float:
    """``value`` as a positive finite number, numpy's included, or a `PlanError` that names the setting."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise PlanError(f"{name} is {value!r}; expected a positive number")
    return float(value)


def check_positive(**values: object) -> None:
    """Raise `PlanError` for a value that is neither None nor a positive finite number, by the name it is given."""
    for name, value in values.items():
        if value is not None:
            require_positive(name, value)
