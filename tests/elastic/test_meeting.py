"""Ranks that cannot meet say who is missing, and a signal ends them at once: own launchers, where nobody else looks."""

import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from megabatch.train.runtime import rendezvous
from megabatch.train.runtime.rendezvous import ranks_text
from tests.train.processes import CONTEXT, run_rank

SECONDS = 60.0


class Ranks:
    """Processes of `megabatch` that a launcher of the user's starts: rank 0 holds the store."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.processes: dict[int, BaseProcess] = {}

    def start(self, rank: int, *arguments: str) -> BaseProcess:
        environment = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
        }  # fmt: skip
        logs = [str(self.path / f"rank{rank}.{stream}") for stream in ("out", "err")]
        self.processes[rank] = CONTEXT.Process(target=run_impatient, args=([*arguments], environment, logs))
        self.processes[rank].start()
        return self.processes[rank]

    def said(self, rank: int) -> str:
        path = self.path / f"rank{rank}.err"
        return path.read_text() if path.exists() else ""

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < deadline, [self.said(rank) for rank in self.processes]
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join()


def run_impatient(arguments: list[str], environment: dict[str, str], logs: list[str]) -> None:
    """A rank that says after a second for whom it waits."""
    rendezvous.SECONDS_TO_TELL = 1.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run_rank(arguments, environment, logs)


@pytest.fixture
def ranks(tmp_path: Path):
    started = Ranks(tmp_path, 3)
    yield started
    started.end()


def test_rank_0_names_the_ranks_that_have_not_come(ranks: Ranks) -> None:
    ranks.start(0, "train", "recipe.toml")
    ranks.wait_for(lambda: ranks.said(0).count("\n") > 1)
    first, second = ranks.said(0).splitlines()[:2]
    assert first.startswith("megabatch: rank 0 of 3 has waited ")
    assert "ranks 1, 2 have not come" in first
    assert "ranks 1, 2 have not come" in second
    ranks.start(1, "train", "recipe.toml")
    ranks.wait_for(lambda: "rank 2 has not come" in ranks.said(0))


def test_a_rank_names_rank_0_where_that_has_not_come(ranks: Ranks) -> None:
    ranks.start(2, "train", "recipe.toml")
    ranks.wait_for(lambda: "rank 2 of 3 has waited 1 s: rank 0 has not come" in ranks.said(2))


def test_a_rank_that_is_lost_between_its_arrival_and_the_group_is_named(ranks: Ranks) -> None:
    """The others make the process group, which waits in silence."""
    for rank in range(2):
        ranks.start(rank, "plan", "--measure", "here.toml")
    lost = CONTEXT.Process(target=arrive_and_end, args=(ranks.port,))
    lost.start()
    ranks.processes[2] = lost
    ranks.wait_for(lambda: "rank 2 has not come" in ranks.said(0))
    assert "has not come" not in ranks.said(1)


def arrive_and_end(port: int) -> None:
    """Meet as rank 2, and be killed before the process group."""
    os.environ |= {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rendezvous.find_ranks()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("number", "rank"), [(signal.SIGINT, 0), (signal.SIGTERM, 1)])
def test_a_signal_while_ranks_meet_ends_with_one_line(ranks: Ranks, number: signal.Signals, rank: int) -> None:
    process = ranks.start(rank, "train", "recipe.toml")
    ranks.wait_for(lambda: "not come" in ranks.said(rank))
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(SECONDS)
    assert process.exitcode == 128 + number
    lines = [line for line in ranks.said(rank).splitlines() if "not come" not in line]
    assert lines == [f"megabatch: ended by {number.name}"]


def test_many_ranks_are_named_shortly() -> None:
    assert ranks_text([3]) == "rank 3 has"
    assert ranks_text(range(1, 20)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more have"
