"""A rank that stops answering is named within a deadline, and the others leave, but not where all were stopped."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.train.runtime import heartbeat
from megabatch.train.runtime.heartbeat import Heartbeat, StallTimer
from megabatch.train.runtime.rendezvous import Rendezvous
from tests.train.conftest import Bench
from tests.train.processes import CONTEXT, Finished, rank_environment
from tests.train.test_ranks import live

SECONDS = 3.0  # in which a rank must answer


def started(bench: Bench, own: Path, ranks: int, **values: Any) -> Any:
    """A run whose ranks wait in the midst of it, once each has made three updates."""
    (bench.path / "disturb.json").write_text(
        json.dumps({"place": "after", "step": 3, "ranks": list(range(ranks)), "signals": [0], "seconds": 0.5})
    )
    values = {"run__answer_within_seconds": SECONDS, "run__max_epochs": 500, "eval__every": None, **values}
    run = bench.start(ranks=ranks, run__after_update=f"{own}:after_update", **values)
    deadline = time.monotonic() + 60
    while len(list(bench.path.glob("disturbed-*"))) < ranks and time.monotonic() < deadline:
        time.sleep(0.02)
    return run


def num_left(run: Any) -> int:
    return sum(process.is_alive() for process in run.processes)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "frozen", "wrapper"), [(3, 2, "fsdp2"), (3, 0, "ddp")])
def test_a_frozen_rank_is_named_and_the_others_leave(
    bench: Bench, own: Path, ranks: int, frozen: int, wrapper: str
) -> None:
    run = started(bench, own, ranks, parallel__wrapper=wrapper)
    process = run.processes[frozen]
    os.kill(process.pid, signal.SIGSTOP)
    since = time.monotonic()
    for other in run.processes[:frozen] + run.processes[frozen + 1 :]:
        other.join(15)
    alone = num_left(run) == 1
    if not alone:
        run.kill()
    assert alone, [end.err for end in run.wait(1)]
    assert time.monotonic() - since < 30  # a collective would have waited half an hour
    os.kill(process.pid, signal.SIGCONT)
    ends = run.wait(30)
    assert all(end.status in (1, 2) for end in ends)
    assert 1 in [end.status for end in ends]
    lines = [line for end in ends for line in end.err.splitlines()]
    assert len(lines) == 1, lines
    assert f"rank {frozen} of {ranks} (process {process.pid} on " in lines[0]
    assert f") has not answered for {SECONDS:g} s (stopped, or its host gone); last heard " in lines[0]


@pytest.mark.full
def test_ranks_that_were_all_stopped_go_on(bench: Bench, own: Path) -> None:
    run = started(bench, own, 2, run__max_epochs=3)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in run.processes:
            os.kill(process.pid, number)
        time.sleep(1.5 * SECONDS if number == signal.SIGSTOP else 0)
    assert [end.status for end in run.wait()] == [0, 0]


def test_silence_is_counted_while_this_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    silence = StallTimer(5.0)

    def look(after: float, seen: object) -> float:
        now[0] += after
        return silence.poll(seen)

    assert look(5, "a") == 0
    assert [look(5, "a"), look(5, "a"), look(3600, "a")] == [5, 10, 20]
    assert [look(5, "b"), look(5, "b")] == [0, 5]


def hold_store(sender: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    time.sleep(100)


def wait_long(met: Rendezvous, held: int) -> None:
    """A rank that is in an update when the process that holds the store freezes."""
    own = Heartbeat(met, 2.0)
    with own.running():
        own.wait_for_samples(7)
        own.start_update(7)
        time.sleep(1)
        if met.rank == 1:
            os.kill(held, signal.SIGSTOP)
        time.sleep(60)


def lose_a_rank(met: Rendezvous) -> None:
    """A rank is killed while the other waits in what no lost peer breaks, as a collective on a device does not."""
    own = Heartbeat(met, 2.0)
    with own.running():
        own.start_update(7)
        time.sleep(1.5)
        if met.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def wait_for_samples(met: Rendezvous) -> None:
    """A rank waits for its samples for longer than others are given to answer, and goes on."""
    own = Heartbeat(met, 1.0)
    with own.running():
        if met.rank == 1:
            own.wait_for_samples(7)
            time.sleep(3)
        own.start_update(7)
        time.sleep(1)


def alive(tmp_path: Path, port: int, life: Any, *arguments: Any) -> list[Finished]:
    """Two ranks of one host that meet in a store and live like this, to their ends."""
    logs = [[str(tmp_path / f"{rank}.{name}") for name in ("out", "err")] for rank in (0, 1)]
    local = {"LOCAL_WORLD_SIZE": "2"}
    ranks = [
        CONTEXT.Process(target=live, args=(life, arguments, rank_environment(rank, 2, port) | local, logs[rank]))
        for rank in (0, 1)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(20)
        each.kill()
    return [Finished(each.exitcode, "", Path(log[1]).read_text()) for each, log in zip(ranks, logs, strict=True)]


@pytest.mark.full
def test_a_store_that_does_not_answer_is_noticed_too(tmp_path: Path) -> None:
    """Its host may have frozen with the rank."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    holder = CONTEXT.Process(target=hold_store, args=(sender,))
    holder.start()
    ends = alive(tmp_path, receiver.recv(), wait_long, holder.pid)
    holder.kill()
    assert [end.status for end in ends] == [1, 1]
    assert ends[0].err == (
        "megabatch: the store by which ranks have met, torchrun's or rank 0's, has not answered for 2 s (stopped, or "
        "its host gone)\n"
    )
    assert ends[1].err == "", "one rank of a host speaks"


@pytest.mark.full
def test_a_lost_rank_of_this_host_is_noticed_where_no_collective_breaks(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    noticed, killed = alive(tmp_path, store.port, lose_a_rank)
    assert [noticed.status, killed.status] == [1, -signal.SIGKILL]
    assert noticed.err.startswith("megabatch: rank 1 of 2 (process ")
    assert noticed.err.endswith(") has gone without a word, which was killed or ran out of memory\n")


@pytest.mark.full
def test_a_rank_that_waits_for_its_samples_says_so_and_nobody_ends(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ends = alive(tmp_path, store.port, wait_for_samples)
    assert [end.status for end in ends] == [0, 0]
    assert ends[0].err == ""
    assert ends[1].err == "megabatch: rank 1 of 2 has been waiting for the samples of update 7 for 1 s\n"


def get_stuck(met: Rendezvous, folder: Path) -> None:
    """Rank 1 is in a function of the user's for longer than its updates took; rank 0 looks at nobody."""
    own = Heartbeat(met, 1.0, 2.0 if met.rank == 1 else None, folder)
    with own.running():
        for step in range(1, 8):
            own.wait_for_samples(step)
            own.start_update(step)
            own.last_stepped_at = time.monotonic()
        own.wait_for_samples(8)
        own.start_update(8)
        time.sleep(60 if met.rank == 1 else 4)


def test_a_stuck_rank_is_named_and_its_stacks_are_kept(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _, stuck = alive(tmp_path, store.port, get_stuck, tmp_path)
    assert stuck.status == 1
    assert stuck.err.startswith("megabatch: rank 1 of 2 (process ")
    assert "is stuck: in update 8 for" in stuck.err
    assert "in get_stuck" in (tmp_path / "stuck" / "rank-1.txt").read_text()
