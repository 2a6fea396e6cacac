"""Sixty damaged checkpoints: the state before, exactly, or one line; a thousand: `python -m tests.elastic.damage`."""

import json
from pathlib import Path

import pytest

from tests.elastic.damage import LAYOUTS, RESULT, is_sound, kinds_of
from tests.elastic.trials import counts_of, trials
from tests.train.on_ranks import on_ranks


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_checkpoint_is_never_gone_on_from(tmp_path: Path, layout: str) -> None:
    num_ranks, overrides = LAYOUTS[layout]
    found = on_ranks(num_ranks, tmp_path, trials, tmp_path, overrides, kinds_of(30, 1), 1)
    counts = counts_of(found)
    assert sum(sum(outcomes.values()) for outcomes in counts.values()) == 30
    assert is_sound(counts), counts


def test_the_thousand_were_sound() -> None:
    result = json.loads(RESULT.read_text())
    assert result["num_damages"] >= 1000
    assert all(is_sound(counts) for counts in result["counts"].values())
