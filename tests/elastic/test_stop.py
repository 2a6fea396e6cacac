"""A signal ends a run after the update that runs, on all ranks, and the run goes on as if it had never ended."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import Bench, timeless
from tests.train.processes import overrides

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]


def disturb(bench: Bench, **asked: Any) -> None:
    """Have one of conftest's functions do something at a place, an update, on some ranks."""
    for made in bench.path.glob("made-*"):
        made.unlink()
    (bench.path / "disturb.json").write_text(json.dumps({"ranks": [0], "signals": [], **asked}))


@pytest.mark.parametrize(
    ("ranks", "hit", "number", "place"),
    [(1, [0], signal.SIGTERM, "within"), (2, [1], signal.SIGINT, "after"), (3, [0, 2], signal.SIGTERM, "within")],
)
def test_all_ranks_stop_after_the_same_update(
    bench: Bench, own: Path, tmp_path: Path, ranks: int, hit: list[int], number: signal.Signals, place: str
) -> None:
    wrapper = {1: None, 2: "ddp", 3: "fsdp2"}[ranks]
    values = {"parallel__wrapper": wrapper, "run__after_update": f"{own}:after_update"}
    values |= {"loss__function": f"{own}:within", "update__max_microbatch_tokens": 4096}  # one microbatch an update
    whole = tmp_path / "whole"
    bench.train(ranks=ranks, run__folder=whole, **values)
    disturb(bench, place=place, step=4, ranks=hit, signals=[number])
    said = bench.train(ranks=ranks, **values)
    last = said.splitlines()[-1]
    assert last == f"stopped by {number.name} after update 4; `megabatch train {bench.folder}` resumes it"
    assert (bench.folder / "checkpoints" / "latest").read_text() == "step-4"
    assert len(bench.losses()) == 4
    assert last in (bench.folder / "log.txt").read_text()
    (bench.path / "disturb.json").unlink()
    assert "resumed from" in bench.train(ranks=ranks, recipe=bench.folder)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGTERM), (1, signal.SIGKILL), (2, signal.SIGTERM)])
def test_an_update_of_many_microbatches_is_made_whole_or_begins_again(
    bench: Bench, own: Path, tmp_path: Path, ranks: int, number: signal.Signals
) -> None:
    """The signal comes in the first microbatch of the second update."""
    values = {
        "loss__function": f"{own}:within", "run__after_update": f"{own}:after_update", "run__save_every": 1,
        "update__global_batch_size": 50, "update__max_microbatch_tokens": 160, "run__max_epochs": 3,
        "eval__num_samples": 0, "parallel__wrapper": None if ranks == 1 else "fsdp2", "update__sync": "last",
    }  # fmt: skip
    whole = tmp_path / "whole"
    bench.train(ranks=ranks, run__folder=whole, **values)
    disturb(bench, place="within", step=2, ranks=[ranks - 1], signals=[number])
    ends = bench.finish(ranks=ranks, **values)
    saved = 2 if number == signal.SIGTERM else 1
    assert {end.status for end in ends} == {0 if number == signal.SIGTERM else -signal.SIGKILL}
    assert (bench.folder / "checkpoints" / "latest").read_text() == f"step-{saved}"
    (bench.path / "disturb.json").unlink()
    bench.train(ranks=ranks, recipe=bench.folder)
    assert timeless(bench.rows()) == timeless(bench.rows(whole))
    assert all(row["num_microbatches"] > 5 for row in bench.rows())


def test_a_stopped_run_ends_with_the_status_that_is_asked_for(bench: Bench, own: Path) -> None:
    """As an operator's pods do, which start again what has failed, and only that."""
    values = {"parallel__wrapper": "ddp", "run__after_update": f"{own}:after_update", "run__stopped_status": 143}
    disturb(bench, place="after", step=2, ranks=[1], signals=[signal.SIGTERM])
    ends = bench.finish(ranks=2, **values)
    assert [(end.status, end.err) for end in ends] == [(143, "")] * 2
    assert ends[0].out.splitlines()[-1].startswith("stopped by SIGTERM after update 2; ")
    (bench.path / "disturb.json").unlink()
    assert "resumed from" in bench.train(ranks=2, recipe=bench.folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_run_at_once(bench: Bench, own: Path, number: signal.Signals) -> None:
    disturb(bench, place="after", step=2, signals=[number, number], seconds=1.5)
    (end,) = bench.finish(run__after_update=f"{own}:after_update")
    assert end.status == 128 + number
    assert end.err.splitlines() == [
        f"megabatch: {number.name}: the run stops after this update; another, a second later, ends it now",
        f"megabatch: ended by {number.name}; `megabatch train {bench.folder}` resumes from the last checkpoint, or "
        "begins again",
    ]
    assert not (bench.folder / "checkpoints").exists()


def test_signals_that_come_together_are_one(bench: Bench, own: Path) -> None:
    """As torchrun's, which passes on what Slurm has sent to its processes already."""
    disturb(bench, place="after", step=2, signals=[signal.SIGTERM, signal.SIGTERM], seconds=0.1)
    assert "stopped by SIGTERM after update 2" in bench.train(run__after_update=f"{own}:after_update")


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGTERM)])
def test_before_the_first_update_a_run_ends_at_once(
    bench: Bench, own: Path, ranks: int, number: signal.Signals
) -> None:
    options = {"vocab_size": 384, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256}
    text = bench.recipe.read_text()
    head, tail = text[: text.index("[model.config]")], text[text.index("[data]") :]
    table = "\n".join(f"{key} = {value}" for key, value in options.items())
    bench.recipe.write_text(
        f'{head}tokenizer = "bytes"\nfunction = "{own}:model"\n\n[model.options]\n{table}\n\n{tail}'
    )
    disturb(bench, place="build", step=0, ranks=list(range(ranks)), signals=[number])
    ends = bench.finish(ranks=ranks)
    assert [end.status for end in ends] == [128 + number] * ranks
    lines = "".join(end.err for end in ends).splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(f"ended by {number.name}")
    assert not bench.folder.exists()


def test_a_terminals_signal_to_the_whole_group_leaves_those_alone_that_load_samples(bench: Bench, own: Path) -> None:
    """Their samples are still needed, and a traceback of theirs would be the last line that a person sees."""
    disturb(bench, place="after", step=3, signals=[0], seconds=0.5)
    values = {"run__after_update": f"{own}:after_update", "run__max_epochs": 500, "data__num_workers": 2}
    command = [sys.executable, "-m", "megabatch", "train", str(bench.recipe), *overrides(values)]
    run = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (bench.path / "disturbed-0").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (
        0,
        "megabatch: SIGINT: the run stops after this update; another, a second later, ends it now\n",
    )
    assert out.splitlines()[-1].startswith("stopped by SIGINT after update ")
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)  # nobody is left
