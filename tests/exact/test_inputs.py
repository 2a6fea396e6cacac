"""Mistakes and odd input of users are right or refused, in one line and on every rank."""

from typing import Any

import pytest

from tests.exact import inputs
from tests.exact.launch import of_ranks
from tests.tiers import full_unless

pytestmark = pytest.mark.slow
TOLERANCE = 1e-12
LEAST_ROWS = 60
WAIT_SECONDS = 4.0  # for a rank that never comes; where all is right, none waits
ROWS = inputs.table()
JOBS = {world: [f"{name}:{world}" for name, row in ROWS.items() if world in row.worlds] for world in inputs.ALL}


results = of_ranks("tests.exact.inputs:run_job", JOBS, max_failures=len(ROWS), group_timeout_seconds=WAIT_SECONDS)


ON_FEW = full_unless((job for jobs in JOBS.values() for job in jobs), lambda _, job: not job.endswith(":3"))


@pytest.mark.parametrize("job", ON_FEW)
def test_right_or_refused(results, job: str) -> None:
    check(job, results(job))


def check(job: str, values: list[dict[str, Any]]) -> None:
    """The findings and errors of each rank of a job."""
    row = ROWS[job.rsplit(":", 1)[0]]
    for rank, value in enumerate(values):
        where = f"on rank {rank}"
        if row.refused is None:
            assert "raised" not in value, f"{where}: {value['traceback']}"
            assert 0 <= value["error"] <= TOLERANCE, f"{where}: {value['parameter']} is off by {value['error']:.1e}"
            continue
        assert "raised" in value, f"{where}: nothing was refused; {value['parameter']} is off by {value['error']:.1e}"
        assert row.refused.__name__ in value["raised"], f"{where}: {value['traceback']}"
        assert len(value["text"].splitlines()) == 1, f"{where}: {value['text']}"
        assert row.fragment in value["text"], f"{where}: {value['text']}"


def test_the_table_is_large_and_a_third_of_it_runs_on_several_ranks() -> None:
    assert len(ROWS) >= LEAST_ROWS
    several = [row for row in ROWS.values() if {2, 3} <= set(row.worlds)]
    assert 3 * len(several) >= len(ROWS)
