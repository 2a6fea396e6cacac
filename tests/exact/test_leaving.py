"""Memory runs out where ranks wait for each other: all end by themselves, and all name the one that it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.failures.memory import LEAVING

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaving")
    (folder / "jobs.json").write_text(json.dumps(list(LEAVING)))
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, "-m", "tests.exact.leaving", str(folder)]
    ran = subprocess.run(command, env=os.environ | quiet, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("job", LEAVING)
def test_all_leave_and_name_the_one(results, job: str) -> None:
    ended, told = results[job]["ended"], results[job]["told"]
    assert ended, "a process was still there"
    assert [each[:2] for each in told] == [["MegabatchError", LEAVING[job]]] * len(told)
    assert all(each[2] == told[0][2] is not None for each in told), "what to start again with"
