"""Cut is uncut: the gradient of an update is the oracle's, in every cell of a sample of the table."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.exact.cells import ALL_WORLDS, Cell, sampled
from tests.exact.launch import Result, of_ranks

pytestmark = pytest.mark.slow
NAMES = {world: [cell.name for cell in sampled() if cell.world == world] for world in ALL_WORLDS}
results = of_ranks("tests.exact.harness:run_cell", NAMES)


def params() -> Iterator[Any]:
    """Cells of a world size run in one process; every second of few ranks is quick."""
    for number, cell in enumerate(sampled()):
        group = pytest.mark.xdist_group(f"cells of {cell.world} ranks")
        is_quick = cell.world <= 4 and number % 2 == 0
        yield pytest.param(cell, marks=[group] if is_quick else [group, pytest.mark.full], id=cell.name)


@pytest.mark.parametrize("cell", list(params()))
def test_gradient_is_that_of_the_uncut_update(cell: Cell, results) -> None:
    for result in results.results(cell.name):
        check(cell, result)


def check(cell: Cell, result: Result) -> None:
    """One rank's result of a cell: gradients, and everything that is reported."""
    assert "error" not in result, result["error"]
    value = result["value"]
    assert value["gradient"] <= cell.tolerance, f"gradient of {value['parameter']}: {value['gradient']:.2e}"
    assert not value["wrong"], "; ".join(value["wrong"])
