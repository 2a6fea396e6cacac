"""Planted bugs are caught: the exact cells fail with each of them, and only where the bug can be seen."""

import shutil
from pathlib import Path

import pytest

import megabatch
from tests.exact.cells import Cell
from tests.exact.launch import Result, Run, launch_all
from tests.exact.mutations import MUTATIONS, WORLD, Mutation
from tests.exact.test_exact import check

pytestmark = pytest.mark.slow
TIMEOUT_SECONDS = 4.0  # ranks that disagree wait for each other; those that agree are done in a tenth of a second
LIBRARY = Path(megabatch.__file__).parent


def plant(mutation: Mutation, folder: Path) -> None:
    """A copy of the library with one text replaced."""
    shutil.copytree(LIBRARY, folder / "megabatch", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "megabatch" / mutation.file
    source = file.read_text()
    assert source.count(mutation.text) == 1, f"{mutation.text!r} occurs {source.count(mutation.text)} times in {file}"
    file.write_text(source.replace(mutation.text, mutation.planted))


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> dict[str, set[str]]:
    """The wrappers whose cells fail, by mutation; "" is the library as it is."""
    folder = tmp_path_factory.mktemp("mutations")
    cells = list(dict.fromkeys(cell for mutation in MUTATIONS for cell in mutation.cells))
    runs = {"": Run(WORLD, cells, folder / "none")}
    for number, mutation in enumerate(MUTATIONS):
        planted = folder / str(number)
        plant(mutation, planted)
        cells = mutation.cells
        runs[mutation.name] = Run(WORLD, cells, planted / "run", [str(planted)], len(cells), TIMEOUT_SECONDS)
    found = launch_all("tests.exact.harness:run_cell", list(runs.values()), folder)
    return {name: _failing(results) for name, results in zip(runs, found, strict=True)}


def _failing(results: dict[str, list[Result]]) -> set[str]:
    return {Cell.parse(name).wrapper for name, ranks in results.items() if not _passes(Cell.parse(name), ranks)}


def _passes(cell: Cell, ranks: list[Result]) -> bool:
    try:
        for result in ranks:
            check(cell, result)
    except AssertionError:
        return False
    return True


def test_the_library_passes(failing) -> None:
    assert failing[""] == set()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_the_planted_bug_is_caught(failing, mutation: Mutation) -> None:
    assert failing[mutation.name] == set(mutation.wrappers)
