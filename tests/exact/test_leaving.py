"""A rank cannot go on where the others wait for it: all end by themselves, and all name the one that it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.failures.memory import LEAVING
from tests.unit.failures.table import check_error, check_ranks, names
from tests.unit.failures.two_ranks import UNUSED
from tests.unit.failures.wrappers import DDP_PASSED_BY

pytestmark = pytest.mark.full
UNREDUCED = {  # what DDP waits for, by the job of `tests.exact.leaving`
    "unused:2:last:1:backward:3:0": UNUSED,
    "unused:2:every:1:backward:3:1": UNUSED,
    "unused:3:last:1:backward:3:2": UNUSED,
    "unused:3:last:1:backward:3:0": UNUSED,
    "passed-by:3:last:1:backward:3:1": DDP_PASSED_BY,
}
BODIES = ["body:2:last:1:forward:0:0", "body:3:last:1:forward:1:2", "body:2:every:1:forward:1:1",
          "body-fsdp2:2:every:1:forward:1:0"]  # fmt: skip
STAGES = ["pp-fsdp2:4:last:2:forward:1:3", "pp-fsdp2:4:last:2:forward:3:0", "pp-ddp:4:last:2:forward:3:2"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaving")
    (folder / "jobs.json").write_text(json.dumps([*LEAVING, *UNREDUCED, *BODIES, *STAGES]))
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    command = [sys.executable, "-m", "tests.exact.leaving", str(folder)]
    ran = subprocess.run(command, env=os.environ | quiet, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("job", LEAVING)
def test_all_leave_and_name_the_one(results, job: str) -> None:
    ended, told = results[job]["ended"], results[job]["told"]
    assert ended, "a process was still there"
    assert {each[0] for each in told} == {"MegabatchError"}
    assert len({each[1] for each in told}) == 1
    check_error(told[0][1], LEAVING[job])
    assert all(each[2] == told[0][2] is not None for each in told), "what to start again with"


@pytest.mark.parametrize("job", UNREDUCED)
def test_what_one_rank_left_unreduced_is_said_on_all(results, job: str) -> None:
    ended, told = results[job]["ended"], results[job]["told"]
    assert ended, "a process was still there"
    world, culprit = int(job.split(":")[1]), int(job.split(":")[-1])
    heard = f"rank {culprit} of {world}: {UNREDUCED[job]}"
    expected = [UNREDUCED[job] if rank == culprit else heard for rank in range(world)]
    assert [each[::2] for each in told] == [["MegabatchError", None]] * world
    check_ranks([each[1] for each in told], expected)


@pytest.mark.parametrize("job", BODIES)
def test_an_error_in_the_body_of_one_rank_is_told_to_those_that_wait(results, job: str) -> None:
    ended, told = results[job]["ended"], results[job]["told"]
    assert ended, "a process was still there"
    world, index, culprit = (int(job.split(":")[each]) for each in (1, 5, 6))
    heard = f"rank {culprit} of {world} failed in microbatch {index} of 2 (ValueError: a bad row); mend … start"
    for rank, (kind, text, _) in enumerate(told):
        assert kind == ("ValueError" if rank == culprit else "MegabatchError"), text
        assert rank == culprit or names(text, heard), text


@pytest.mark.parametrize("job", STAGES)
def test_an_error_in_a_stage_of_one_rank_is_told_to_those_that_hold_the_same(results, job: str) -> None:
    ended, told = results[job]["ended"], results[job]["told"]
    assert ended, "a process was still there"
    culprit = int(job.split(":")[-1])
    failed = f"stage {culprit % 2} failed (ValueError: a bad row); mend … start again"
    expected = [failed if rank == culprit else f"rank {culprit} of 4: {failed}" for rank in range(4)]
    assert [each[0] for each in told] == ["MegabatchError"] * 4
    check_ranks([each[1] for each in told], expected)
