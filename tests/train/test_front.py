"""What needs no torch does not import it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "numpy")
SCRIPT = f"""
import sys
from megabatch.__main__ import main
try:
    main()
finally:
    print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
"""
LIGHT = ["--help", "train --help", "plan --help", "train {recipe} --help", "export --help", "doctor --help",
         "init new.toml --model small --data stdlib --hardware cpu", "completion bash",
         "completion words"]  # fmt: skip


def ran(words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, *words.format(recipe=ROOT / "recipes/stdlib.toml").split()]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("words", LIGHT)
def test_it_is_answered_without_torch(tmp_path: Path, words: str) -> None:
    done = ran(words, tmp_path)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout or words == "completion words"


def test_a_bad_command_of_these_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = ran("init new.toml --model small --dta x", tmp_path)
    assert done.returncode == 2
    line, heavy = done.stderr.splitlines()
    assert line.startswith("megabatch: Unrecognized options: --dta")
    assert line.endswith("; see megabatch init --help")
    assert heavy == "[]"
    assert not list(tmp_path.iterdir())


def test_a_name_that_can_be_none_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = ran(f"init {'n' * 300} --model small --data stdlib --hardware cpu", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    line, heavy = done.stderr.splitlines()
    assert line.startswith("megabatch: ")
    assert "File name too long" in line
    assert heavy == "[]"
    assert not list(tmp_path.iterdir())


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, megabatch; print('torch' in sys.modules); megabatch.Plan; print('torch' in sys.modules); "
    script += "megabatch.GradientAccumulator; print('torch' in sys.modules)"
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "False", "True"]
