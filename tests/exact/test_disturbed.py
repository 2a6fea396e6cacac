"""What is wrong with an update is said on every rank, and nothing of it is left in the next."""

import pytest

from tests.exact.cells import WRAPPERS
from tests.exact.disturbed import DISTURBED, EXPECTED
from tests.exact.launch import launch

pytestmark = pytest.mark.slow
WORLDS = (1, 2, 3)
JOBS = [f"{disturbance}:{wrapper}:{{world}}:{sync}" for disturbance in DISTURBED for wrapper in WRAPPERS
        for sync in ("last", "every")]  # fmt: skip


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def results(request, tmp_path_factory):
    world = request.param
    jobs = [job.format(world=world) for job in JOBS]
    found = launch(world, "tests.exact.disturbed:run_job", jobs, tmp_path_factory.mktemp("disturbed"))
    return {job: found[job.format(world=world)] for job in JOBS}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.replace(":{world}", ""))
def test_said_everywhere_and_forgotten(results, job: str) -> None:
    for result in results[job]:
        assert "error" not in result, result["error"]
        value = result["value"]
        assert value["happened"] == EXPECTED[job.split(":")[0]]
        assert value["gradient"] <= (1e-15 if "ddp" in job and "every" in job else 0), "the next update"
        assert not value["wrong"], value["wrong"]
