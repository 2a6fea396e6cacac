"""`megabatch audit -- COMMAND`: findings of scripts that nobody changed, statuses, and no effect on the run."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megabatch
from megabatch import Audit, MegabatchError
from megabatch.train.cli.arguments import Audit as Arguments
from megabatch.train.cli.arguments import read_arguments
from megabatch.train.cli.audited_command import PAGE, read_findings, run_audited
from megabatch.verification.audit_records import UpdateRecord
from tests.unit.failures.table import line_of
from tests.unit.test_audit import LM, train

ROOT = Path(__file__).parents[2]
PYTHON = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def recorded(folder: Path, kind: str) -> None:
    """Records of a loop, as an audited process leaves them."""
    with megabatch.audit() as found:
        train(LM(), kind)
    folder.mkdir()
    (folder / "host-1.jsonl").write_text("".join(f"{Audit.to_line(each)}\n" for each in found.records))


def test_the_command_stands_after_two_dashes() -> None:
    asked = read_arguments(Arguments, ["--updates", "5", "--", "python", "train.py", "--lr", "1e-4"])
    assert asked.command == ("python", "train.py", "--lr", "1e-4")
    assert asked.updates == 5


@pytest.mark.parametrize(
    ("kind", "fail_over", "status"),
    [("exact", 0.01, 0), ("means", None, 0), ("means", 0.01, 1), ("means", 5.0, 0), ("twice", 50.0, 1)],
)
def test_the_status_follows_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, fail_over: float | None, status: int
) -> None:
    folder = tmp_path / "audit"
    recorded(folder, kind)
    assert run_audited(Arguments(to=folder, fail_over=fail_over)) == status
    said = capsys.readouterr().out
    assert f"a page to look at: {folder / PAGE}" in said
    assert ("FAILED" in said) == bool(status)
    assert "Microbatches of update 1" in (folder / PAGE).read_text()


def test_what_no_process_notes_cannot_be_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shell = ("sh", "-c", "exit 3")
    assert run_audited(Arguments(shell, to=tmp_path / "a")) == 3
    assert "cannot tell, no update was seen" in capsys.readouterr().out
    assert run_audited(Arguments(("true",), to=tmp_path / "b", fail_over=0.01)) == 0
    assert "--fail-over 0.01: cannot tell, so it does not fail" in capsys.readouterr().out


def test_an_audit_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("megabatch-audit", "megabatch-audit-2"):
        run_audited(Arguments(("true",)))
        assert (tmp_path / name / PAGE).is_file()
    with pytest.raises(MegabatchError, match="megabatch-audit exists; --to names a new folder"):
        run_audited(Arguments(("true",), to=Path("megabatch-audit")))
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (Arguments(), "no command; write it after --: megabatch audit -- python train.py"),
        (Arguments(("true",), updates=0), "--updates is 0; watch at least one"),
        (Arguments(("no-such-program",)), "no-such-program cannot be started: FileNotFoundError"),
    ],
)
def test_bad_input_gets_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: Arguments, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert line_of(run_audited, asked).startswith(line)
    assert not list(tmp_path.iterdir())


def test_runs_of_several_ranks_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    for launcher, kind, world in (("host-7", "exact", 2), ("host-8", "means", 2)):
        with megabatch.audit() as found:
            train(LM(), kind)
        for rank in range(world):
            changed = [replace(each, rank=rank) for each in found.records]
            records = [replace(each, world=world) if isinstance(each, UpdateRecord) else each for each in changed]
            if launcher == "host-7":
                records = [each for each in records if getattr(each, "number", 0) < 2]  # it ended sooner
            lines = "".join(f"{Audit.to_line(each)}\n" for each in records)
            (tmp_path / f"{launcher}-{rank}.jsonl").write_text(lines)
    found, others = read_findings(tmp_path, "")
    assert (len(found.updates), others) == (3, 1)
    assert "NOT exact" in str(found).splitlines()[0]
    for each in tmp_path.glob("host-8-1*"):  # the ranks of one run on two machines
        each.rename(tmp_path / "other-3-1.jsonl")
    found, others = read_findings(tmp_path, "")
    assert (len(found.updates), others) == (3, 1)
    assert "records of" not in str(found)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "host-1.jsonl").write_text('{"kind": "nothing"}\n{}\n')
    with pytest.raises(MegabatchError, match="line 1 is not of an audit"):
        read_findings(tmp_path, "")


def run_loop(kind: str, folder: Path, *audit: str) -> tuple[str, list[Any]]:
    """A loop of another library in a process of its own, audited or not: what was printed, and the weights."""
    folder.mkdir()
    loop = [sys.executable, "-m", "tests.integrations.audited_loops", kind, str(folder)]
    command = [sys.executable, "-m", "megabatch", "audit", "--to", str(folder / "audit"), *audit, "--", *loop]
    done = subprocess.run(command if audit else loop, cwd=ROOT, env=PYTHON, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout + f"status {done.returncode}\n", torch.load(folder / "weights.pt")


ASKS_FIRST = """
import importlib.util, sys
path = list(sys.path)
importlib.util.find_spec("torch")  # as datasets and transformers do
import torch
assert path == sys.path
model = torch.nn.Linear(3, 5)
torch.nn.functional.cross_entropy(model(torch.ones(2, 3)), torch.tensor([1, 2])).backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


@pytest.mark.full
def test_a_script_that_asks_for_torch_before_it_imports_it_is_watched(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megabatch", "audit", "--to", str(tmp_path / "audit"), "--", sys.executable, "-c"]
    done = subprocess.run([*command, ASKS_FIRST], cwd=ROOT, env=PYTHON, capture_output=True, text=True, check=True)
    assert "1 update, 1 rank, 1 microbatch, 2 targets" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "trainer", "verdict", "factors"),
    [
        ("trainer", "Trainer", "exact: the token mean", (1, 1, 1)),
        ("trainer-mean", "OwnMean", "NOT exact: mean of microbatch means", (4, 4, 2)),
        ("accelerate", "", "NOT exact: mean of microbatch means", (1, 1, 0.5)),
        ("lightning", "Module", "NOT exact: mean of microbatch means", (1, 1, 0.5)),
        (
            "sft",
            "SFTTrainer",
            "NOT exact: token mean",
            (0.97, 0.97, 0.97),
        ),  # counts first labels, which GPT-2 does not predict
    ],
)
def test_errors_of_unmodified_loops_are_found_and_weights_are_bit_equal(
    tmp_path: Path, kind: str, trainer: str, verdict: str, factors: tuple[float, ...]
) -> None:
    said, watched = run_loop(kind, tmp_path / "audited", "--fail-over", "0.01")
    (line,) = [each for each in said.splitlines() if each.startswith("megabatch audit of")]
    assert f": {verdict}" in line
    assert f"status {int('NOT' in verdict)}" in said
    found, others = read_findings(tmp_path / "audited" / "audit", "")
    assert others == 0
    assert found.loop.trainer == trainer
    assert [each.factor for each in found.updates] == pytest.approx(factors, abs=0.03)
    assert found.left_over == []
    assert not found.unknown
    _, alone = run_loop(kind, tmp_path / "alone")
    assert all(map(torch.equal, watched, alone))
