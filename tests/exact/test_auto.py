"""The bound is chosen once for all ranks, and training goes on as if nothing had been measured: the same bits."""

import pytest

from tests.exact.auto import LONGEST
from tests.exact.launch import launch_by_world

pytestmark = pytest.mark.slow
JOBS = [
    "plain:1:auto", "plain:2:auto", "plain:3:auto", "ddp:2:auto", "ddp:3:auto", "ddp:2:every", "ddp-find-unused:2:auto",
    "ddp-bucket-view:2:auto", "fsdp2:1:auto", "fsdp2:2:auto", "fsdp2:3:auto", "fsdp2:2:last", "hsdp:2:auto",
    "replicate:2:auto", "tp:2:auto", "fsdp1:2:auto", "fsdp1:2:last",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch_by_world("tests.exact.auto:run_job", JOBS, tmp_path_factory.mktemp("auto"))


@pytest.mark.parametrize("job", JOBS)
def test_same_bits_and_the_same_bound_on_every_rank(results, job: str) -> None:
    for result in results[job]:
        assert "error" not in result, result["error"]
        assert not result["value"]["differ"]
        assert result["value"]["compared"] > 20
    values = [result["value"] for result in results[job]]
    assert len({value["bound"] for value in values}) == len({value["microbatches"] for value in values}) == 1
    assert values[0]["microbatches"] > 1, "the cap is to cut"
    assert values[0]["measured"][:2] == [1, 4]
    assert values[0]["longest"] == max(value["longest"] for value in values) <= LONGEST
