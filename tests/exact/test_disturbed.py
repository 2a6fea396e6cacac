"""What is wrong with an update is said on every rank, and nothing of it is left in the next."""

import pytest

from tests.exact.cells import MAIN, OTHERS
from tests.exact.disturbed import EXPECTED
from tests.exact.launch import of_ranks
from tests.exact.wrappers import WRAPPERS
from tests.tiers import some

pytestmark = pytest.mark.slow
JOBS = [f"{disturbance}:{wrapper}:{world}:{sync}" for wrapper in MAIN for world in (1, 2, 3) for disturbance in EXPECTED
        for sync in ("last", "every")]  # fmt: skip
JOBS += [f"{disturbance}:{wrapper}:{max(WRAPPERS[wrapper].worlds)}:{sync}" for wrapper in OTHERS
         for disturbance in ("interrupted", "left_early")
         for sync in ("last", "every", "replica_last") if sync not in WRAPPERS[wrapper].refused]  # fmt: skip


results = of_ranks("tests.exact.disturbed:run_job", JOBS)


@pytest.mark.parametrize("job", some(JOBS, 5))
def test_said_everywhere_and_forgotten(results, job: str) -> None:
    for value in results(job):
        assert value["happened"] == EXPECTED[job.split(":")[0]]
        averages = WRAPPERS[job.split(":")[1]].averages
        tolerance = 1e-15 if averages == "always" or (averages == "once" and "every" in job) else 0.0
        assert value["gradient"] <= tolerance, "the next update"
        assert not value["wrong"], value["wrong"]
