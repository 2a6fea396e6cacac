"""A run that dies before its first checkpoint begins again, by `megabatch train RUN`, and ends as if it never had."""

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Bench, timeless

pytestmark = pytest.mark.full
OWN = '''
"""What is to happen is in files beside this one: at which call of the loss, on which rank, what."""

import json
import os
import signal
import time
from pathlib import Path

import torch

from megabatch import loss, losses

HERE, RANK = Path(__file__).parent, int(os.environ.get("RANK", "0"))
CALLS = []


@loss(weigh=losses.next_token.weigh)
def within(model, microbatch):
    file = HERE / "disturb.json"
    asked = json.loads(file.read_text()) if file.exists() else {}
    if asked.get("trains") == torch.is_grad_enabled() and asked["rank"] == RANK and not CALLS:
        CALLS.append(0)
        (HERE / "disturbed").touch()
        if asked["signal"]:
            os.kill(os.getpid(), asked["signal"])
        while asked["waits"] and not (HERE / "go on").exists():
            time.sleep(0.01)
    return losses.next_token(model, microbatch)


def after_update(event):
    file = HERE / "disturb.json"
    if event.step == 3 and file.exists() and json.loads(file.read_text())["rank"] == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
'''
ONE_A_TIME = {"update__global_batch_size": 1, "run__max_steps": 4}  # a sample is one microbatch, whatever is measured
PLACES: dict[str, dict[str, Any]] = {  # where a run dies → its keys
    "measuring": {"update__max_microbatch_tokens": "auto", "eval__every": None, **ONE_A_TIME},
    "in the first evaluation": {},
    "in update 1": {},
    "after update 3": {},
}


@pytest.fixture
def own(bench: Bench) -> Path:
    """The file of those functions."""
    path = bench.path / "own.py"
    path.write_text(OWN)
    return path


def disturb(bench: Bench, **asked: Any) -> None:
    given = {"trains": True, "rank": 0, "signal": 0, "waits": False, **asked}
    (bench.path / "disturb.json").write_text(json.dumps(given))


@pytest.mark.parametrize(
    ("place", "number", "ranks"),
    [
        ("measuring", signal.SIGKILL, 1),
        ("measuring", signal.SIGTERM, 1),
        ("measuring", signal.SIGKILL, 2),
        ("in the first evaluation", signal.SIGTERM, 1),
        ("in the first evaluation", signal.SIGKILL, 2),
        ("in update 1", signal.SIGKILL, 1),
        ("in update 1", signal.SIGKILL, 2),
        ("after update 3", signal.SIGKILL, 1),
    ],
)
def test_it_ends_as_one_that_never_died(
    bench: Bench, own: Path, tmp_path: Path, place: str, number: signal.Signals, ranks: int
) -> None:
    values = {"loss__function": f"{own}:within", "parallel__wrapper": None if ranks == 1 else "ddp", **PLACES[place]}
    values |= {"run__after_update": f"{own}:after_update"} if place.startswith("after") else {}
    whole = tmp_path / "whole"
    bench.train(ranks=ranks, run__folder=whole, **values)
    trains = None if place.startswith("after") else place != "in the first evaluation"
    disturb(bench, trains=trains, rank=ranks - 1, signal=number)
    ends = bench.finish(ranks=ranks, **values)
    assert 0 not in [end.status for end in ends]
    assert ends[-1].status == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    assert not (bench.folder / "checkpoints").exists()
    (bench.path / "disturb.json").unlink()
    said = bench.train(ranks=ranks, recipe=bench.folder).splitlines()
    # Rows of the last quarter of a second may be lost.
    again = r", and makes [23] updates again" if place.startswith("after") else ""
    assert (
        sum(
            re.fullmatch(f"nothing was saved yet: the run begins at update 0{again}", line) is not None for line in said
        )
        == 1
    )
    assert without_measures(bench.rows()) == without_measures(bench.rows(whole))
    assert len(json.loads((bench.folder / "environment.json").read_text())["starts"]) == 2


def without_measures(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of one beginning, with all that is the same in every run."""
    names = ("peak_gib", "predicted_peak_gib")
    return timeless([{key: row[key] for key in row if key not in names} for row in rows])


def test_no_second_process_begins_while_one_measures(bench: Bench, own: Path) -> None:
    values = {"loss__function": f"{own}:within", **PLACES["measuring"]}
    disturb(bench, waits=True)
    first = bench.start(**values)
    deadline = time.monotonic() + 60
    while not (bench.path / "disturbed").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for recipe in (None, bench.folder):
        (end,) = bench.finish(recipe=recipe, run__answer_within_seconds=1, **values)
        assert (end.status, end.err) == (
            2,
            f"megabatch: another process is writing to the run in {bench.folder}; wait for it, or choose another "
            "run.folder\n",
        )
    (bench.path / "go on").touch()
    assert [end.status for end in first.wait()] == [0]
    assert [row["step"] for row in bench.rows() if "loss" in row] == [1, 2, 3, 4]
