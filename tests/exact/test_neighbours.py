"""A rank whose neighbour is frozen leaves by itself, and one whose neighbours run out of memory goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("neighbours")
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, "-m", "tests.exact.neighbours", str(folder)]
    ran = subprocess.run(command, env=os.environ | quiet, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("job", ["frozen", "frozen-in-finalize"])
def test_who_waits_for_a_frozen_store_leaves_with_its_own_error(results, job: str) -> None:
    _, told = results[job]
    assert told is not None, "it was still there"
    assert "Timed out waiting" in told


def test_other_groups_of_the_job_do_not_hear(results) -> None:
    assert results["beside"][:2] == ["fine", "fine"]


def test_its_own_group_does(results) -> None:
    told = results["beside"][2:]
    assert told[0] == told[1]
    assert told[0].startswith("MegabatchError: rank 3 of 4 ran out of memory in sample 0 of its batch alone")
