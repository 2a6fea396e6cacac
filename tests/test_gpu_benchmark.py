"""`python -m benchmarks.gpu` at toy sizes on a CPU, so that it works on the day a GPU is at hand."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import figures
from benchmarks.gpu import table
from benchmarks.gpu.__main__ import BY_NAME, SECTIONS, main
from benchmarks.gpu.job import Job, read
from benchmarks.gpu.summary import summarize

ROOT = Path(__file__).parents[1]
QUICK = ("oom", "waits", "memory")


def run_sections(names: list[str], out: Path, *more: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    words = ["--device", "cpu", "--small", "--minutes", "14", "--only", ",".join(names), "--out", str(out), *more]
    command = [sys.executable, "-m", "benchmarks.gpu", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def check_rows(out: Path, names: list[str]) -> None:
    rows = read(out)
    assert rows[0]["name"] == "made with"
    assert {row["section"] for row in rows[1:]} == set(names)
    assert [row for row in rows if row.get("ok") is False] == []
    ended = [row["section"] for row in rows if row["name"] == "ended"]
    assert sorted(ended) == sorted(names)
    for name in names:
        assert any(row["section"] == name and row.get("ok") for row in rows), name


@pytest.mark.slow
def test_some_sections_run(tmp_path: Path) -> None:
    done = run_sections([*QUICK], tmp_path / "gpu.jsonl")
    assert done.returncode == 0, done.stdout + done.stderr
    check_rows(tmp_path / "gpu.jsonl", [*QUICK])


@pytest.mark.full
def test_every_section_runs_and_fills_the_tables(tmp_path: Path) -> None:
    out = tmp_path / "gpu_cpu_2000-01-01.jsonl"
    done = run_sections([*BY_NAME], out)
    assert done.returncode == 0, done.stdout + done.stderr
    check_rows(out, [*BY_NAME])
    rendered = table.render(out.name, read(out))
    for words in ("| float64 fsdp2 gather_once |", "| 0.1B float32 2x32, recomputed |", "| 0.1B GSM8K | megabatch |"):
        assert words in rendered
    drawn = figures.gpu_speed("light", [out], read(out))
    assert drawn.count("MegabatchTrainer") == 1
    assert "FAILED" not in summarize(read(out))


@pytest.mark.full
def test_a_section_over_its_time_ends_alone_and_is_named(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    words = ["--device", "cpu", "--small", "--minutes", "0.18", "--only", "train", "--out", str(out)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    (ended,) = [row for row in read(out) if row["name"] == "ended"]
    assert "over its limit" in ended["error"]


def test_an_error_is_a_row_and_the_section_goes_on(tmp_path: Path) -> None:
    job = Job("exact", tmp_path / "gpu.jsonl", tmp_path, torch.device("cpu"), True, 1.0)
    with job.row("fails") as row:
        row["seen"] = 1
        raise ValueError("no such thing")
    with job.row("passes"):
        pass
    failed, passed = read(job.out)
    assert (failed["ok"], failed["seen"], failed["error"]) == (False, 1, "ValueError: no such thing")
    assert "test_gpu_benchmark.py" in failed["at"]
    assert passed["ok"] is True


@pytest.mark.parametrize("words", [["--device", "cpu"], ["--only", "nothing"], ["--only", "exact,nothing"]])
def test_a_command_line_that_cannot_run_is_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *words])
    with pytest.raises(SystemExit, match="2"):
        main()


def test_the_page_has_the_tables_of_the_newest_result() -> None:
    page = table.PAGE.read_text()
    between = page.partition(table.START)[2].partition(table.END)[0]
    assert between == table.text(), "run python -m benchmarks.gpu --table"


def test_the_page_explains_every_section() -> None:
    page = (ROOT / "benchmarks" / "gpu" / "README.md").read_text()
    for section in SECTIONS:
        assert f"`{section.name}`" in page
