"""Journal: a file in a run's folder with a line of JSON for an update, cut back where a run goes on from before it.

On a full disk lines wait in memory, as those of metrics.jsonl do.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megabatch.train.callbacks.metrics import Row, read_rows
from megabatch.train.runtime.files import RetryingAppender, replace_text


class Journal:
    """Lines appended as they come, each with its "step". Only the main rank writes and reads."""

    def __init__(self, path: Path, *, enabled: bool) -> None:
        self._path, self._enabled = path, enabled
        self._lines = RetryingAppender(path)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one line, written at once if there is room; floats keep every digit."""
        if self._enabled:
            self._lines.append((json.dumps(row, allow_nan=False) + "\n").encode())

    def flush(self) -> None:
        """Write the lines that wait for room. Raises `OSError` where there is none."""
        self._lines.flush()

    def cut(self, step: int) -> None:
        """Drop the lines of updates after ``step``, as a run that was never stopped has none of them yet."""
        if self._enabled and self._path.exists():
            kept = [row for row in read_rows(self._path) if row["step"] <= step]
            replace_text(self._path, "".join(json.dumps(row) + "\n" for row in kept))

    def rows(self) -> list[Row]:
        """What was written so far, by earlier starts of the run too. Raises `MegabatchError` where it is damaged."""
        return read_rows(self._path) if self._enabled else []
