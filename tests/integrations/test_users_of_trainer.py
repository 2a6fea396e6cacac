"""What users of Trainer write gives the gradient of the uncut update, or is refused in one line."""

from functools import cache

import pytest

from tests.exact.launch import launch, values
from tests.integrations.users import CASES

NO_MEAN = "LossContractError: the loss of "
REFUSED = {  # how each begins
    "class weights": NO_MEAN,
    "class weights, alone": NO_MEAN,
    "class weights, sorted": NO_MEAN,
    "class weights, collated": NO_MEAN,
    "length weights": NO_MEAN,
    "pairwise": NO_MEAN,
    "noisy weights": NO_MEAN,
    "numpy rows": NO_MEAN,
    "unseeded": "LossContractError: compute_loss gives two gradients for one sample and one seed",
    "nan": "LossContractError: the gradient of compute_loss is not finite",
    "count": "LossContractError: count_targets() counts 1 in ",
    "tensors": "PlanError: get_train_dataloader() gives a list of Tensors",
    "reads inputs": "PlanError: training_step reads inputs['input_ids']",
    "replaces inputs": "PlanError: Users.training_step hands on other inputs",
    "own step": "PlanError: Users.training_step does not call MegabatchTrainer's",
}
EITHER = {"max_length", "max_length, own"}
ALLOWED = {"smoothed": 1e-6}  # Trainer's smoothing sums in float32
ON_TWO = [
    "classes", "floats", "pads", "flat", "collated", "masking, default", "context", "noisy", "drawn collator",
    "class weights", "class weights, collated", "pairwise", "reads inputs",
]  # fmt: skip
PAIRS = [(1, job) for job in CASES] + [(2, job) for job in ON_TWO]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What every job gave, by number of ranks; each number is launched once."""

    @cache
    def launched(world):
        jobs = [job for ranks, job in PAIRS if ranks == world] + ["traces"] + ["others"] * (world == 1)
        return launch(world, "tests.integrations.users:run_job", jobs, tmp_path_factory.mktemp("users"))

    return launched


@pytest.mark.slow
@pytest.mark.parametrize(("world", "job"), PAIRS)
def test_an_update_is_exact_or_refused_in_one_line(results, world, job):
    for found in values(results(world)[job]):
        if job in REFUSED or (job in EITHER and "refused" in found):
            assert found.get("refused", "nothing").startswith(REFUSED.get(job, "LossContractError: ")), found
            assert "\n" not in found["refused"]
        else:
            assert "refused" not in found, found
            assert len(found["errors"]) == found["updates"]
            assert max(found["errors"]) <= ALLOWED.get(job, 1e-12), found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_the_trial_leaves_no_metrics_logs_or_draws_and_asks_as_often_on_a_rank_without_samples(results, world):
    for found in values(results(world)["traces"]):
        num = 2 if world == 1 else 1  # microbatches; a dummy microbatch leaves no metrics either
        counted = found.pop("train"), found.pop("calls"), found.pop("logged")
        assert counted in [(num, num, num), (0, 0, 0)]
        assert found == {"eval": [], "seen": num, "drawn": False, "log": False, "updates": 1}


@pytest.mark.slow
def test_settings_are_refused_where_training_begins_and_the_loader_knows_its_sizes(results):
    (found,) = values(results(1)["others"])
    assert found["evaluated"] > 0
    assert found["refused"].startswith("PlanError: MegabatchTrainer cannot keep accelerator_config.split_batches")
    assert found["loader"] == [2, 12]


@pytest.mark.slow
def test_random_numbers_are_named_where_a_mean_cannot_be_told(results):
    for job in ("noisy weights", "numpy rows"):
        for found in values(results(1)[job]):
            assert "as far as its random numbers let it be told" in found["refused"]
            assert found["refused"].endswith("or check_loss=False if it is one")
