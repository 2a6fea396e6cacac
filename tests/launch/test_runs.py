"""The files of launch/ are run: real processes, started by the real torchrun or by Ray, killed, and started again.

Each run ends with the rows of one that was never disturbed. Slurm's srun, scancel and scontrol want a cluster, so they
are stood in for: one step on this machine, a signal to it, and a note of what was queued.
"""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from tests.train.conftest import Bench, bench, bench_in, timeless
from tests.train.processes import overrides as arguments_of

__all__ = ["bench"]

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SECONDS = 240  # for two starts of two ranks; alone on two cores it takes a tenth
OWN = '''
"""Files beside this one say what is to happen: kill-STEP-RANK whom to kill, once; slow: updates that take a while."""

import os
import signal
import time
from pathlib import Path

HERE, RANK = Path(__file__).parent, os.environ["RANK"]


def after_update(event):
    time.sleep(0.3 if event.step >= 3 and (HERE / "slow").exists() else 0)
    for parent in ("", "parent-"):
        kill = HERE / f"kill-{parent}{event.step}-{RANK}"
        if kill.exists():
            kill.unlink()
            os.kill(os.getppid() if parent else os.getpid(), signal.SIGKILL)
            time.sleep(60)
'''
SLURM = {
    "srun": 'echo $$ > step\nexec "$@"\n',
    "scancel": 'echo "scancel $*" >> calls\nkill -TERM "$(cat step)"\n',
    "scontrol": 'echo "scontrol $*" >> calls\n',
}
KEYS = {"parallel__wrapper": "ddp", "run__save_every": 2, "run__max_epochs": 3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of a run that was never disturbed."""
    bench = bench_in(tmp_path_factory.mktemp("whole"))
    bench.train(ranks=2, **KEYS)
    return bench.rows()


@pytest.fixture
def overrides(bench: Bench) -> list[str]:
    """The overrides of the recipe by which a run is disturbed."""
    (bench.path / "own.py").write_text(OWN)
    return arguments_of({**KEYS, "run__after_update": "own.py:after_update", "data__cache": "cache"})


def environ(bench: Bench, **values: str) -> dict[str, str]:
    """With torchrun and megabatch, and no more threads than cores."""
    path = f"{bench.path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **values}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def start(bench: Bench, command: list[str], **values: str) -> subprocess.Popen[str]:
    """A process, which leads a group of its own, in the folder of the recipe; what it says goes to `said`."""
    with (bench.path / "said").open("a") as said:
        return subprocess.Popen(
            command, cwd=bench.path, env=environ(bench, **values), text=True, stdout=said, stderr=said,
            start_new_session=True,
        )  # fmt: skip


def said(bench: Bench) -> str:
    return (bench.path / "said").read_text()


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert reached(), process.poll()


def check(bench: Bench, whole: list[dict[str, Any]], *, begun: int, resumed: list[int]) -> None:
    """Assert that the run has the rows of one that was never disturbed, begun and gone on with so often."""
    folder = bench.path / "runs/recipe"
    assert timeless(bench.rows(folder)) == timeless(whole), said(bench)
    log = [line.partition("  ")[2] for line in (folder / "log.txt").read_text().splitlines()]
    assert sum(line.startswith("nothing was saved yet: the run begins at update 0") for line in log) == begun
    assert [line for line in log if line.startswith("resumed from ")] == [
        f"resumed from runs/recipe/checkpoints/step-{step}" for step in resumed
    ]


def test_one_machine_by_the_same_command_again(bench: Bench, overrides: list[str], whole: list[dict[str, Any]]) -> None:
    """Killed in update 1, before the first checkpoint, and after it; the last time by the run's folder."""
    for kill in ("kill-1-1", "kill-3-0"):
        (bench.path / kill).touch()
    command, given = ["bash", str(LAUNCH / "torchrun.sh")], ["recipe.toml", *overrides]
    ends = [start(bench, [*command, *each], PROCESSES="2").wait(SECONDS) for each in (given, given, ["runs/recipe"])]
    assert [end == 0 for end in ends] == [False, False, True], said(bench)
    check(bench, whole, begun=2, resumed=[2])


def test_several_machines_start_again_by_themselves(
    bench: Bench, overrides: list[str], whole: list[dict[str, Any]]
) -> None:
    """An agent for each of two, which meet; one loses its rank twice, before the first checkpoint and after it."""
    for kill in ("kill-1-1", "kill-3-1"):
        (bench.path / kill).touch()
    command = ["bash", str(LAUNCH / "nodes.sh"), "recipe.toml", *overrides]
    values = {"MEET_AT": "127.0.0.1", "NODES": "2", "PROCESSES": "1", "PORT": free_port()}
    agents = [start(bench, command, **values) for _ in range(2)]
    assert [agent.wait(SECONDS) for agent in agents] == [0, 0], said(bench)
    check(bench, whole, begun=2, resumed=[2])


@pytest.fixture
def slurm(bench: Bench) -> dict[str, str]:
    """A stand-in for Slurm, and the environment that it gives a job."""
    (bench.path / "bin").mkdir()
    for name, text in SLURM.items():
        (bench.path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (bench.path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7"}
    return {**job, "MEET_AT": "127.0.0.1", "PROCESSES": "2", "PORT": free_port()}


def test_slurm_queues_a_job_again_that_is_out_of_time(
    bench: Bench, overrides: list[str], whole: list[dict[str, Any]], slurm: dict[str, str]
) -> None:
    """The run has saved by then, and goes on in the job's next time."""
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "recipe.toml", *overrides]
    (bench.path / "slow").touch()
    job = start(bench, command, **slurm)
    wait_until(lambda: "update    3 " in said(bench), job)
    os.kill(job.pid, signal.SIGUSR1)
    job.wait(SECONDS)
    assert (bench.path / "calls").read_text().splitlines() == ["scancel --signal=TERM 7.0", "scontrol requeue 7"]
    (stopped,) = [line for line in said(bench).splitlines() if line.startswith("stopped by SIGTERM after update ")]
    step = int(stopped.split()[5].rstrip(";"))
    (bench.path / "slow").unlink()
    assert start(bench, command, **slurm).wait(SECONDS) == 0, said(bench)
    check(bench, whole, begun=1, resumed=[step])


def test_slurm_does_not_queue_a_job_that_is_cancelled(bench: Bench, slurm: dict[str, str]) -> None:
    job = start(bench, ["bash", str(LAUNCH / "slurm.sbatch"), "recipe.toml"], **slurm)
    wait_until(lambda: (bench.path / "step").exists(), job)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(SECONDS) != 0
    assert not (bench.path / "calls").exists()
    os.killpg(job.pid, signal.SIGKILL)  # Slurm signals the job's steps itself


def test_skypilot_gives_the_command_again_elsewhere(
    bench: Bench, overrides: list[str], whole: list[dict[str, Any]]
) -> None:
    """A machine that is taken away with all that runs on it; what its file runs, told what SkyPilot tells a node."""
    text = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["run"]
    values = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "2", "SKYPILOT_NODE_IPS": "127.0.0.1"}
    values |= {"SKYPILOT_TASK_ID": "managed-1", "RECIPE": "recipe.toml", "PORT": free_port()}
    script = text.replace("/runs/", "runs/").replace("--run.save_every=50", " ".join(overrides))
    (bench.path / "slow").touch()
    first = start(bench, ["bash", "-c", script], **values)
    wait_until(lambda: "update    3 " in said(bench), first)
    kill_all_of(first)
    (bench.path / "slow").unlink()
    assert start(bench, ["bash", "-c", script], **values).wait(SECONDS) == 0, said(bench)
    check(bench, whole, begun=1, resumed=[2])


def kill_all_of(first: subprocess.Popen[str]) -> None:
    """A process and all below it: torchrun gives each of its ranks a session of its own."""
    left = [first.pid]
    while left:
        process = left.pop()
        children = Path(f"/proc/{process}/task/{process}/children")
        left += [int(child) for child in children.read_text().split()] if children.exists() else []
        os.kill(process, signal.SIGKILL)
    first.wait()


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="ray is not installed; pip install -c constraints.txt 'megabatch[launch]'",
)
def test_ray_starts_lost_workers_again(bench: Bench, overrides: list[str], whole: list[dict[str, Any]]) -> None:
    """A rank is killed, and then a worker of Ray's, with which its rank ends."""
    for kill in ("kill-3-1", "kill-parent-5-0"):
        (bench.path / kill).touch()
    command = [sys.executable, str(LAUNCH / "ray_train.py"), "recipe.toml", *overrides]
    told = {"WORKERS": "2", "HOME": str(bench.path), "RAY_USAGE_STATS_ENABLED": "0"}
    with TemporaryDirectory(prefix="ray") as short:  # for the names of sockets
        assert start(bench, command, RAY_TMPDIR=short, **told).wait(2 * SECONDS) == 0, said(bench)
    check(bench, whole, begun=1, resumed=[2, 4])
