"""Sparse gradients are summed exactly, whichever ranks have one, and clipped as dense ones are."""

import pytest

from tests.exact.launch import of_ranks
from tests.unit.sparse_gradients import JOBS, USES, use_of

pytestmark = pytest.mark.slow


results = of_ranks("tests.unit.sparse_gradients:run_job", dict.fromkeys((1, 2, 3), JOBS))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", JOBS)
def test_sums_over_ranks_are_exact(results, name: str, world: int) -> None:
    case, setting = name.split(":")
    found = results(name, world)
    uses = {use_of(rank, USES[case]) for rank in range(world)}
    layout = "strided" if "dense" in uses else "sparse_coo" if "sparse" in uses else "none"
    bound = {"exact": 0.0 if world < 3 else 1e-15, "clipped": 1e-14, "wide": 2.0**-7}[setting]
    for result in found:
        assert result["layout"] == layout
        assert result["errors"].keys() == ({"linear"} if layout == "none" else {"linear", "table"})
        assert max(result["errors"].values()) <= bound
