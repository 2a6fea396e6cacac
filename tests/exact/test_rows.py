"""Samples in one row over several ranks: the gradient is that of samples apart, and a fault is its own rank's."""

import pytest

from tests.exact.launch import of_ranks
from tests.exact.rows import LENGTHS

pytestmark = pytest.mark.slow
GRADIENTS = ["gradient:ddp:2:last", "gradient:ddp:3:every", "gradient:fsdp2:2:every", "gradient:hsdp:4:replica_last"]
FAULTS = ["fault:ddp:2:last", "fault:hsdp:4:replica_last", "fault:hsdp-foreign:4:every", "fault:fsdp1-hybrid:4:every"]
DUMMY = "dummy microbatch:ddp:2:last"


results = of_ranks("tests.exact.rows:run_job", [*GRADIENTS, *FAULTS, DUMMY])


@pytest.mark.parametrize("job", GRADIENTS)
def test_the_gradient_is_that_of_samples_apart(results, job: str) -> None:
    for found in results(job):
        assert found["error"] <= 1e-12
        assert found["tokens"] == sum(LENGTHS)
        assert found["padding"] == 0


@pytest.mark.parametrize("job", FAULTS)
def test_a_fault_is_its_own_ranks(results, job: str) -> None:
    world = int(job.split(":")[2])
    for found in results(job):
        assert found["problems"] == [f"the loss is not finite on data rank {rank} of {world}" for rank in range(world)]


def test_a_stand_in_holds_no_more_than_a_microbatch(results) -> None:
    assert max(found["most"] for found in results(DUMMY)) <= 16
