"""A fault of one rank's hardware is found before the step, and the rank is named."""

from pathlib import Path

import pytest

from tests.elastic import hardware
from tests.train.on_ranks import on_ranks


@pytest.mark.parametrize("num", [8, pytest.param(60, marks=pytest.mark.full)])
def test_planted_faults_are_found_and_named(tmp_path: Path, num: int) -> None:
    planted = hardware.faults(num, 3, num)
    for fault, *said in zip(planted, *on_ranks(3, tmp_path, hardware.found_by, planted), strict=True):
        assert len(set(said)) == 1, fault  # so that one of them says it
        assert said[0].startswith(f"a fault of the hardware at rank {fault.rank} of 3, found in update 2: "), fault


@pytest.mark.parametrize(
    ("dtype", "num"),
    [("float32", 10), *(pytest.param(each, 200, marks=pytest.mark.full) for each in ("float32", "bfloat16"))],
)
def test_healthy_ranks_are_blamed_for_nothing(tmp_path: Path, dtype: str, num: int) -> None:
    assert on_ranks(3, tmp_path, hardware.healthy, dtype, num) == [[], [], []]
