"""Whatever surrounds the core of a run survives as the documents say: each row of their table is a case here."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megabatch.train.cli import commands as cli
from tests.train.conftest import Bench

Case = Callable[[Bench, pytest.CaptureFixture[str]], str]
CASES: dict[str, Any] = {}
SECTION = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text().partition("## Around the checkpoints")[2]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.partition("\n## ")[0].splitlines() if line.startswith("|")]
TABLE = [(event, re.findall("`([^`]+)`", said)) for event, said in ROWS[2:]]


def case(name: str, *marks: Any) -> Callable[[Case], Case]:
    """Enter a case under the words that the documents have for it."""

    def enter(run: Case) -> Case:
        CASES[name] = pytest.param(name, run, marks=marks, id=name)
        return run

    return enter


def said_by(ends: list[Any], status: int) -> str:
    """Return what ranks said, which must all have ended with this status and without a traceback."""
    text = "".join(end.out + end.err for end in ends)
    assert [end.status for end in ends] == [status] * len(ends), text
    assert "Traceback" not in text, text
    return text


def test_the_documents_list_every_case() -> None:
    assert [event for event, _ in TABLE] == list(CASES)
    assert all(said for _, said in TABLE)


# Tokenized data


@case("a bit of the tokenized data flips")
def flipped_bit(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    bench.train(run__folder=bench.path / "whole", run__max_steps=3)
    (table,) = (bench.path / "cache").glob("*/samples.arrow")
    content, draw, said = table.read_bytes(), Random(0), ""
    for number in range(3):
        flipped = bytearray(content)
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        table.write_bytes(flipped)
        said = bench.train(run__folder=bench.path / f"run{number}", run__max_steps=3)
        assert table.read_bytes() == content
        assert bench.losses(bench.path / f"run{number}") == bench.losses(bench.path / "whole")
    return said


@case("the summary of the tokenized data is changed")
def changed_summary(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    bench.train(run__max_steps=1)
    (summary,) = (bench.path / "cache").glob("*/summary.json")
    content = summary.read_text()
    summary.write_text(content.replace('"broken": 0', '"broken": 9'))
    assert summary.read_text() != content
    said = bench.train(run__folder=bench.path / "other", run__max_steps=1)
    assert "9 broken rows" not in said
    return said


@case("a sample of yours has a token beyond the model's vocabulary")
def token_beyond(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    own = bench.path / "own.py"
    own.write_text(
        "import torch\n\ndef samples():\n"
        "    rows = [torch.arange(1, 9) for _ in range(20)]\n"
        "    rows[7][3] = 1000\n"
        "    return [{'input_ids': row, 'labels': row.clone()} for row in rows]\n"
    )
    recipe = bench.path / "own.toml"
    recipe.write_text(
        bench.recipe.read_text()
        .replace('source = "jsonl"\n', "")
        .replace(f'path = "{bench.path}/data.jsonl"', f'function = "{own}:samples"')
    )
    return said_by(bench.finish(recipe=recipe, eval__num_samples=0), 2)


# The manifest


def compared(capsys: pytest.CaptureFixture[str], one: Path, other: Path) -> tuple[int, str]:
    capsys.readouterr()
    status = cli.run(["report", "--compare", "--same", str(one), str(other)])
    return status, capsys.readouterr().out


@case("the same bytes of data at another path")
def moved_data(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    moved = (bench.path / "data.jsonl").rename(bench.path / "moved.jsonl")
    values = {"run__manifest": True, "run__max_steps": 3}
    bench.train(run__folder=bench.path / "one", data__path=shutil.copy(moved, bench.path / "data.jsonl"), **values)
    bench.train(run__folder=bench.path / "two", data__path=moved, **values)
    status, text = compared(capsys, bench.path / "one", bench.path / "two")
    assert status == 0
    return text


@case("other content under the same names")
def other_content(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    values = {"run__manifest": True, "run__max_steps": 3}
    bench.train(run__folder=bench.path / "one", **values)
    data = bench.path / "data.jsonl"
    data.write_text(data.read_text().replace("ab", "zz"))
    bench.train(run__folder=bench.path / "two", **values)
    status, text = compared(capsys, bench.path / "one", bench.path / "two")
    assert status == 1
    return text


@case("rows of a manifest are missing")
def missing_rows(bench: Bench, capsys: pytest.CaptureFixture[str]) -> str:
    bench.train(run__folder=bench.path / "one", run__manifest=True, run__max_steps=4)
    shutil.copytree(bench.path / "one", bench.path / "two")
    manifest = bench.path / "two" / "manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[:1] + lines[2:]))
    status, text = compared(capsys, bench.path / "one", bench.path / "two")
    assert status == 1
    return text


@pytest.mark.parametrize(("name", "run"), list(CASES.values()))
def test_it_survives_as_the_documents_say(
    bench: Bench, capsys: pytest.CaptureFixture[str], name: str, run: Case
) -> None:
    found = " ".join(run(bench, capsys).split())
    for line in dict(TABLE)[name]:
        assert line in found
