"""Lightning's loop with exact updates, alone and on two ranks: gradients and losses are plain torch's."""

import pytest

from tests.exact.launch import of_ranks
from tests.unit.failures.table import names

pytestmark = pytest.mark.full
of_both = pytest.mark.parametrize("world", [1, 2], ids=["alone", "on two ranks"])
JOBS = ["float64", "float32", "refusals"]
STRATEGY = {1: "SingleDeviceStrategy", 2: "DDPStrategy"}


results = of_ranks("tests.integrations.modules:run_job", dict.fromkeys((1, 2), JOBS))


@of_both
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_updates_are_exact_and_the_schedule_moves_once_with_each(results, world, dtype):
    for found in results(dtype, world):
        assert found["gradients"] <= (1e-12 if dtype == "float64" else 1e-3)
        assert found["losses"] <= (1e-6 if dtype == "float64" else 1e-4)  # Lightning keeps float32
        assert found["global_step"] == found["schedule"] == found["expected"] == {1: 4, 2: 2}[world]
        assert found["strategy"] == STRATEGY[world]
        assert found["saved"]


def test_what_cannot_be_exact_is_refused(results):
    (said,) = results("refusals", 1)
    for name, seen in (("batch", "dict … collate_fn=list"), ("schedule", "ReduceLR"), ("precision", "'16-true'")):
        assert names(said[name], f"PlanError: {seen}"), said[name]
