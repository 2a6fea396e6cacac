"""MegabatchTrainer's every update is what plain torch gives for the same samples, alone and on two ranks."""

import pytest

from tests.exact.launch import launch

pytestmark = pytest.mark.slow
WAYS = ["default", "capped", "loss_fn", "compute_loss", "compute_loss_func"]
JOBS = [f"{way}/float64" for way in WAYS] + ["default/float32", "resumed", "refused/sum", "refused/means"]
WRAPPED = {1: "GPT2LMHeadModel", 2: "DistributedDataParallel"}


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "on two ranks"])
def world(request):
    return request.param


@pytest.fixture(scope="module")
def results(world, tmp_path_factory):
    return launch(world, "tests.integrations.trainers:run_job", JOBS, tmp_path_factory.mktemp("trainers"))


def values(results, job):
    for result in results[job]:
        assert "error" not in result, result["error"]
        yield result["value"]


@pytest.mark.parametrize("job", [job for job in JOBS if "float" in job])
def test_every_update_is_exact_and_stepped_once(results, world, job):
    for found in values(results, job):
        allowed = 1e-12 if job.endswith("float64") else 1e-5
        assert len(found["errors"]) == found["expected"] == {1: 4, 2: 2}[world]
        assert max(found["errors"]) <= allowed
        assert max(found["losses"]) <= 1e-6  # in Trainer's float32
        assert found["steps"] == found["schedule"] == found["global_step"] == found["expected"]
        assert found["model"] == WRAPPED[world]


def test_a_checkpoint_of_trainer_goes_on_to_the_same_weights(results, world):
    for found in values(results, "resumed"):
        assert found["in one go"] <= 1e-10
        assert found["resumed"] <= 1e-10
        assert found["steps"] == {1: 8, 2: 4}[world]


@pytest.mark.parametrize("job", ["refused/sum", "refused/means"])
def test_a_loss_that_is_no_mean_over_its_targets_is_refused(results, job):
    for found in values(results, job):
        assert found.startswith("LossContractError: the loss of two samples is no mean over their ")
        assert found.endswith(
            "give loss_fn=, which returns (total, weight), or say in count_targets() what it is a mean over"
        )
