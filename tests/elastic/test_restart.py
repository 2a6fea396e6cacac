"""A rank is lost and torchrun starts all of them again, by the command that began the run: it goes on by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.conftest import Bench
from tests.train.processes import overrides
from tests.train.test_resume import states_of, timeless

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
OWN = """
import os
import signal
from pathlib import Path


def after_update(event):
    mark = Path(__file__).with_name(f"killed-{event.step}")
    if {2: "1", 5: "0"}.get(event.step) == os.environ["RANK"] and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_torchrun_starts_a_run_again_that_goes_on_bit_for_bit(bench: Bench, tmp_path: Path) -> None:
    """Rank 1 is lost before the first checkpoint, and rank 0 after it."""
    values = {"parallel__wrapper": "ddp", "run__save_every": 3, "data__cache": tmp_path / "cache"}
    whole = tmp_path / "whole"
    bench.train(ranks=2, run__folder=whole, **values)
    (tmp_path / "own.py").write_text(OWN)
    values |= {"run__after_update": f"{tmp_path}/own.py:after_update"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    command = [*torchrun, "-m", "megabatch", "train", str(bench.recipe), *overrides(values)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said.count("nothing was saved yet: begins again") == 1
    assert said.count(f"resumed from {bench.folder}/checkpoints/step-3") == 1
    assert done.stderr.count("lost another rank, which was killed or ran out of memory") == 2
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    one, other = (
        states_of(folder / "checkpoints" / "step-6", tmp_path / f"{number}.pt")
        for number, folder in enumerate((whole, bench.folder))
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    again = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100
    )  # fmt: skip
    assert again.returncode != 0, "another job does not go on with a run unasked, however often it is started"
    assert f"megabatch: {bench.folder} already holds a run; " in again.stderr
    assert "resumed" not in again.stdout
