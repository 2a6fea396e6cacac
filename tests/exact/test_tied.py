"""Pipelines whose first stage and last share a matrix give the gradient of the model that has it once."""

import pytest

from tests.exact.launch import of_ranks

pytestmark = pytest.mark.slow
JOBS = {
    3: ["exact/plain", "refused/weights", "refused/frozen", "refused/alone", "drifting/plain"],
    6: [*(f"exact/{wrapper}" for wrapper in ("plain", "ddp", "fsdp2", "replicate")), "drifting/fsdp2"],
}
FAULTS = {
    "refused/weights": "copies of the tied parameter 'matrix' have different weights; load the same",
    "refused/frozen": "copies of the tied parameter 'matrix' are (6, 4), torch.float64, trained and (6, 4), torch.flo",
    "refused/alone": "tied= has 'matrix' on one rank along 'pp'; name it on every rank",
    "drifting/plain": "copies of the tied parameter 'matrix' have different weights; load the same",
    "drifting/fsdp2": "copies of the tied parameter 'matrix' have different weights; load the same",
}
results = of_ranks("tests.exact.tied:run_job", JOBS)


@pytest.mark.parametrize("job", [job for jobs in JOBS.values() for job in jobs if job.startswith("exact")])
def test_same_bits_as_the_model_with_one_matrix(results, job: str) -> None:
    """The middle stage has no copy."""
    assert all(wrong == [] for wrong in results(job))


@pytest.mark.parametrize("job", FAULTS)
def test_what_is_not_one_parameter_is_told_to_all(results, job: str) -> None:
    said = set(results(job))
    assert len(said) == 1
    assert said.pop().startswith(FAULTS[job])
