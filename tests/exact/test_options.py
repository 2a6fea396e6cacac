"""The same bits with the wrappers' options, and where parameters are frozen."""

import pytest

from tests.exact.launch import of_ranks
from tests.exact.options import CASES, OPTIONS, world_of
from tests.tiers import some

pytestmark = pytest.mark.slow
JOBS = [
    f"{option}:{case}:{wrapper}:{world_of(wrapper)}:{sync}"
    for option, wrappers in OPTIONS.items()
    for wrapper in wrappers
    for case in CASES
    for sync in ("last", "every")
]


results = of_ranks("tests.exact.options:run_job", JOBS)


@pytest.mark.parametrize("job", some(JOBS, 4))
def test_same_bits_with_the_option(results, job: str) -> None:
    for value in results(job):
        assert value["gradient"] == 0, value["parameter"]
        assert not value["wrong"], value["wrong"]
