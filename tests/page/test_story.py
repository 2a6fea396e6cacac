"""A page is made of a run's folder, whatever is in it; a folder without a run is one line, with nothing written."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megabatch.train.cli import commands as cli
from megabatch.train.report import encode as columns
from megabatch.train.report.data import end_of_log, ended_of, read_run
from megabatch.train.report.html import html_of
from tests.page.made_runs import cut, evaluations, lines, recipe, update, whole_run


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = cli.run(["report", *map(str, arguments)])
    caught = capsys.readouterr()
    return status, caught.out + caught.err


def data_of(path: Path) -> dict[str, Any]:
    """The data of a page."""
    text = path.read_text().partition('<script type="application/json" id="data">')[2]
    return json.loads(text.partition("</script>")[0])


def test_a_page_has_all_that_the_run_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = whole_run(tmp_path / "run", 30)
    assert report(capsys, run) == (0, f"a page to look at: {run / 'report.html'}\n")
    (story,) = data_of(run / "report.html")["runs"]
    assert story["updates"]["step"] == list(range(1, 31))
    assert story["updates"]["loss"] == [float(f"{update(step)['loss']:.6g}") for step in range(1, 31)]
    assert story["sets"]["code"]["step"] == [0, 10, 20, 30]
    assert story["memory"] == {"step": 2, "peak_gib": 1.2, "predicted_peak_gib": 1.25}
    assert (story["planned"], story["counts_tokens"], story["is_in_nats"]) == (35, True, True)
    assert story["cuts"]["counts"] == [[3, 3]] * 30
    assert story["cuts"]["real"][:6] == [301, 200, 200] * 2
    assert [each["step"] for each in story["timelines"]] == [3, 9]
    assert story["skipped"][0]["samples"] == ["a:1"]
    assert story["ended"].startswith("stopped by SIGTERM")
    assert story["plan"][1].startswith("update.max_microbatch_tokens")
    assert story["model"] == {
        "parameters": "1,234,567", "name": "LlamaForCausalLM", "peak": "of h100-80g's 989 TFLOP/s in bfloat16",
    }  # fmt: skip
    assert story["settings"] == {"global_batch_size": "64", "lr": "0.002", "name": "AdamW"}
    assert "/a/path" not in (run / "report.html").read_text()  # the command line is the machine's


def test_it_goes_where_it_is_told_and_asks_nobody_for_anything(tmp_path: Path, capsys) -> None:
    run = whole_run(tmp_path / "run", 3)
    before = sorted(run.iterdir())
    assert report(capsys, run, "--to", tmp_path / "a.html")[0] == 0
    assert report(capsys, run, f"--to={tmp_path / 'b.html'}")[0] == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert sorted(run.iterdir()) == before
    text = (tmp_path / "a.html").read_text()
    assert "default-src 'none'" in text
    assert not [part for part in ("src=", 'href="http', "url(", "@import") if part in text]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        evaluations(0, "held-out"),
        [update(1, loss=None, grad_norm=None)],
        [update(1, loss=math.inf, lr=math.nan), {"step": 1, "set": "own", "eval_words": 3.0, "eval_loss": None}],
        [{"step": 1, "loss": 0.5, "samples_per_second": 3.0, "num_samples": 4}],
        [{"step": 2, "loss": "text", "grad_norm": True}],
    ],
)
def test_a_page_comes_of_any_rows(tmp_path: Path, capsys, rows: list[dict[str, Any]]) -> None:
    """A run that has just begun, learns nothing, is not finite, or is of images."""
    (tmp_path / "metrics.jsonl").write_text(lines(rows))
    assert report(capsys, tmp_path)[0] == 0
    (story,) = data_of(tmp_path / "report.html")["runs"]
    assert story["counts_tokens"] == ("samples_per_second" not in (rows[0] if rows else {}))
    assert story["num_updates"] == len([row for row in rows if "set" not in row])


def test_a_line_that_is_being_written_is_no_damage(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run", 12)
    for name in ("metrics.jsonl", "cuts.jsonl", "timeline.jsonl"):
        path = run / name
        path.write_text(path.read_text()[:-5])
    story = read_run(run)
    assert story["cuts"]["step"] == list(range(1, 12))
    assert [each["step"] for each in story["timelines"]] == [3]


def damaged(name: str, line: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(line + "\n" + (run / name).read_text())


@pytest.mark.parametrize(
    ("spoil", "line"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "has no metrics.jsonl; give the folder of a run that has begun"),
        (damaged("metrics.jsonl", "{"), "metrics.jsonl is damaged (line 1 is no row with a step)"),
        (damaged("cuts.jsonl", '{"step": 1}'), "cuts.jsonl is damaged (update 1 has no cut); delete that line"),
        (damaged("cuts.jsonl", '{"step": 1, "cut": [[[1], [2], []]]}'), "cuts.jsonl is damaged (update 1 has no cut)"),
        (damaged("timeline.jsonl", '{"step": 1}'), "timeline.jsonl is damaged (a line is no timeline)"),
        (damaged("skipped.jsonl", "[]"), "skipped.jsonl is damaged (line 1 is no row with a step)"),
        (damaged("skipped.jsonl", '{"step": 1, "samples": 5}'), "a file of "),
    ],
)
def test_what_is_damaged_is_one_line_and_nothing_is_written(tmp_path: Path, capsys, spoil, line: str) -> None:
    run = whole_run(tmp_path / "run", 4)
    spoil(run)
    before = sorted(tmp_path.rglob("*"))
    for arguments in ((run,), (run, "--to", tmp_path / "page.html")):
        status, text = report(capsys, *arguments)
        assert (status, len(text.splitlines())) == (2, 1)
        assert line in text
    assert sorted(tmp_path.rglob("*")) == before


def test_what_cannot_be_asked_for_is_one_line(tmp_path: Path, capsys) -> None:
    run = whole_run(tmp_path / "run", 4)
    cases = [
        ((tmp_path / "none",), "is no folder; give the folder of a run"),
        ((), "write: megabatch report RUN [--to FILE.html], or report --compare RUN RUN ..."),
        ((run, run), "write: megabatch report RUN"),
        (("--compare", run), f"{run} is the only run; name two or more to compare, or their folder"),
        (("--compare", run, tmp_path / "none"), "is no folder"),
        ((run, "--to"), "Missing value for argument '--to'"),
        ((run, "--tee", "a"), "Unrecognized options: --tee"),
        ((run, "--to", tmp_path / "none" / "page.html"), "is no folder; make it, or choose another --to"),
        ((run, "--to", tmp_path), "is a folder; --to names a file"),
        ((run, "--to", tmp_path / "pipe"), "is no file that can be put in place of another"),  # nor is /dev/stdout
        ((run, "--to", "/dev/full/page.html"), "is no folder; make it, or choose another --to"),
        ((run, "--to", "/proc/page.html"), "cannot write /proc/page.html"),
    ]
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))
    for arguments, line in cases:
        status, text = report(capsys, *arguments)
        assert (status, len(text.splitlines())) == (2, 1), text
        assert line in text
    assert sorted(tmp_path.rglob("*")) == before


def test_runs_are_laid_one_over_the_other(tmp_path: Path, capsys) -> None:
    """Any number; what differs and which is best is told, and the status is 0."""
    runs = [
        recipe(whole_run(tmp_path / name, 12), f"[optim]\nlr = {lr}\n")
        for name, lr in (("a", 1.0), ("b", 2.0), ("c", 1.0))
    ]
    status, text = report(capsys, "--compare", *runs)
    table, best, where = text.rpartition("best: ")
    assert (status, best) == (0, "best: ")
    assert table.splitlines()[0].split()[:3] == ["run", "state", "optim.lr"]
    assert where == f"a, loss 2.9999 on held-out after update 10\na page to look at: {tmp_path / 'comparison.html'}\n"
    data = data_of(tmp_path / "comparison.html")
    assert [run["name"] for run in data["runs"]] == ["a", "b", "c"]
    assert data["comparison"]["best"] == 0
    assert [row[2] for row in data["comparison"]["rows"]] == ["1", "2", "1"]
    assert report(capsys, "--compare", tmp_path) == (0, text)
    assert report(capsys, "--compare", *runs, "--to", tmp_path)[0] == 2


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path, capsys, monkeypatch) -> None:
    runs = [whole_run(tmp_path / "x" / name / "run", 3) for name in ("one", "other")]
    monkeypatch.chdir(tmp_path)
    assert report(capsys, "--compare", *runs)[0] == 0
    assert [run["name"] for run in data_of(tmp_path / "comparison.html")["runs"]] == ["one/run", "other/run"]


def test_no_name_ends_the_element_that_it_stands_in(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script>"
    run = whole_run(tmp_path / "x<b>", 2)
    (run / "metrics.jsonl").write_text(lines([*evaluations(0, name), update(1)]))
    text = html_of({"runs": [read_run(run)]})
    assert name not in text
    assert "<title>x&lt;b&gt;</title>" in text
    assert text.count("</script>") == html_of({"runs": []}).count("</script>")


def test_a_page_stays_small(tmp_path: Path) -> None:
    """Many updates are thinned and the last one stays; so are many bars."""
    rows = [update(step) for step in range(1, columns.MOST_UPDATES * 2 + 2)]
    kept, every = columns.thinned(rows, columns.MOST_UPDATES)
    assert (every, kept[1]["step"], kept[-1]["step"]) == (3, 4, columns.MOST_UPDATES * 2 + 1)
    cuts = columns.cuts_of([cut(step, ranks=64, microbatches=250) for step in range(1, 41)], "cuts.jsonl")
    assert len(cuts["samples"]) <= columns.MOST_MICROBATCHES + 64 * 250
    assert (cuts["every"], cuts["step"][-1]) == (6, 40)
    assert columns.thinned([], 5) == ([], 1)


@pytest.mark.parametrize(
    ("log", "ended"),
    [
        ("t  stopped by SIGINT after update 3; resumes\n", "stopped by SIGINT after update 3; resumes"),
        ("t  stopped by SIGINT after update 3\nt  resumed\nt  update    4  loss 1\n", ""),
        ("t  stopped by SIGINT after update 3\nt  resumed from runs/a/checkpoints/step-3\nt  plan  4 updates\n", ""),
        ("t  stopped by SIGINT after update 0\nt  nothing was saved yet: the run begins at update 0\n", ""),
        ("t  the data ran out after 1 epoch\nt  a line after it\n", "the data ran out after 1 epoch"),
        ("", ""),
    ],
)
def test_how_a_run_ended_stands_in_its_log(tmp_path: Path, log: str, ended: str) -> None:
    assert ended_of(end_of_log(tmp_path)) == ""
    (tmp_path / "log.txt").write_text(log)
    assert ended_of(end_of_log(tmp_path)) == ended
