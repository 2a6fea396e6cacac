"""Errors that megabatch raises on purpose, and the checks of plain numbers.

Each message is one line: the observed value, the expected one, and the change to make.
"""

import math
import operator
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from typing import NamedTuple, SupportsIndex

__all__ = ["LossContractError", "MegabatchError", "MicrobatchLimit", "PlanError", "in_one_line", "install_command"]

OLDEST = {"transformers": "5.1"}  # 5.0 leaves tied weights of a model without memory untied


class MicrobatchLimit(NamedTuple):
    """Most samples and most padded tokens that a microbatch may hold.

    `GradientAccumulator.oom_limit` is one after a microbatch did not fit in memory; so is the ``shortage.bound`` of the
    `MegabatchError` that ends an update for want of memory.
    """

    samples: int
    tokens: int  # with padding


class Shortage(NamedTuple):
    """Description of a microbatch that did not fit in memory."""

    rank: int
    samples: tuple[int, ...]  # indices into the rank's batch; empty if unknown
    bound: MicrobatchLimit | None  # half of the microbatch, for a new start; None if that is nothing


class MegabatchError(Exception):
    """Base of every error raised on purpose; its text is one line that can be shown to a user."""

    shortage: Shortage | None = None  # set if memory ran out
    loses_update: bool = False  # true if the open update cannot continue
    strands_others = False  # true if one rank may raise it while others wait in a collective: it is then broadcast


class PlanError(MegabatchError, ValueError):
    """An invalid or unsupported setting: a size, a limit, a mesh axis, a wrapper, a policy or a batch."""


class ReplanError(MegabatchError):
    """Samples that need another microbatch limit: every rank chooses it anew, and begins its call again."""


class PositionError(MegabatchError):
    """Ranks are in different calls, perhaps since one of them has failed before."""

    loses_update = True


class LossContractError(MegabatchError, ValueError):
    """A broken loss contract: a loss returns a sum and the weight that divides it, and never divides."""


def in_one_line(error: BaseException) -> str:
    """Return the type and the text of an error on one line, at most 200 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class RemovedAttributeError(PlanError, AttributeError):
    """A method that was removed. ``hasattr`` is False, as for any missing attribute."""


def missing_attribute(owner: object, name: str, removed: Mapping[str, str]) -> Exception:
    """Return the error of a missing attribute. One of ``removed`` says what to do instead."""
    kind = type(owner).__name__
    if name in removed:
        return RemovedAttributeError(f"{kind}.{name}() was removed; {removed[name]}")
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def install_command(extra: str) -> str:
    """Return the command that installs an extra of the package, from a checkout and from an index."""
    return f"""pip install -e ".[{extra}]" in a checkout, pip install "megabatch[{extra}]" elsewhere"""


def require_version(package: str) -> None:
    """Raise `MegabatchError` for an installed package that is older than in `OLDEST`, and nothing for a missing one."""
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        installed, oldest = version(package), OLDEST[package]
        if [int(part) for part in installed.split(".")[:2]] < [int(part) for part in oldest.split(".")]:
            raise MegabatchError(f"megabatch needs {package}>={oldest} and {installed} is installed; upgrade it")


def require_count(name: str, value: object, *, least: int = 1) -> int:
    """Return ``value`` as an int (numpy and torch integers too); raise a `PlanError` with the setting's name."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or operator.index(value) < least:
        raise PlanError(f"{name} is {value!r}; it counts things and must be a whole number of at least {least}")
    return operator.index(value)


def require_positive(name: str, value: object) -> float:
    """Return ``value`` as a positive finite float; raise a `PlanError` with the setting's name."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise PlanError(f"{name} is {value!r}; expected a positive number")
    return float(value)


def check_positive(**values: object) -> None:
    """Raise `PlanError` for a keyword argument that is neither None nor a positive finite number."""
    for name, value in values.items():
        if value is not None:
            require_positive(name, value)
