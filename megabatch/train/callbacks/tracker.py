"""Tracker: what a service that shows runs is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Told:
    """What a tracker is told of a run."""

    project: str
    name: str
    folder: Path
    recipe: Mapping[str, Any]  # its tables


class Tracker(Protocol):
    """A run at a service. Every method may raise what it likes, and is called in one thread."""

    def __init__(self, told: Told, saved: str | None) -> None:
        """Begin a run there, or go on with the one whose ``id`` was saved."""
        ...

    @property
    def id(self) -> str:
        """Which run it is there."""
        ...

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Add numbers, by their tags, of a step; a step that it has already comes with the same numbers again."""
        ...

    def finish(self) -> None:
        """Send what is left."""
        ...
