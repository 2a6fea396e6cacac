"""The committed result of the full table is that of the library as it is."""

import json

import pytest

from tests.exact import full

pytestmark = pytest.mark.slow  # of `make test`, since every change to the sources asks for a new result


@pytest.fixture(scope="module")
def result():
    return json.loads(full.RESULT.read_text())


def test_the_result_is_of_these_sources(result) -> None:
    assert result["sources"] == full.source_hashes(), "run `make exact` and commit tests/exact/result.json"


def test_the_result_has_every_cell_of_the_full_table(result) -> None:
    table = full.cells()
    assert (result["num_cells"], result["cells_sha256"]) == (len(table), full.digest(cell.name for cell in table))
    counts = (part["num_cells"] + part["num_cells_averaged_more_than_once"] for part in result["summary"].values())
    assert sum(counts) == len(table)


def test_every_cell_of_the_full_table_passed(result) -> None:
    assert result["failures"] == {}
    tolerances = {cell.name: cell.tolerance for cell in full.cells()}
    assert all(error <= tolerances[name] for name, error in result["errors"].items())


def test_comments_and_docstrings_are_no_code() -> None:
    source = '"""Module."""\n\n\ndef f(x):  # adds\n    """Add."""\n    return x + "#" + f"{x}"  # one\n'
    assert full.code_of(source) == 'def f(x):\n    return x + "#" + f"{x}"'
    assert full.code_of(source.replace("adds", "more").replace("Add.", "Add\n    it.")) == full.code_of(source)
    assert full.code_of(source.replace("x +", "x -")) != full.code_of(source)
