"""Programs of many fields, written as their users write them, have the gradient of plain autograd."""

import pytest

from tests.exact.launch import of_ranks
from tests.programs.setting import Errors
from tests.programs.table import PROGRAMS, jobs, run_job
from tests.tiers import full_unless

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's use
BOUND = 1e-12  # of a relative error of a gradient, and of a difference of a loss or weight
QUICK = {f"{name}|plain" for name, entry in PROGRAMS.items() if entry.is_quick}

ranks = of_ranks("tests.programs.table:run_job", {2: jobs(2)})


def check(errors: Errors) -> None:
    wrong = {name: error for name, error in errors.items() if not error <= BOUND}
    assert not wrong, errors


@pytest.mark.parametrize("job", full_unless(jobs(1), lambda _, job: job in QUICK))
def test_on_one_rank(job: str) -> None:
    check(run_job(job))


@pytest.mark.full
@pytest.mark.parametrize("job", jobs(2))
def test_on_two_ranks(ranks, job: str) -> None:
    for errors in ranks(job):
        check(errors)
