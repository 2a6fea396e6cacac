"""Models that Accelerate prepares are exact on two ranks, and its own accumulation is not in the way."""

import pytest

from tests.exact.launch import of_ranks
from tests.tiers import some

pytestmark = pytest.mark.slow
KINDS = {"prepared": "DistributedDataParallel", "sharded": "FSDPGPT2LMHeadModel"}
JOBS = [f"{wrapper}/{precision}" for wrapper in KINDS for precision in ("float64", "float32")] + ["prepared/bf16"]


results = of_ranks("tests.exact.foreign:run_job", {2: JOBS})


@pytest.mark.parametrize("job", some(JOBS, 5))
def test_a_model_prepared_by_accelerate_is_exact(results, job):
    for kind, error, own_error in results(job):
        assert kind == KINDS[job.split("/")[0]]
        assert error <= max(1e-12, {"bf16": 2, "float32": 4}.get(job.split("/")[1], 0) * own_error)
