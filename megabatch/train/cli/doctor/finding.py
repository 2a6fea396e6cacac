"""Finding: one thing that was looked at, and what to change about it, as a line."""

from typing import Literal, NamedTuple

Level = Literal["ok", "warn", "fail"]


class Finding(NamedTuple):
    """What is so; where it is not ``ok`` its text ends with what to change."""

    level: Level
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:5} {self.subject:9} {self.text}"
