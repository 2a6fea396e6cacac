"""A rank is lost and torchrun starts all of them again, by the command that began the run: it goes on by itself."""

import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import MegabatchError
from megabatch.train.checkpoints import run_folder as starting
from megabatch.train.config import Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import NO_JOB, Job, join_attempt
from tests.train.conftest import Bench, states_of, timeless
from tests.train.processes import CONTEXT, overrides

pytestmark = pytest.mark.full
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
    torchrun += ["--monitor-interval=4"]  # seconds in which a rank that is left can say so, before it is stopped
    command = [*torchrun, "-m", "megabatch", "train", str(bench.recipe), *overrides(values)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert sum(line.startswith("nothing was saved yet: the run begins at update 0") for line in said) == 1
    assert said.count(f"resumed from {bench.folder}/checkpoints/step-3") == 1
    assert done.stderr.count("lost another rank, which was killed or ran out of memory") == 2
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    one, other = (
        states_of(run / "checkpoints" / "step-6", tmp_path / f"{number}.pt")
        for number, run in enumerate((whole, bench.folder))
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def at(job: Job) -> Ranks:
    return Ranks(0, 1, torch.device("cpu"), job=job)


def test_a_run_is_gone_on_with_unasked_by_its_own_job_alone(tmp_path: Path) -> None:
    """A job that torchrun starts again and again, whoever has refused what for which reason."""
    config = Config(
        model=ModelConfig(config={"model_type": "llama"}), update=UpdateConfig(global_batch_size=8, micro_batch_size=1),
        run=RunConfig(folder=str(tmp_path / "run"), device="cpu"),
    )  # fmt: skip
    first, console, run = Job("one", "given", 0), Console(enabled=True, loss_digits=4), tmp_path / "run"
    starting.open_run_folder(run, config, at(first), console, is_new=True)
    starting.check_run_folder(run, config, at(Job("two")))  # which has made no update
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    for job, is_its_own in (
        (first, True),
        (Job("one", "given", 2), True),
        (Job("one"), True),
        (Job("two", "given", 1), True),  # its store has moved to another host
        (Job("two", "given", 0), False),  # another job that was given the same name
        (Job("two", "", 3), False),
        (NO_JOB, False),
    ):
        with nullcontext() if is_its_own else pytest.raises(MegabatchError, match="has made 1 update and saved none; "):
            starting.check_run_folder(run, config, at(job))
        assert not starting.resume_if_restarted(config, at(job)).run.resume
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-1")
    assert starting.resume_if_restarted(config, at(first)).run.resume
    assert not starting.resume_if_restarted(config, at(Job("two", "given", 0))).run.resume


def meet(port: int, rank: int, delay: float, sender: Any) -> None:
    time.sleep(delay)
    store, job = join_attempt(dist.TCPStore("127.0.0.1", port, is_master=False), rank, 3)
    sender.send((store.add("failure", 1), job.key))
    time.sleep(1)


def test_attempts_at_one_store_do_not_see_each_other() -> None:
    """Not even where one has never been complete; the second rank of each comes late."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard: list[Any] = []
    for ranks in ((1, 2), (0, 1), (0, 1, 2), (0, 1, 2)):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        processes = [CONTEXT.Process(target=meet, args=(store.port, rank, 0.3 * (rank == 1), sender)) for rank in ranks]
        for process in processes:
            process.start()
        for process in processes:
            process.join(1.5 if len(ranks) < 3 else 20)
            process.kill()
        while len(ranks) == 3 and receiver.poll():
            heard.append(receiver.recv())
    assert sorted(number for number, _ in heard) == [1, 1, 2, 2, 3, 3], "each attempt counts for itself"
    assert len({key for _, key in heard}) == 1, "of the job"
