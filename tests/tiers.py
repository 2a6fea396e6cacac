"""The two tiers: `make test` leaves out what is marked `full`, and `make test-all` runs everything."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(params: Iterable[Any], every: int) -> list[Any]:
    """Parameters of which one in so many is in the quick tier."""
    return full_unless(params, lambda number, _: number % every == 0)


def full_unless(params: Iterable[Any], is_quick: Callable[[int, Any], bool]) -> list[Any]:
    """Parameters of which those for which `is_quick(number, param)` is false are in the full tier alone."""
    return [each if is_quick(number, each) else _in_full(each) for number, each in enumerate(params)]


def _in_full(each: Any) -> Any:
    values = each if isinstance(each, tuple) else (each,)
    return pytest.param(*values, marks=pytest.mark.full)
