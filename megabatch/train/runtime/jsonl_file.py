"""Files of a run with one JSON object a line, each with the "step" of its update."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from megabatch.errors import MegabatchError
from megabatch.train.runtime.files import RetryingAppender, replace_text

Row = dict[str, Any]

METRICS = "metrics.jsonl"


class JsonlFile:
    """A file of rows, which only the main rank writes.

    Lines wait in ``lines`` until `flush` writes them. While the disk is full they go on waiting, in their order.
    """

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self.path, self.is_enabled = path, enabled
        self.lines: list[str] = []
        self._file = RetryingAppender(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row. Floats keep every digit."""
        if self.is_enabled:
            self.lines.append(json.dumps(row, allow_nan=False))

    def flush(self) -> None:
        """Write the lines that wait.

        Raises:
            OSError: There is no room. The lines go on waiting.
        """
        self.write()
        self._file.flush()

    def write(self) -> None:
        """Write the lines that wait, if there is room."""
        if self.lines:
            self._file.append("".join(f"{line}\n" for line in self.lines).encode())
            self.lines.clear()

    def cut(self, step: int) -> None:
        """Drop the rows that a run which was never stopped would not have after ``step`` updates."""
        if self.is_enabled and self.path.exists():
            kept = [row for row in read_rows(self.path) if self.is_kept(row, step)]
            replace_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def is_kept(self, row: Row, step: int) -> bool:
        """Return True for a row that stays in a run that resumes after ``step`` updates."""
        return row["step"] <= step

    def rows(self) -> list[Row]:
        """Return the rows of all starts of the run. Raises `MegabatchError` for a damaged file."""
        self.write()
        return read_rows(self.path) if self.is_enabled else []


def read_rows(path: Path) -> list[Row]:
    """Return the file's rows, without a last line that a kill has cut off.

    Raises:
        MegabatchError: Any other line holds no row.
    """
    *whole, cut_off = path.read_bytes().split(b"\n") if path.exists() else [b""]
    rows: list[Row] = []
    for number, line in enumerate(whole, start=1):
        row = row_of(line)
        if row is None and line.strip():
            raise MegabatchError(f"{path} is damaged (line {number} is no row with a step); mend or delete that line")
        rows += [] if row is None else [row]
    last = row_of(cut_off)
    return rows if last is None else [*rows, last]


def row_of(line: bytes) -> Row | None:
    """Return the row of a line, or None."""
    try:
        row: Any = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return cast(Row, row) if isinstance(row, dict) and type(cast(Row, row).get("step")) is int else None


def is_evaluation(row: Mapping[str, Any]) -> bool:
    """Return True for the row of an evaluation, False for that of an update."""
    return "set" in row
