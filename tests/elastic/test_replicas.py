"""A recipe on three replicas, each under a torchrun of its own, of which two are killed and come back."""

import fcntl
import os
import re
import subprocess
import sys
import threading
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import elastic_torchft, result
from megabatch import MegabatchError
from megabatch.train import Callback
from megabatch.train.checkpoints.run_folder import enter_shared_folder, lock_run
from megabatch.train.checkpoints.writer import CheckpointRequest, Writer
from megabatch.train.replicas import check_callbacks, check_launch
from megabatch.train.runtime.files import JsonlFile
from megabatch.train.runtime.ranks import Ranks
from megabatch.train.runtime.rendezvous import Job
from megabatch.train.runtime.shared_folder import CHECKPOINT, SharedFolder
from megabatch.train.runtime.signals import StopSignal
from tests.train.conftest import Bench, states_of
from tests.train.contexts import ALONE, SILENT, config_of
from tests.train.processes import CONTEXT, overrides
from tests.unit.failures.table import line_of

ROOT = Path(__file__).parents[2]
needs_torchft = pytest.mark.skipif(result.version("torchft") is None, reason=elastic_torchft.MISSING)
KILLS = '''
"""Kills replica 0 between an update and its row, and replica 1 in a forward of a later update, once each."""

import os
import signal
import time
from pathlib import Path

import torch

from megabatch import loss, losses

HERE, REPLICA = Path(__file__).parent, os.environ.get("REPLICA_GROUP_ID")
IS_FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
LAST = {"step": 0, "num_replicas": 0}


def optimizer(groups, **values):
    """Called when the model is built, shortly before a replica tells the others that it comes."""
    (HERE / f"coming-{os.getpid()}").touch()
    return torch.optim.AdamW(groups, **values)


def kill(replica):
    if IS_FIRST and REPLICA == replica and LAST["num_replicas"] == 3:
        (HERE / f"killed-{replica}").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def after_update(event):
    if REPLICA is None:
        return
    LAST.update(step=event.step, num_replicas=event.row["num_replicas"])
    if event.step >= 3:
        kill("0")
    if LAST["num_replicas"] < 3:  # another is to come: it would find the others at their end
        while len(list(HERE.glob("coming-*"))) < 4 + len(list(HERE.glob("killed-*"))):  # one is the run in one process
            time.sleep(0.01)
        time.sleep(0.7)


@loss(weigh=losses.next_token.weigh)
def within(model, microbatch):
    if model.training and LAST["step"] >= 5 and (HERE / "killed-0").exists():
        kill("1")
    return losses.next_token(model, microbatch)
'''
SAME = ("step", "set", "lr", "weight", "num_samples", "num_tokens", "num_target_tokens", "epoch", "run_hash")


WAITS = '''
"""After update 6, replica 0 asks for a quorum, and replica 1 lets it wait until the Lighthouse is gone."""

import os
import time
from pathlib import Path

HERE, REPLICA = Path(__file__).parent, os.environ.get("REPLICA_GROUP_ID")


def after_update(event):
    if REPLICA is None or event.step < 6:
        return
    (HERE / f"reached-{REPLICA}").touch()
    while REPLICA == "1" and not (HERE / "gone").exists():
        time.sleep(0.01)
'''


@pytest.mark.full
@needs_torchft
def test_all_replicas_end_with_the_lighthouse_and_the_run_resumes_with_another(bench: Bench, tmp_path: Path) -> None:
    """One replica waits for a quorum, the other is to ask for one. Both end within seconds of the kill, in one line."""
    (tmp_path / "waits.py").write_text(WAITS)
    values: dict[str, Any] = {
        "run__max_epochs": 2, "run__save_every": 4, "data__cache": tmp_path / "cache",
        "run__after_update": f"{tmp_path}/waits.py:after_update",
    }  # fmt: skip
    plain, logs = tmp_path / "plain", [tmp_path / f"replica{number}.log" for number in range(2)]
    bench.train(run__folder=plain, **values)
    with elastic_torchft.lighthouse_process() as (address, process):
        runs = start_replicas(bench, address, values, logs, max_restarts=0)
        reached = [tmp_path / f"reached-{number}" for number in range(2)]
        assert elastic_torchft.wait_until(lambda: all(path.exists() for path in reached), time.time() + 300)
        time.sleep(1.0)
        process.kill()
        began = time.monotonic()
        (tmp_path / "gone").touch()
        assert statuses_of(runs) == [1, 1]
    assert time.monotonic() - began < 20
    for path in logs:
        before_torchrun = path.read_text().partition("ChildFailedError")[0].partition("torch/distributed/elastic")[0]
        lines = [line for line in before_torchrun.splitlines() if line.startswith("megabatch: ")]
        assert [line.partition(" (")[0] for line in lines] == [
            f"megabatch: the Lighthouse at {address} does not answer"
        ], before_torchrun
        assert lines[0].endswith("start the replicas again, which resume from their last checkpoint")
        assert "Traceback" not in before_torchrun
    assert [path.name for path in sorted((bench.folder / "checkpoints").glob("step-*"))] == ["step-4"]
    with elastic_torchft.lighthouse() as address:
        assert statuses_of(start_replicas(bench, address, values, logs)) == [0, 0], logs[0].read_text()[-5000:]
    assert "resumed from" in (bench.folder / "log.txt").read_text()
    check_run(bench, plain, tmp_path)


