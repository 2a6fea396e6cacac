"""A fault of one rank's hardware is found before the step, and the rank is named."""

import json
from pathlib import Path

import pytest

from tests.elastic import hardware
from tests.train.on_ranks import on_ranks


@pytest.mark.parametrize("wrapper", hardware.KINDS)
@pytest.mark.parametrize("num", [4, pytest.param(60, marks=pytest.mark.full)])
def test_planted_faults_are_found_and_named(tmp_path: Path, num: int, wrapper: str) -> None:
    planted = hardware.faults(num, wrapper, 3, num)
    for fault, *said in zip(planted, *on_ranks(3, tmp_path, hardware.found_by, planted, wrapper), strict=True):
        assert hardware.is_named(fault, said), (fault, said)


@pytest.mark.parametrize(
    ("dtype", "num", "wrapper"),
    [
        ("float32", 4, "ddp"),
        ("float32", 4, "fsdp2"),
        *(pytest.param(each, 200, "ddp", marks=pytest.mark.full) for each in ("float32", "bfloat16")),
    ],
)
def test_healthy_ranks_are_blamed_for_nothing(tmp_path: Path, dtype: str, num: int, wrapper: str) -> None:
    assert on_ranks(3, tmp_path, hardware.healthy, dtype, num, wrapper) == [[], [], []]


def test_the_result_is_of_faults_that_were_named() -> None:
    result = json.loads(hardware.RESULT.read_text())
    assert all(result[each]["planted"] == result[each]["named"] >= 50 for each in hardware.KINDS)
    assert set(result["cost_percent_of_cpu_seconds"]) == {"10", "100"}
