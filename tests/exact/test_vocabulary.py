"""A head that sums its cross-entropy gives every wrapper the exact gradient."""

import pytest

from tests.exact.launch import launch_by_world
from tests.exact.vocabulary import CASES, HEAD_APART, WRAPPED

pytestmark = pytest.mark.slow
JOBS = [
    f"{wrapper}:{case}:{world}:{sync}"
    for wrapper, world in {**WRAPPED, HEAD_APART: 2}.items()
    for case in CASES
    for sync in (("last", "every") if world > 1 else ("auto",))
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch_by_world("tests.exact.vocabulary:run_job", JOBS, tmp_path_factory.mktemp("vocabulary"))


@pytest.mark.parametrize("job", JOBS)
def test_exact_without_logits(results, job: str) -> None:
    for result in results[job]:
        assert "error" not in result, result["error"]
        value = result["value"]
        assert value["gradient"] <= 1e-12, value["parameter"]
        assert not value["wrong"], value["wrong"]
        assert value["num_summed"] > 0
