"""A few kills and damages of what kills.py does many of, and that its result holds what is promised."""

import json
from pathlib import Path

import pytest

from tests.elastic import kills


@pytest.mark.full
def test_a_run_that_is_killed_and_damaged_ends_as_one_that_never_was(tmp_path: Path) -> None:
    outcomes = kills.series(tmp_path, [(2,), (2, 3), (3, 2)], kills_per_run=3)
    kills.check(outcomes)
    assert sum(each.kills for each in outcomes) == 9


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("size", [3, 4])
def test_ranks_of_ddp_go_on_bit_for_bit(tmp_path: Path, size: int) -> None:
    kills.check(kills.series(tmp_path, [(size,)], 2, kills.DDP))


def test_the_result_of_ddp_is_of_twenty_kills_on_three_and_on_four_ranks() -> None:
    result = json.loads(kills.DDP_RESULT.read_text())
    for size in (3, 4):
        runs = [each for each in result["runs"] if each["sizes"] == [size]]
        assert sum(each["kills"] for each in runs) >= 20
        assert all(each["difference"] == 0 and each["same_rows"] for each in runs)


def test_the_result_of_same_bits_is_of_twenty_kills() -> None:
    result = json.loads(kills.SAME_BITS_RESULT.read_text())
    assert result["kills"] >= 20
    assert all(each["difference"] == 0 and each["same_rows"] for each in result["runs"])


def test_the_result_is_of_kills_and_damages_of_each_kind() -> None:
    result = json.loads(kills.RESULT.read_text())
    assert result["kills"] >= 100
    assert result["inside_saves"] >= 20
    assert 0 < result["of_one_rank"] < result["kills"]
    # The result may have kinds of files that runs no longer write.
    assert set(result["damages"]) >= {kills.CHECKPOINTS, *kills.BESIDE}
    assert min(result["damages"].values()) >= 20
    alone = [each for each in result["runs"] if len(each["sizes"]) == 1]
    assert {tuple(each["sizes"]) for each in alone} == {(1,), (2,), (3,)}
    assert all(each["difference"] == 0 and each["same_rows"] for each in alone)
    assert 0 < result["largest_difference_on_other_ranks"] <= kills.LARGEST
