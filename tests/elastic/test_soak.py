"""A run holds no more after many updates than after some: open files, threads and tensors are counted."""

import json
from pathlib import Path
from statistics import median

import pytest

from tests.elastic.measured import run
from tests.elastic.soak import RESULT

pytestmark = pytest.mark.full


def test_nothing_is_held_from_update_to_update(tmp_path: Path) -> None:
    rows = run(tmp_path, 300, every=15)
    assert len(rows) == 20
    check_flat(rows)


def check_flat(rows: list[dict[str, float]]) -> None:
    """As much is counted in the second half as in the first; a row may see an update that is being prepared."""
    half = len(rows) // 2
    for key in ("open_files", "threads", "tensors"):
        counts = [row[key] for row in rows]
        for later in (counts[half:], counts[-half // 2 :]):  # what has begun to grow late, too
            assert median(later) <= median(counts[:half]), (key, counts)


def test_the_long_run_that_is_kept_held_nothing_either() -> None:
    kept = json.loads(RESULT.read_text())
    assert kept["num_updates"] == 10_000
    check_flat(kept["rows"])
    grown = kept["resident_bytes_per_update"]
    assert grown["slope"] < 100  # of its memory, a megabyte in ten thousand updates
