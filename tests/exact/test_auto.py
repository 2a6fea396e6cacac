"""The bound is chosen once for all ranks, and training goes on as if nothing had been measured: the same bits."""

import pytest

from tests.exact.auto import LONGEST
from tests.exact.launch import of_ranks
from tests.tiers import some

pytestmark = pytest.mark.slow
JOBS = [
    "plain:1:auto", "plain:2:auto", "plain:3:auto", "ddp:2:auto", "ddp:3:auto", "ddp:2:every", "ddp-find-unused:2:auto",
    "ddp-bucket-view:2:auto", "fsdp2:1:auto", "fsdp2:2:auto", "fsdp2:3:auto", "fsdp2:2:last", "hsdp:2:auto",
    "replicate:2:auto", "tp:2:auto", "fsdp1:2:auto", "fsdp1:2:last",
]  # fmt: skip


results = of_ranks("tests.exact.auto:run_job", JOBS)


@pytest.mark.parametrize("job", some(JOBS, 6))
def test_same_bits_and_the_same_bound_on_every_rank(results, job: str) -> None:
    values = results(job)
    for value in values:
        assert not value["differ"]
        assert value["compared"] > 20
    assert len({value["bound"] for value in values}) == len({value["microbatches"] for value in values}) == 1
    assert values[0]["microbatches"] > 1, "the cap is to cut"
    assert values[0]["measured"][:2] == [1, 4]
    assert values[0]["longest"] == max(value["longest"] for value in values) <= LONGEST
