"""Ranks of which one, some or all fail: their lines and their ends."""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megabatch import MegabatchError
from megabatch.train.checkpoints import run_folder as starting
from megabatch.train.config import Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.runtime import files
from megabatch.train.runtime.console import Console
from megabatch.train.runtime.exit import FailedError, exit_together
from megabatch.train.runtime.ranks import init_ranks
from megabatch.train.runtime.rendezvous import Rendezvous
from tests.train.processes import CONTEXT, Finished, rank_environment

pytestmark = pytest.mark.slow

CONFIG = Config(
    model=ModelConfig(config={"model_type": "llama"}),
    update=UpdateConfig(global_batch_size=8, micro_batch_size=1),
    run=RunConfig(folder="unused", device="cpu"),
)
Life = Callable[..., None]


def live(life: Life, arguments: tuple[Any, ...], environment: dict[str, str], logs: list[str]) -> None:
    """A rank, from its beginning to its exit status, as the command line does it."""
    for descriptor, log in zip((1, 2), logs, strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.environ |= environment
    torch.set_num_threads(1)
    status = 0
    try:
        with exit_together() as met:
            life(met, *arguments)
    except FailedError as failed:
        status = failed.status
    os._exit(status)


def finish(tmp_path: Path, ranks: int, life: Life, *arguments: Any) -> list[Finished]:
    """Every rank's end; ranks that do not end within seconds are a failure."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [[str(tmp_path / f"{rank}.{stream}") for stream in ("out", "err")] for rank in range(ranks)]
    processes = [
        CONTEXT.Process(target=live, args=(life, arguments, rank_environment(rank, ranks, store.port), logs[rank]))
        for rank in range(ranks)
    ]
    start = time.monotonic()
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert time.monotonic() - start < 50  # most of it imports, on a busy machine
    return [
        Finished(process.exitcode, *(Path(log).read_text() for log in logs[rank]))
        for rank, process in enumerate(processes)
    ]


def fail_before_the_group(met: Rendezvous, error: Exception) -> None:
    """The first rank waits in the rendezvous of a process group for the second one, which fails."""
    if met.rank == 1:
        raise error
    init_ranks(met, CONFIG)


def fail_on(met: Rendezvous, ranks: tuple[int, ...], error: BaseException) -> None:
    """Some ranks fail, the others wait for them in a collective."""
    joined = init_ranks(met, CONFIG)
    joined.barrier()
    if met.rank in ranks:
        time.sleep(0.05 * met.rank)
        raise error
    joined.barrier()


def be_killed(met: Rendezvous) -> None:
    joined = init_ranks(met, CONFIG)
    if met.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    joined.barrier()


@pytest.mark.parametrize(("error", "status"), [(ZeroDivisionError("of one rank"), 1), (MegabatchError("of one"), 2)])
def test_before_the_group_the_others_end_within_seconds(tmp_path: Path, error: Exception, status: int) -> None:
    silent, said = finish(tmp_path, 2, fail_before_the_group, error)
    assert [silent.status, said.status] == [2, status]
    assert silent.err == ""
    lines = said.err.splitlines()
    if status == 1:
        assert lines[0] == "megabatch: rank 1 of 2 failed:"
        assert lines[-1] == "ZeroDivisionError: of one rank"
    else:
        assert lines == ["megabatch: of one"]


def test_a_rank_that_crashes_is_named_above_its_traceback(tmp_path: Path) -> None:
    ends = finish(tmp_path, 3, fail_on, (1,), ZeroDivisionError("of one rank"))
    assert [end.status for end in ends] == [2, 1, 2]
    assert [ends[0].err, ends[2].err] == ["", ""]
    lines = ends[1].err.splitlines()
    assert lines[:2] == ["megabatch: rank 1 of 3 failed:", "Traceback (most recent call last):"]
    assert lines[-1] == "ZeroDivisionError: of one rank"


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ((1,), "megabatch: rank 1 of 3: a mistake\n"),
        ((1, 2), "megabatch: rank 1 of 3: a mistake\n"),
        ((0, 1, 2), "megabatch: a mistake\n"),
    ],
)
def test_a_line_names_its_rank_where_not_every_rank_says_it(tmp_path: Path, ranks: tuple[int, ...], line: str) -> None:
    ends = finish(tmp_path, 3, fail_on, ranks, MegabatchError("a mistake"))
    assert [end.status for end in ends] == [2, 2, 2]
    assert "".join(end.err for end in ends) == line


def test_a_rank_that_is_killed_is_not_taken_for_the_one_that_notices(tmp_path: Path) -> None:
    noticed, killed = finish(tmp_path, 2, be_killed)
    assert [noticed.status, killed.status] == [1, -signal.SIGKILL]
    assert noticed.err.startswith("megabatch: rank 0 of 2 lost another rank, which was killed or ran out of memory (")
    assert len(noticed.err.splitlines()) == 1


@pytest.mark.parametrize("reason", [0, None, "enough"])
def test_a_rank_whose_own_function_exits_is_named_too(tmp_path: Path, reason: object) -> None:
    ends = finish(tmp_path, 2, fail_on, (1,), SystemExit(reason))
    assert [end.status for end in ends] == [2, 1]
    assert ends[0].err == ""
    lines = ends[1].err.splitlines()
    assert lines[:2] == ["megabatch: rank 1 of 2 failed:", "Traceback (most recent call last):"]
    assert lines[-1].startswith("SystemExit")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"RANK": "0"}, "RANK is set, as torchrun does, and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        (rank_environment(0, 1, 1) | {"MASTER_ADDR": ""}, "RANK is set, as torchrun does, and MASTER_ADDR is not"),
        (rank_environment(0, 1, 1) | {"RANK": "first"}, "cannot meet the other ranks (invalid literal for int() "),
        (rank_environment(0, 1, 1) | {"WORLD_SIZE": "x"}, "cannot meet the other ranks (invalid literal for int() "),
    ],
)
def test_a_rank_without_the_others_addresses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], environment: dict[str, str], reason: str
) -> None:
    for name in rank_environment(0, 1, 1):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FailedError) as caught, exit_together():
        raise AssertionError
    (line,) = capfd.readouterr().err.splitlines()
    assert caught.value.status == 2
    assert line.startswith(f"megabatch: {reason}")
    assert line.endswith("; start with torchrun, or unset RANK")


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    (end,) = finish(tmp_path, 1, fail_on, (0,), OSError(errno.ENOSPC, "No space left on device", "a/file"))
    assert end.status == 2
    assert end.err == (
        "megabatch: the disk is full ([Errno 28] No space left on device: 'a/file'); make room and resume with "
        "--run.resume=true\n"
    )


def write_in_turn(met: Rendezvous, path: str) -> None:
    """Gather on each rank, and look for a file that the main rank has written: all see it, or none."""
    joined = init_ranks(met, CONFIG)
    assert joined.gather(f"rank {joined.rank}") == [f"rank {rank}" for rank in range(joined.size)]
    joined.on_main(lambda: Path(path).write_text(f"by {joined.rank}"), "it")
    assert Path(path).read_text() == "by 0"
    console = Console(enabled=joined.is_main, loss_digits=4)
    starting.open_run_folder(Path(path).parent / "run", CONFIG, joined, console, is_new=True)
    console.say("hello")
    joined.on_main(lambda: Path(path, "within a file").write_text(""), "something within a file")


def test_what_the_main_rank_cannot_write_is_refused_by_all(tmp_path: Path) -> None:
    ends = finish(tmp_path, 2, write_in_turn, str(tmp_path / "file"))
    assert [end.status for end in ends] == [2, 2]
    assert "".join(end.err for end in ends) == (
        "megabatch: cannot write something within a file (Not a directory); make room, allow it, or choose another "
        "run.folder\n"
    )
    assert [end.out for end in ends] == ["hello\n", ""]
    (start,) = files.read_starts(tmp_path / "run")
    assert start["num_ranks"] == 2
    assert list(start["devices"].values()) == [2]
    assert len((tmp_path / "run" / "log.txt").read_text().splitlines()) == 1
