"""TRL's trainers with MegabatchTrainer in front: the gradient and the metrics of each update are those of it uncut."""

from functools import cache

import pytest

from tests.exact.launch import launch, values
from tests.integrations.trl_users import CASES

REFUSED = {
    "KTO, coupled": "PlanError: MegabatchTrainer cannot keep KTOTrainer's KL term, which couples the samples",
    "DPO, sorted pairs": "PlanError: MegabatchTrainer cannot keep DPOTrainer's loss_type 'aot', which sorts the pairs",
    "DPO, mean over tokens": "LossContractError: the loss of ",
}
ON_TWO = ["SFT, text", "SFT, text, capped", "DPO, capped", "Reward, capped", "KTO, capped"]
PAIRS = [(1, job) for job in CASES] + [(2, job) for job in ON_TWO]
ALLOWED = 1e-6  # of a float64 model: TRL computes its losses in float32


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of every job, by number of ranks; each number is launched once."""

    @cache
    def launched(world):
        jobs = [job for ranks, job in PAIRS if ranks == world]
        return launch(world, "tests.integrations.trl_users:run_job", jobs, tmp_path_factory.mktemp("trl"))

    return launched


@pytest.mark.slow
@pytest.mark.parametrize(("world", "job"), PAIRS)
def test_an_update_is_exact_and_so_are_its_metrics(results, world, job):
    for found in values(results(world)[job]):
        if job in REFUSED:
            assert found["refused"].startswith(REFUSED[job])
        else:
            assert found.get("refused") is None
            assert len(found["errors"]) == found["updates"] > 0
            assert max(found["errors"]) <= ALLOWED, found
            assert found["metrics"] == {}
