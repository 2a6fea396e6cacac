"""A loop over what Accelerate has prepared: exact, and one step of the schedule per update, alone and on two ranks."""

import pytest

from tests.exact.launch import launch, values

pytestmark = pytest.mark.slow
JOBS = ["float64", "float32", "saved", "refused"]
WRAPPED = {1: "GPT2LMHeadModel", 2: "DistributedDataParallel"}


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    return launch(world, "tests.integrations.prepared:run_job", JOBS, tmp_path_factory.mktemp("prepared"))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_updates_are_exact_and_the_schedule_moves_once_with_each(results, world, dtype):
    for found in values(results[dtype]):
        assert found["gradient"] <= (1e-12 if dtype == "float64" else 1e-5)
        assert found["weights"] <= (1e-10 if dtype == "float64" else 1e-3)
        assert found["losses"] <= (1e-12 if dtype == "float64" else 1e-4)
        assert found["schedule"] == found["updates"] == 3
        assert found["model"] == WRAPPED[world]


def test_a_state_of_accelerate_holds_what_was_stepped(results):
    for found in values(results["saved"]):
        assert found == {"same": True, "steps": [2], "schedule": 2}


def test_float16_is_refused(results):
    for found in values(results["refused"]):
        assert found == (
            "the Accelerator has mixed_precision='fp16', which loses small gradients; give mixed_precision=\"bf16\""
        )
