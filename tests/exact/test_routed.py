"""A parameter that only some ranks or microbatches use has the gradient of the uncut update, on every rank."""

import pytest

from tests.exact.cells import WRAPPERS
from tests.exact.launch import launch
from tests.exact.routed import USERS

pytestmark = pytest.mark.slow
WORLDS = (1, 3)
JOBS = [f"{users}:{wrapper}:{{world}}:{sync}" for users in USERS for wrapper in WRAPPERS for sync in ("last", "every")]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def results(request, tmp_path_factory):
    world = request.param
    jobs = [job.format(world=world) for job in JOBS]
    found = launch(world, "tests.exact.routed:run_job", jobs, tmp_path_factory.mktemp("routed"))
    return {job: found[job.format(world=world)] for job in JOBS}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.replace(":{world}", ""))
def test_gradient_of_what_not_everyone_uses(results, job: str) -> None:
    for result in results[job]:
        assert "error" not in result, result["error"]
        value = result["value"]
        assert value["gradient"] <= (1e-15 if "ddp" in job and "every" in job else 0), value["parameter"]
        assert not value["wrong"], value["wrong"]


@pytest.mark.parametrize("world", WORLDS)
def test_what_ddp_leaves_unreduced_is_an_error(world: int, tmp_path) -> None:
    job = f"second-of-all:ddp:{world}:last"
    for result in launch(world, "tests.exact.routed:run_unsaid", [job], tmp_path)[job]:
        assert "find_unused_parameters=True" in result.get("value", ""), result
