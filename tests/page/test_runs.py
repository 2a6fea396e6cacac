"""The runs of a folder side by side: their states, what differs, which is best, and damage in one row."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megabatch.train.cli import front
from megabatch.train.report.runs import RunSummary, best_run, differing_keys, find_runs, runs_text, summarize
from tests.page.made_runs import evaluations, lines, recipe, update, whole_run

HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); "
    "sys.stdin.read()"
)


def some_runs(folder: Path) -> Path:
    """Three learning rates; the one in the middle is the best."""
    for lr, loss in (("1e-3", 3.0), ("3e-3", 1.5), ("1e-2", 2.0)):
        run = recipe(whole_run(folder / f"lr={lr}", 30), f'[optim]\nlr = {lr}\n[run]\nfolder = "{lr}"\n')
        rows = [
            update(1, seconds=3.5),
            *evaluations(1, "held-out", "code"),
            {"step": 2, "set": "own", "eval_words": 3.0},
        ]
        (run / "metrics.jsonl").write_text(
            lines([*rows, {"step": 2, "set": "held-out", "eval_loss": loss, "seconds": 200.25}])
        )
    return folder


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int | None, str]:
    status = front.run(["runs", *map(str, arguments)])
    caught = capsys.readouterr()
    return status, caught.out + caught.err


def test_runs_stand_beside_each_other_with_what_differs_and_the_best(tmp_path: Path, capsys) -> None:
    status, text = said(capsys, some_runs(tmp_path))
    assert status == 0
    head, *rows, best = text.splitlines()
    assert head.split() == ["run", "state", "optim.lr", "best", "loss", "at", "update", "tokens/s", "time", "started"]
    assert [row.split()[0] for row in rows] == ["lr=1e-2", "lr=1e-3", "lr=3e-3"]
    assert re.split("  +", rows[2]) == [
        "lr=3e-3", "stopped at update 1", "0.003", "1.5000", "2", "12,347", "3 min 20 s", "2000-01-01 00:00",
    ]  # fmt: skip
    assert best == "best: lr=3e-3, loss 1.5000 on held-out after update 2"
    assert (
        len({row.index("0.0") + len(value) for row, value in zip(rows, ("0.01", "0.001", "0.003"), strict=True)}) == 1
    )


def test_a_program_reads_the_same(tmp_path: Path, capsys) -> None:
    found = json.loads(said(capsys, some_runs(tmp_path), "--json")[1])
    assert [each["name"] for each in found] == ["lr=1e-2", "lr=1e-3", "lr=3e-3"]
    assert found[2]["recipe"] == {"optim.lr": 0.003, "run.folder": "3e-3"}
    assert (found[2]["best_loss"], found[2]["best_step"], found[2]["set"], found[2]["seconds"]) == (
        1.5,
        2,
        "held-out",
        200.25,
    )


@pytest.mark.parametrize(
    ("log", "state"),
    [
        ("", "stopped at update 7"),
        ("t  stopped by SIGTERM after update 7; resumes\n", "stopped at update 7"),
        ("t  stopped by SIGTERM after update 3; resumes\nt  resumed from x\n", "stopped at update 7"),
        ("t  stopped by KeyboardInterrupt\n", "stopped at update 7"),
        ("t  stopped by MegabatchError: update 8 was not stepped\n", "failed at update 7"),
        ("t  stopped at run.max_steps = 7; the data is enough for 9 updates\n", "ended"),
        ("t  stopped after update 7: the watched loss has not fallen\n", "ended"),
        ("t  the data ran out after 1 epoch\n", "ended"),
        ("t  resumed from x\nt  finished at update 6: raise run.max_epochs, which is 1, to train on\n", "ended"),
    ],
)
def test_the_state_is_that_of_the_log(tmp_path: Path, log: str, state: str) -> None:
    run = whole_run(tmp_path / "run", 7)
    (run / "log.txt").write_text(log)
    assert summarize(run, "run").state == state


def test_a_run_that_made_its_planned_updates_has_ended_whatever_its_log_says(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run", 7)
    (run / "plan.txt").write_text("plan  7 updates of 64 samples\n")
    assert summarize(run, "run").state == "ended"


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run", 7)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert summarize(run, "run").state == "running"
        holder.communicate()
    assert summarize(run, "run").state == "stopped at update 7"


def test_a_damaged_run_is_a_row_that_says_so(tmp_path: Path, capsys) -> None:
    some_runs(tmp_path)
    (tmp_path / "lr=1e-2" / "metrics.jsonl").write_text("{}\n{}\n")
    (tmp_path / "lr=1e-3" / "config.toml").write_text("[optim\n")
    (recipe(tmp_path / "new", "[optim]\nlr = 1.0\n") / "metrics.jsonl").write_text('{"step": 1, "lo')
    status, text = said(capsys, tmp_path)
    assert status == 0
    rows = {line.split()[0]: line for line in text.splitlines()}
    assert rows["lr=1e-2"].split() == ["lr=1e-2", "damaged"]
    assert "line 1 is no row with a step" in rows["lr=1e-2:"]
    assert "TOMLDecodeError" in rows["lr=1e-3:"]
    assert rows["new"].split() == ["new", "stopped", "at", "update", "0", "1"]
    assert "lr=3e-3" in rows


@pytest.mark.parametrize("spoil", [{"starts": [3]}, {"starts": [{"time_utc": "no time"}]}, {"starts": [{}]}])
def test_a_start_without_its_time_is_no_traceback(tmp_path: Path, capsys, spoil: dict) -> None:
    run = whole_run(tmp_path / "run", 7)
    (run / "environment.json").write_text(json.dumps(spoil))
    assert said(capsys, tmp_path)[0] == 0


def test_losses_of_other_samples_are_told(tmp_path: Path, capsys) -> None:
    some_runs(tmp_path)
    recipe(tmp_path / "lr=1e-2", '[optim]\nlr = 0.01\n[data]\npath = "other"\n')
    assert "of different samples or tokens: data.path differs" in said(capsys, tmp_path)[1]


def test_keys_that_find_no_room_are_named_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    runs = [
        RunSummary(name, "ended", {f"optim.options.key_{place}": f"{name}{'x' * 30}" for place in range(5)})
        for name in "ab"
    ]
    head, one, _, others = runs_text(runs).splitlines()
    assert one.count("\N{HORIZONTAL ELLIPSIS}") == head.count("key_") == 3
    assert others == "also different (--json has the values): optim.options.key_3, optim.options.key_4"
    runs = [RunSummary(name, "ended", {f"optim.options.key_{place}": name for place in range(20)}) for name in "ab"]
    assert runs_text(runs).splitlines()[-1].endswith("more")
    assert runs_text(runs).splitlines()[-1].count("key_") == 8


def test_a_key_that_one_recipe_lacks_differs_and_the_best_of_one_is_none() -> None:
    one, other = (
        RunSummary("a", "ended", {"x": None, "y": 1}, best_loss=0.0),
        RunSummary("b", "ended", {"y": 1, "z": 0}),
    )
    assert differing_keys([one, other, RunSummary("c", "damaged")]) == ["z"]
    assert best_run([one, other]) is None
    assert best_run([one, RunSummary("c", "ended", best_loss=-1.0)]).name == "c"
    assert best_run([RunSummary("c", "ended", best_loss=0.0), one]).name == "a", "the first by name of equal ones"


def test_runs_of_two_losses_have_a_best_of_each_and_options_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [
        RunSummary(
            name, "ended", {"model.options.n": name, "loss.function": loss, "optim.lr": value}, 1, "held-out", value
        )
        for name, loss, value in (("a", "text", 2.0), ("b", "text", 1.0), ("c", "labels", 0.5))
    ]
    assert differing_keys(runs) == ["optim.lr", "loss.function", "model.options.n"]
    assert best_run(runs) is None
    assert runs_text(runs).splitlines()[-2:] == [
        "loss.function differs, so the losses are of different tasks: text, labels",
        "best: b, loss 1.0000 on held-out after update None",
    ]


def test_runs_are_found_below_folders_and_a_run_is_its_own(tmp_path: Path) -> None:
    for name in ("sweep/run-10", "sweep/run-9", "alone"):
        recipe(tmp_path / name, "")
    (tmp_path / "alone" / "checkpoints").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in find_runs(tmp_path)] == [
        "alone",
        "sweep/run-9",
        "sweep/run-10",
    ]
    assert find_runs(tmp_path / "alone") == [tmp_path / "alone"]


def test_what_has_no_runs_is_one_line(tmp_path: Path, capsys) -> None:
    for arguments, line in [
        ((tmp_path / "none",), "is no folder; give the folder that holds runs"),
        ((tmp_path,), "has no run; give the folder that holds runs"),
        ((tmp_path, "--jsom"), "Unrecognized options: --jsom"),
    ]:
        status, text = said(capsys, *arguments)
        assert (status, len(text.splitlines())) == (2, 1)
        assert line in text
