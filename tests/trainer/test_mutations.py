"""Bugs that are planted in the trainer are caught."""

from pathlib import Path

import pytest

from tests.exact.launch import Run, launch_all
from tests.trainer.checks import CHECKS
from tests.trainer.mutations import BUGS, Bug, plant

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_the_planted_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    plant(bug, tmp_path)
    world, _ = CHECKS[bug.check]
    run = Run(world, [bug.check], tmp_path / "run", [str(tmp_path)])
    (found,) = launch_all("tests.trainer.checks:run_check", [run], tmp_path)
    errors = [result["error"] for result in found[bug.check] if "error" in result]
    assert errors, "nothing was noticed"
    assert any("AssertionError" in error for error in errors), errors  # and not: it could not be imported
