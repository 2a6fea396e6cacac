"""What Accelerate prepares is exact on two ranks, and its own accumulation is not in the way."""

import pytest

from tests.exact.launch import launch

pytestmark = pytest.mark.slow
KINDS = {"prepared": "DistributedDataParallel", "sharded": "FSDPGPT2LMHeadModel"}
JOBS = [f"{wrapper}/{precision}" for wrapper in KINDS for precision in ("float64", "float32")] + ["prepared/bf16"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(2, "tests.exact.foreign:run_job", JOBS, tmp_path_factory.mktemp("foreign"))


@pytest.mark.parametrize("job", JOBS)
def test_a_model_prepared_by_accelerate_is_exact(results, job):
    for result in results[job]:
        assert "error" not in result, result["error"]
        kind, error, own_error = result["value"]
        assert kind == KINDS[job.split("/")[0]]
        assert error <= max(1e-12, {"bf16": 2, "float32": 4}.get(job.split("/")[1], 0) * own_error)