@pytest.mark.full
@needs_torchft
def test_killed_replicas_come_back_and_the_run_is_that_of_one_process(bench: Bench, tmp_path: Path) -> None:
    """Dropout, schedule, clipping, evaluations, the best one and checkpoints are those of a run without kills."""
    (tmp_path / "kills.py").write_text(KILLS)
    functions = {
        "run__after_update": f"{tmp_path}/kills.py:after_update",
        "loss__function": f"{tmp_path}/kills.py:within",
        "optim__function": f"{tmp_path}/kills.py:optimizer",
    }
    values: dict[str, Any] = functions | {
        "run__max_epochs": 4, "run__save_every": 4, "run__tensorboard": "false",
        "eval__patience": 50, "data__cache": tmp_path / "cache",
    }  # fmt: skip
    plain = tmp_path / "plain"
    bench.train(run__folder=plain, **values)
    train_on_replicas(bench, tmp_path, values)
    rows = check_run(bench, plain, tmp_path)
    numbers = [row["num_replicas"] for row in rows if "num_replicas" in row]
    assert [number for number, _ in groupby(numbers)][-5:] == [3, 2, 3, 2, 3]
    assert (bench.folder / "checkpoints/best").read_text() == (plain / "checkpoints/best").read_text()
    log = (bench.folder / "log.txt").read_text()
    assert log.count("2 replicas from update") == log.count(", 3 before") == 2
    assert "warning" not in log
    saved, expected_saved = (
        re.findall(r"saved .*/(step-\d+)", text) for text in (log, (plain / "log.txt").read_text())
    )
    assert saved == expected_saved
    assert (bench.folder / "report.html").exists()


