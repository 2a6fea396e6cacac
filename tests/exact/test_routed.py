"""A parameter that only some ranks or microbatches use has the gradient of the uncut update, on every rank."""

import pytest

from tests.exact.launch import launch, launch_by_world
from tests.exact.routed import USERS

pytestmark = pytest.mark.slow
WORLDS = {"plain": (1, 3), "ddp": (1, 3), "fsdp2": (1, 3), "hsdp": (4,), "replicate": (3,), "fsdp1": (2,)}
JOBS = [f"{users}:{wrapper}:{world}:{sync}" for wrapper, worlds in WORLDS.items() for world in worlds
        for users in USERS for sync in ("last", "every")]  # fmt: skip
JOBS += [f"{users}:hsdp:4:replica_last" for users in USERS]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch_by_world("tests.exact.routed:run_job", JOBS, tmp_path_factory.mktemp("routed"))


@pytest.mark.parametrize("job", JOBS)
def test_gradient_of_what_not_everyone_uses(results, job: str) -> None:
    for result in results[job]:
        assert "error" not in result, result["error"]
        value = result["value"]
        assert value["gradient"] <= (1e-15 if "ddp" in job and "every" in job else 0), value["parameter"]
        assert not value["wrong"], value["wrong"]


@pytest.mark.parametrize("world", WORLDS["ddp"])
def test_what_ddp_leaves_unreduced_is_an_error(world: int, tmp_path) -> None:
    job = f"second-of-all:ddp:{world}:last"
    for result in launch(world, "tests.exact.routed:run_unsaid", [job], tmp_path)[job]:
        assert "find_unused_parameters=True" in result.get("value", ""), result
