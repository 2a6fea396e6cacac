"""Cut is uncut: the gradient of an update is the oracle's, in every cell of a sample of the table."""

import pytest

from tests.exact.cells import Cell, sampled
from tests.exact.launch import Result

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cell", sampled(), ids=lambda cell: cell.name)
def test_gradient_is_that_of_the_uncut_update(cell: Cell, results) -> None:
    for result in results(cell.world)[cell.name]:
        check(cell, result)


def check(cell: Cell, result: Result) -> None:
    """One rank's result of a cell: gradients, and everything that is reported."""
    assert "error" not in result, result["error"]
    value = result["value"]
    assert value["gradient"] <= cell.tolerance, f"gradient of {value['parameter']}: {value['gradient']:.2e}"
    assert not value["wrong"], "; ".join(value["wrong"])
