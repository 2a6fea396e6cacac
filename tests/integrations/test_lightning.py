"""Lightning's loop with exact updates, alone and on two ranks: gradients and losses are plain torch's."""

import pytest

from tests.exact.launch import launch, values

pytestmark = pytest.mark.slow
JOBS = ["float64", "float32", "refusals"]
STRATEGY = {1: "SingleDeviceStrategy", 2: "DDPStrategy"}


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    jobs = JOBS if world == 1 else JOBS[:2]
    return launch(world, "tests.integrations.modules:run_job", jobs, tmp_path_factory.mktemp("modules"))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_updates_are_exact_and_the_schedule_moves_once_with_each(results, world, dtype):
    for found in values(results[dtype]):
        assert found["gradients"] <= (1e-12 if dtype == "float64" else 1e-3)
        assert found["losses"] <= (1e-6 if dtype == "float64" else 1e-4)  # Lightning keeps float32
        assert found["global_step"] == found["schedule"] == found["expected"] == {1: 4, 2: 2}[world]
        assert found["strategy"] == STRATEGY[world]
        assert found["saved"]


def test_what_cannot_be_exact_is_refused(results, world):
    if world == 1:
        (said,) = values(results["refusals"])
        assert said["batch"] == (
            "PlanError: a batch is a dict; expected a list of samples: give the DataLoader collate_fn=list"
        )
        assert said["schedule"].startswith("PlanError: ReduceLROnPlateau is stepped with a metric")
        assert said["precision"].startswith("PlanError: the Trainer has precision='16-true', which loses small grad")
