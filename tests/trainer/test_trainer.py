"""The trainer does what a plain loop does, and bugs that are planted in it are caught."""

import pytest

from tests.exact.launch import of_ranks
from tests.trainer.checks import CHECKS

pytestmark = pytest.mark.slow
by_world = {world: [name for name, (its, _) in CHECKS.items() if its == world] for world in (1, 2)}
results = of_ranks("tests.trainer.checks:run_check", by_world)


@pytest.mark.parametrize("name", CHECKS)
def test_the_trainer_passes(results, name: str) -> None:
    results(name)