def check_run(bench: Bench, plain: Path, folder: Path) -> list[dict[str, Any]]:
    """Compare rows and checkpoints with those of one process. Return the rows."""
    rows, expected = bench.rows(), bench.rows(plain)
    assert [(row["step"], row.get("set")) for row in rows] == [(row["step"], row.get("set")) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        assert [row.get(key) for key in SAME] == [other.get(key) for key in SAME]
        for key in ("loss", "grad_norm", "eval_loss", "eval_perplexity", "eval_accuracy"):
            assert row.get(key) == pytest.approx(other.get(key), rel=1e-12), (row["step"], key)
    for name in ("step-8", f"step-{rows[-1]['step']}"):
        ours, theirs = (states_of(run / "checkpoints" / name, folder / "states.pt") for run in (bench.folder, plain))
        assert ours.keys() == theirs.keys()
        assert max(relative_error(ours[name], theirs[name]) for name in ours) < 1e-12
    return rows


def start_replicas(
    bench: Bench, address: str, values: dict[str, Any], logs: list[Path], max_restarts: int = 2
) -> list[subprocess.Popen[bytes]]:
    """Start replicas, as docs/elastic.md says, which print into the logs."""
    arguments = ["-m", "megabatch", "train", str(bench.recipe), *overrides(values), "--parallel.replicas=torchft"]
    environ = os.environ | {"TORCHFT_LIGHTHOUSE": address, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    runs: list[subprocess.Popen[bytes]] = []
    for number, path in enumerate(logs):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *arguments]
        command[4:4] = [f"--max-restarts={max_restarts}", f"--master-port={elastic_torchft.free_port()}"]
        with path.open("w") as log:
            replica = environ | {"REPLICA_GROUP_ID": str(number)}
            runs.append(subprocess.Popen(command, env=replica, stdout=log, stderr=log))
    return runs


def statuses_of(runs: list[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for replicas. Return their exit statuses."""
    try:
        return [each.wait(300) for each in runs]
    finally:
        for each in runs:
            each.terminate()


def train_on_replicas(bench: Bench, folder: Path, values: dict[str, Any]) -> None:
    """Train on three replicas to a good end."""
    logs = [folder / f"replica{number}.log" for number in range(3)]
    with elastic_torchft.lighthouse() as address:
        statuses = statuses_of(start_replicas(bench, address, values, logs))
    assert statuses == [0, 0, 0], "\n".join(path.read_text()[-5000:] for path in logs)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    scale = theirs.double().abs().max().clamp(min=1e-300)
    return float((ours.double() - theirs.double()).abs().max() / scale)


LAUNCHES = {  # a problem -> job, ranks and environment in which it is found
    "this process is not under torchrun; start each replica with torchrun": ("", 1, "http://localhost:1", "none"),
    "TORCHFT_LIGHTHOUSE is not set; start torchft_lighthouse, and set it": ("job", 1, "", "none"),
    'a replica has 2 processes; set parallel.wrapper = "fsdp2", or start one': ("job", 2, "http://localhost:1", "none"),
    "optim.ema_decay is set, whose average is in shards; leave it out": ("job", 2, "http://localhost:1", "fsdp2"),
}


@needs_torchft
@pytest.mark.parametrize("problem", LAUNCHES)
def test_a_process_that_cannot_be_a_replica_says_why(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key, size, lighthouse, wrapper = LAUNCHES[problem]
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", lighthouse)
    parallel = {"replicas": "torchft", "wrapper": None if wrapper == "none" else wrapper}
    config = config_of(parallel=parallel, optim={"ema_decay": 0.9})
    ranks = Ranks(0, size, torch.device("cpu"), job=Job(key))
    assert line_of(check_launch, config, ranks).startswith(f'parallel.replicas is "torchft" and {problem}')


def test_without_torchft_a_replica_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megabatch.train.replicas.find_spec", {}.get)
    expected = 'parallel.replicas is "torchft" and torchft is not installed; pip install "megabatch[elastic]"'
    assert line_of(check_launch, config_of(), ALONE) == expected


def test_a_callback_that_sees_the_samples_of_one_replica_is_refused() -> None:
    class Own(Callback):
        def before_update(self, context: Any) -> None: ...

    check_callbacks([Callback()])
    assert line_of(check_callbacks, [Own()]) == (
        'parallel.replicas is "torchft" and Own has before_update(), which would see the samples of one replica; leave '
        "the callback out of run.callbacks"
    )


def enter(folder: Path) -> SharedFolder:
    shared = SharedFolder()
    enter_shared_folder(folder, shared, ALONE)
    return shared


def hold_a_checkpoint(folder: str, others: Any) -> None:
    """In another process: take a turn, say so, and hold it until the process is killed."""
    enter(Path(folder)).take(CHECKPOINT)
    others.send(os.getpid())
    time.sleep(60)


def test_replicas_take_turns_and_keep_other_runs_out(tmp_path: Path) -> None:
    """A turn that a killed replica had goes to the next."""
    ours, theirs = CONTEXT.Pipe()
    other = CONTEXT.Process(target=hold_a_checkpoint, args=(str(tmp_path), theirs), daemon=True)
    other.start()
    assert ours.recv() == other.pid
    shared = enter(tmp_path)
    turn = threading.Thread(target=shared.take, args=(CHECKPOINT,), daemon=True)
    turn.start()
    turn.join(0.3)
    assert turn.is_alive()
    with pytest.raises(MegabatchError, match="another process is writing to the run in"):
        lock_run(tmp_path, 0.0)
    other.kill()
    other.join()
    turn.join(10)
    assert not turn.is_alive()


def lock_alone(folder: str, others: Any) -> None:
    lock_run(Path(folder), 0.0)
    others.send(os.getpid())
    time.sleep(60)


def test_a_replica_does_not_enter_the_folder_of_another_run(tmp_path: Path) -> None:
    ours, theirs = CONTEXT.Pipe()
    other = CONTEXT.Process(target=lock_alone, args=(str(tmp_path), theirs), daemon=True)
    other.start()
    ours.recv()
    expected = f"another run is writing in {tmp_path}; wait for it, or choose another run.folder"
    assert line_of(enter, tmp_path) == expected
    other.kill()
    other.join()


def test_a_disk_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert line_of(enter, tmp_path).startswith(
        f"replicas take turns to write in {tmp_path}, and its file system has no locks (No locks available); choose"
    )


def test_each_row_is_written_once_by_whoever_writes(tmp_path: Path) -> None:
    """The second replica writes what the first one owed, after the line in which it was killed."""
    shared = enter(tmp_path)
    files = [JsonlFile(tmp_path / "rows.jsonl", enabled=True) for _ in range(2)]
    for file in files:
        file.shared = shared
        file.append({"step": 1})
        file.append({"step": 1, "set": "held-out"})
    shared.is_writer = True
    files[0].write()
    shared.is_writer = False
    for step in (2, 3):
        files[1].append({"step": step})
        files[1].write()
    assert len(files[1].pending) == 2
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    shared.is_writer = True
    files[1].write()
    files[0].append({"step": 2})
    files[0].write()
    assert not files[0].pending
    steps = [(row["step"], row.get("set")) for row in files[1].rows()]
    assert steps == [(1, None), (1, "held-out"), (2, None), (3, None)]


def test_a_checkpoint_that_another_replica_has_written_is_left_alone(tmp_path: Path) -> None:
    """Each replica writes the last checkpoint unless it is there, and the one of a later update wherever it is."""
    shared, stop, made = enter(tmp_path), StopSignal(speaks=False), []
    for step in (4, 4, 3, 5):
        writer = Writer(config_of(tmp_path), ALONE, SILENT, lambda: None, shared)
        request = CheckpointRequest(step, {"model": {"weight": torch.ones(2)}}, {"step": step}, False, True)
        writer.write_last(request, stop)
        made.append({path.name: path.stat().st_ino for path in (tmp_path / "checkpoints").glob("step-*")})
    assert made[0] == made[1] == made[2]
    assert made[3].keys() == {"step-4", "step-5"}
    assert shared.is_writer
