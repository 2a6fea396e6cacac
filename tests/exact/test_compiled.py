"""torch.compile and recomputation: the same gradients, nothing compiled twice, no collective more."""

import pytest

from tests.exact.compiled import WRAPPERS
from tests.exact.launch import of_ranks
from tests.tiers import some

pytestmark = pytest.mark.slow
COMPILED = [f"compile:{wrapper}:{sync}" for wrapper, syncs in WRAPPERS.items() for sync in syncs]
RECOMPUTED = ["recompute:every", "recompute:last"]
INDUCTOR = ["inductor:plain:auto"]


values = of_ranks("tests.exact.compiled:run_job", {1: INDUCTOR, 2: [*COMPILED, *RECOMPUTED]})


@pytest.mark.parametrize("name", some(COMPILED, 4))
def test_reduction_microbatches_and_stand_ins_compile_nothing_again(values, name: str) -> None:
    for value in values(name):
        first, *later = value["graphs"]
        assert first > 0
        assert set(later) == {first}
        assert max(value["errors"]) < 1e-15


@pytest.mark.full
@pytest.mark.parametrize("name", INDUCTOR)
def test_inductor_gives_the_same_gradients(values, name: str) -> None:
    for value in values(name):
        assert value["graphs"] == 1
        assert max(value["errors"]) < 1e-6


@pytest.mark.parametrize("name", RECOMPUTED)
def test_blocks_that_recompute_have_the_same_gradients_and_collectives(values, name: str) -> None:
    for value in values(name):
        assert value["error True"] <= 1e-12
        assert value["True"] == value["False"]
        assert any("scatter" in collective for collective in value["True"])
