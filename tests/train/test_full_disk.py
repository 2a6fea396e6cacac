"""A full disk does not end a run, and no row is lost or cut: on a real file system that is full, or a real limit."""

import contextlib
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from megabatch import MegabatchError
from megabatch.train.checkpoints import tensor_files as checkpoint
from megabatch.train.checkpoints.retention import Checkpoints
from megabatch.train.checkpoints.run_folder import write_if_room
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.files import RetryingAppender, read_rows, replace_text
from megabatch.train.runtime.ranks import Ranks
from tests.train.conftest import Bench, timeless
from tests.train.contexts import ALONE
from tests.train.on_ranks import on_ranks
from tests.train.test_checkpoint import META, save
from tests.train.test_metrics import add, events, metrics_of

OWN = """
import os, resource
from pathlib import Path
import megabatch.train.checkpoints.writer

megabatch.train.checkpoints.writer.SECONDS_BETWEEN_TRIES = (0.1, 0.1)
FULL, EMPTY, MOUNTED, BALLAST = {full}, {empty}, {mounted}, Path("{ballast}")

def after(event):
    if MOUNTED and not event.is_main:
        return
    if event.step == FULL:
        fill(event.folder)
    if event.step == EMPTY:
        BALLAST.unlink() if MOUNTED else resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

def fill(folder):
    if not MOUNTED:  # a row more fits into half of what is left
        size = (folder / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        return
    with BALLAST.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return
"""


@contextlib.contextmanager
def small_disk(folder: Path) -> Generator[tuple[Path, bool], None, None]:
    """A folder to write runs to, and whether it is a file system of its own."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:  # no such command
        mounted = False
    try:
        yield folder, mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def filling(path: Path, disk: Path, *, mounted: bool, full: int, empty: int) -> str:
    """The key that lets a run fill the disk after the update ``full``, and empty it after ``empty``."""
    path.write_text(OWN.format(full=full, empty=empty, mounted=mounted, ballast=disk / "ballast"))
    return f"{path}:after"


def write_pieces(_: Any, path: Path) -> list[Any]:
    """Pieces while only 25 bytes fit, then while all do; in a process of its own."""
    file, seen = RetryingAppender(path), []
    resource.setrlimit(resource.RLIMIT_FSIZE, (25, resource.RLIM_INFINITY))
    for number in range(4):
        file.pending.append(f"piece {number}...\n")
        file.write()  # 11 bytes: the third one is cut off
        seen.append(path.read_bytes().count(b"\n"))
    try:
        file.flush()
    except OSError as error:
        seen.append(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    file.pending.append("piece 4...\n")
    file.write()
    return seen


def test_a_piece_is_whole_or_waits_in_its_order(tmp_path: Path) -> None:
    (seen,) = on_ranks(1, tmp_path, write_pieces, tmp_path / "file")
    assert seen == [1, 2, 2, 2, "OSError"]
    assert (tmp_path / "file").read_bytes() == b"".join(b"piece %d...\n" % number for number in range(5))


def write_rows(_: Any, folder: Path) -> None:
    """Rows and TensorBoard's events, while nothing fits any more, and after."""
    context = metrics_of(folder, tensorboard=True)
    add(context, {"step": 1, "set": "a", "eval_loss": 0.5})
    context.flush_logs()  # TensorBoard writes in a thread: what it has not written yet is lost with it
    resource.setrlimit(resource.RLIMIT_FSIZE, (30, resource.RLIM_INFINITY))
    for step in (2, 3):
        add(context, {"step": step, "set": "a", "eval_loss": 0.5 / step, "eval_own": 0.1})
    with pytest.raises(OSError, match="File too large"):
        context.flush_logs()
    with pytest.raises(OSError, match="File too large"):
        replace_text(folder / "small", "a" * 99)
    write_if_room(
        folder / "plan", lambda: replace_text(folder / "plan", "a" * 99), Console(enabled=True, loss_digits=4)
    )
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "tensorboard"]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    context.flush_logs()


