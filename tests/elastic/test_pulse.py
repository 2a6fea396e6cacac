"""A rank that stops answering is named within a deadline, and the others leave, but not where all were stopped."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megabatch.train import pulse
from megabatch.train.pulse import Pulse, Silence
from megabatch.train.ranks import Meeting
from tests.train.conftest import Bench
from tests.train.processes import CONTEXT, rank_environment
from tests.train.test_ranks import live

pytestmark = pytest.mark.slow
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
    assert f") has not answered for {SECONDS:g} s (stopped, or its host gone); it was in update " in lines[0]


def test_ranks_that_were_all_stopped_go_on(bench: Bench, own: Path) -> None:
    run = started(bench, own, 2, run__max_epochs=3)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in run.processes:
            os.kill(process.pid, number)
        time.sleep(1.5 * SECONDS if number == signal.SIGSTOP else 0)
    assert [end.status for end in run.wait()] == [0, 0]


def test_silence_is_counted_while_this_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    silence = Silence(5.0)

    def look(after: float, seen: object) -> float:
        now[0] += after
        return silence.look(seen)

    assert look(5, "a") == 0
    assert [look(5, "a"), look(5, "a"), look(3600, "a")] == [5, 10, 20]
    assert [look(5, "b"), look(5, "b")] == [0, 5]


def hold_store(sender: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sender.send(store.port)
    time.sleep(100)


def wait_long(met: Meeting, held: int) -> None:
    """A rank that is in an update when the process that holds the store freezes."""
    own = Pulse(met, 2.0)
    with own.beating():
        own.works(7)
        time.sleep(1)
        if met.rank == 1:
            os.kill(held, signal.SIGSTOP)
        time.sleep(60)


def test_a_store_that_does_not_answer_is_noticed_too(tmp_path: Path) -> None:
    """Its host may have frozen with the rank."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    holder = CONTEXT.Process(target=hold_store, args=(sender,))
    holder.start()
    port, logs = receiver.recv(), [[str(tmp_path / f"{rank}.{name}") for name in ("out", "err")] for rank in (0, 1)]
    ranks = [
        CONTEXT.Process(target=live, args=(wait_long, (holder.pid,), rank_environment(rank, 2, port), logs[rank]))
        for rank in (0, 1)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(40)
    assert [each.exitcode for each in ranks] == [1, 1]
    holder.kill()
    assert Path(logs[0][1]).read_text() == (
        "megabatch: the store by which ranks have met, torchrun's or rank 0's, has not answered for 2 s (stopped, or "
        "its host gone)\n"
    )
    assert Path(logs[1][1]).read_text() == "", "one rank of a host speaks"
