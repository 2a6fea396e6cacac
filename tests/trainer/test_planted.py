"""The table of bugs in parts of the trainer is one of this library, and each of its bugs was caught."""

import json

from tests.trainer.mutations import place_of, read_sources
from tests.trainer.planted import EXTRA_BUGS, RESULT, ROOT


def test_every_bug_can_be_planted_and_has_its_test() -> None:
    sources = read_sources()
    for bug in EXTRA_BUGS:
        place_of(bug, sources)
        file, _, test = bug.check.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), bug


def test_every_bug_was_caught() -> None:
    assert json.loads(RESULT.read_text()) == {bug.name: "caught" for bug in EXTRA_BUGS}
