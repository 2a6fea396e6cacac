"""The same bits with the wrappers' options, and where parameters are frozen."""

import pytest

from tests.exact.launch import launch_by_world
from tests.exact.options import CASES, OPTIONS, world_of

pytestmark = pytest.mark.slow
JOBS = [
    f"{option}:{case}:{wrapper}:{world_of(wrapper)}:{sync}"
    for option, wrappers in OPTIONS.items()
    for wrapper in wrappers
    for case in CASES
    for sync in ("last", "every")
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch_by_world("tests.exact.options:run_job", JOBS, tmp_path_factory.mktemp("options"))


@pytest.mark.parametrize("job", JOBS)
def test_same_bits_with_the_option(results, job: str) -> None:
    for result in results[job]:
        assert "error" not in result, result["error"]
        value = result["value"]
        assert value["gradient"] == 0, value["parameter"]
        assert not value["wrong"], value["wrong"]
