"""One spawn per world size, with all its cells inside."""

import pytest

from tests.exact.cells import ALL_WORLDS, sampled
from tests.exact.launch import Result, launch

Results = dict[str, list[Result]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory):
    """Results of a world size's cells, by name and rank; run when they are first asked for."""
    found: dict[int, Results] = {}

    def of(world: int) -> Results:
        assert world in ALL_WORLDS
        if world not in found:
            names = [cell.name for cell in sampled() if cell.world == world]
            folder = tmp_path_factory.mktemp(f"world{world}")
            found[world] = launch(world, "tests.exact.harness:run_cell", names, folder)
        return found[world]

    return of
