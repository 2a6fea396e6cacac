"""A loop over what Accelerate has prepared: exact, and one step of the schedule per update, alone and on two ranks."""

import pytest

from tests.exact.launch import of_ranks
from tests.unit.failures.table import check_error

pytestmark = pytest.mark.full
of_both = pytest.mark.parametrize("world", [1, 2], ids=["alone", "on two ranks"])
JOBS = ["float64", "float32", "saved", "refused"]
WRAPPED = {1: "GPT2LMHeadModel", 2: "DistributedDataParallel"}


results = of_ranks("tests.integrations.prepared:run_job", dict.fromkeys((1, 2), JOBS))


@of_both
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_updates_are_exact_and_the_schedule_moves_once_with_each(results, world, dtype):
    for found in results(dtype, world):
        assert found["gradient"] <= (1e-12 if dtype == "float64" else 1e-5)
        assert found["weights"] <= (1e-10 if dtype == "float64" else 1e-3)
        assert found["losses"] <= (1e-12 if dtype == "float64" else 1e-4)
        assert found["schedule"] == found["updates"] == 3
        assert found["model"] == WRAPPED[world]


@of_both
def test_a_state_of_accelerate_holds_what_was_stepped(results, world):
    for found in results("saved", world):
        assert found == {"same": True, "steps": [2], "schedule": 2}


@of_both
def test_float16_is_refused(results, world):
    for found in results("refused", world):
        check_error(found, "mixed_precision='fp16'")