def test_rows_wait_for_room(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    on_ranks(1, tmp_path, write_rows, tmp_path / "run")
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3]
    assert events(tmp_path / "run")["eval/a/loss"][0][0] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "values"), [(1, {}), (2, {"parallel__wrapper": "fsdp2", "checkpoint__background": "true"})]
)
def test_a_full_disk_does_not_end_a_run(bench: Bench, tmp_path: Path, ranks: int, values: dict[str, Any]) -> None:
    """Full from the third update to the eighth of twelve: the saves at 4, 5, 6 and 8 may fail, that at 12 may not."""
    values = {"run__max_epochs": 2, "run__save_every": 2, "run__keep_last": 2, **values}
    whole = tmp_path / "whole"
    bench.train(ranks=ranks, run__folder=whole, **values)
    with small_disk(tmp_path / "disk") as (disk, mounted):
        after = filling(tmp_path / "own.py", disk, mounted=mounted, full=3, empty=8)
        bench.train(ranks=ranks, run__folder=disk / "run", run__after_update=after, **values)
        kept = tmp_path / "kept"
        shutil.copytree(disk / "run", kept)
    logged = [line.partition("  ")[2] for line in (kept / "log.txt").read_text().splitlines()]
    warnings = [line for line in logged if line.startswith("warning: cannot ")]
    assert len(warnings) >= 2
    assert warnings[0].endswith("; the run continues, and step-4 is tried again after update 5")
    assert timeless(bench.rows(kept)) == timeless(bench.rows(whole))
    shown = [step for step, _ in events(kept)["train/loss"]]
    assert shown == list(range(1, len(shown) + 1))
    # TensorBoard's thread may have written nothing while the disk was full.
    assert len([line for line in logged if line.startswith("warning: tensorboard is left out (OSError")]) <= 1
    assert sum(line.startswith("update   ") and "  loss " in line for line in logged) == 12
    assert not list((kept / "checkpoints").glob("*.tmp"))
    assert {path.name for path in (kept / "checkpoints").iterdir()} >= {"latest", "step-12"}
    assert Checkpoints(kept).latest_valid(ALONE).path.name == "step-12"


@pytest.mark.slow
def test_a_last_checkpoint_without_room_ends_the_run_in_one_line(bench: Bench, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as (disk, mounted):
        run = disk / "run"
        after = filling(tmp_path / "own.py", disk, mounted=mounted, full=3, empty=99)
        values = {"run__folder": run, "run__save_every": 2, "run__after_update": after, "parallel__wrapper": "ddp"}
        run_of_two = bench.start(ranks=2, **values)
        said = bench.path / "logs0" / "rank0.out"
        deadline = time.monotonic() + 60
        while "until it is written, or a signal" not in (said.read_text() if said.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        for process in run_of_two.processes:
            process.terminate()
        finished = run_of_two.wait()
        lines = [line for each in finished for line in each.err.splitlines()]
        assert [each.status for each in finished] == [2, 2], lines
        (line,) = [line for line in lines if not line.startswith("megabatch: SIGTERM: the run stops")]
        assert line.startswith("megabatch: cannot write ")
        assert line.endswith("); make room, allow it, or choose another run.folder")
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-2"]
        (disk / "ballast").unlink(missing_ok=True)
        bench.train(ranks=2, run__folder=run, run__save_every=2, run__resume=True, parallel__wrapper="ddp")
        assert [row["step"] for row in bench.rows(run) if "set" not in row] == [1, 2, 3, 4, 5, 6]


def write_with_one_full(ranks: Ranks, folder: Path) -> list[str]:
    """A checkpoint while only the second rank has no room, and another one when it has."""
    told: list[str] = []
    for limit in ((512, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2):
        if ranks.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        states = {f"own{ranks.rank}": {"weight": torch.zeros(3 * 2**18)}}
        try:
            told.append(checkpoint.save(folder, states, META, ranks).name)
        except MegabatchError as error:
            told.append(str(error))
    return told


@pytest.mark.slow
def test_what_one_rank_cannot_write_all_drop(tmp_path: Path) -> None:
    told = on_ranks(2, tmp_path, write_with_one_full, tmp_path)
    assert told[0] == told[1]
    assert told[0][1] == "step-3"
    problem = (
        rf"cannot write {tmp_path}/checkpoints/step-3.tmp \(File too large\); make room for it: 3.0 MiB of tensors, "
    )
    assert re.fullmatch(problem + r"with [\d,.]+ GiB free", told[0][0])
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-3"]


def test_what_is_said_to_a_full_disk_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(enabled=True, loss_digits=4)
    console.log_to(tmp_path / "log.txt")
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console.say("a line")
        console.warn("of another")
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # to close it without an error
    logged = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.partition("  ")[2] for line in logged] == ["a line", "warning: of another"]


@contextlib.contextmanager
def small_files(most_bytes: int) -> Generator[None]:
    """Surround writes that fail beyond so many bytes of a file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def test_a_text_that_cannot_be_written_leaves_the_old_one_and_no_part(tmp_path: Path) -> None:
    replace_text(tmp_path / "latest", "step-2")
    with small_files(6), pytest.raises(OSError, match="File too large"):
        replace_text(tmp_path / "latest", "step-10")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("latest", "step-2")]


def test_nothing_is_left_of_a_checkpoint_that_could_not_be_written(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with small_files(100), pytest.raises(MegabatchError, match="cannot write"):
        save(tmp_path, 4)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-2"]
    assert Checkpoints(tmp_path).latest_valid(ALONE).path.name == "step-2"
