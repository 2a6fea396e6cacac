"""Recipes at random: each works, or ends with one line."""

import json

import pytest

from tests.elastic.fuzz import RESULT, fuzz

pytestmark = pytest.mark.full


def test_recipes_work_or_end_with_one_line() -> None:
    outcomes = fuzz(num_read=200, num_run=5)
    assert not outcomes.bugs, "\n\n".join(outcomes.bugs)
    for what in ("read: works", "read: refused", "plan: works", "run: works"):
        assert outcomes.counts[what], outcomes.counts


def test_the_long_list_that_is_kept_has_no_bug() -> None:
    kept = json.loads(RESULT.read_text())
    assert kept["bugs"] == []
    assert kept["read: works"] > 10_000 / 2
    assert kept["run: works"] > 200 / 2
