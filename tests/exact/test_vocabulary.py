"""A head that sums its cross-entropy gives every wrapper the exact gradient."""

import pytest

from tests.exact.launch import of_ranks
from tests.exact.vocabulary import CASES, HEAD_APART, WRAPPED
from tests.tiers import some

pytestmark = pytest.mark.slow
JOBS = [
    f"{wrapper}:{case}:{world}:{sync}"
    for wrapper, world in {**WRAPPED, HEAD_APART: 2}.items()
    for case in CASES
    for sync in (("last", "every") if world > 1 else ("auto",))
]


results = of_ranks("tests.exact.vocabulary:run_job", JOBS)


@pytest.mark.parametrize("job", some(JOBS, 5))
def test_exact_without_logits(results, job: str) -> None:
    for value in results(job):
        assert value["gradient"] <= 1e-12, value["parameter"]
        assert not value["wrong"], value["wrong"]
        assert value["num_summed"] > 0
