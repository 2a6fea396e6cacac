"""Models that share a matrix between stages, or between groups of FSDP2, give the gradient of one that has it once."""

import pytest

from tests.exact.launch import Result, Run, launch_all, of_ranks, values
from tests.exact.mutations import Mutation
from tests.exact.test_mutations import plant

pytestmark = pytest.mark.slow
JOBS = {
    2: ["groups/5", "groups/6"],
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
PLANTED = (  # with the job that sees it
    (Mutation("leave each copy its own gradient", "pipeline/tied.py",
              "dist.all_reduce(local(parameter.grad), group=group)", "pass"), "exact/plain"),
    (Mutation("count every copy in the norm", "pipeline/tied.py", "if not copy.is_counted", "if False"), "exact/plain"),
    (Mutation("let copies drift apart", "pipeline/tied.py", "if len(checksums) > 1:", "if len(checksums) > 2:"),
     "drifting/plain"),
    (Mutation("step one copy of a padded shard", "torch_private/fsdp2_groups.py",
              "    _share_storage_of_tied(groups)\n", ""), "groups/5"),
    (Mutation("verify with two matrices", "verification/float64_copy.py",
              "for name, first_name in tied.items():", "for name, first_name in ():"), "groups/6"),
)  # fmt: skip
results = of_ranks("tests.exact.tied:run_job", JOBS)


def is_seen(job: str, found: list[Result]) -> bool:
    """Return True if a job's ranks say anything but what they should."""
    if any("error" in each for each in found):
        return True
    said = list(values(found))
    if job in FAULTS:
        return not said[0].startswith(FAULTS[job])
    return any(each != [] for each in said)


@pytest.mark.parametrize("job", [job for jobs in JOBS.values() for job in jobs if job.startswith("exact")])
def test_same_bits_as_the_model_with_one_matrix(results, job: str) -> None:
    """The middle stage has no copy."""
    assert all(wrong == [] for wrong in results(job))


@pytest.mark.parametrize("job", JOBS[2])
def test_groups_of_fsdp2_step_one_matrix(results, job: str) -> None:
    """FSDP2 pads a shard of 5 rows on 2 ranks."""
    assert all(wrong == [] for wrong in results(job))


@pytest.mark.parametrize("job", FAULTS)
def test_what_is_not_one_parameter_is_told_to_all(results, job: str) -> None:
    said = set(results(job))
    assert len(said) == 1
    assert said.pop().startswith(FAULTS[job])


def test_planted_bugs_are_caught(tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("planted")
    runs = []
    for number, (mutation, job) in enumerate(PLANTED):
        planted = folder / str(number)
        plant(mutation, planted)
        runs.append(Run(2 if job in JOBS[2] else 3, [job], planted / "run", [str(planted)]))
    found = launch_all("tests.exact.tied:run_job", runs, folder)
    for (mutation, job), ranks in zip(PLANTED, found, strict=True):
        assert is_seen(job, ranks[job]), mutation.name
