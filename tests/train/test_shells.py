"""A shell completes commands, recipes, keys and their values: the real shell, at the real tab key."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
from megabatch.train.plan.asked import VALUES

from megabatch.errors import MegabatchError
from megabatch.train.cli.arguments import COMMANDS, Completion, Plan, read_arguments
from megabatch.train.cli.completion import SCRIPTS, words_of
from megabatch.train.config.keys import known_keys

ROOT = Path(__file__).parents[2]
WORDS = {
    "megabatch ver": ["verify"],
    "megabatch nothing ": [],
    "megabatch train recipes/st": [],
    "megabatch train r.toml --update.glo": ["--update.global_batch_size="],
    "megabatch train r.toml --update.sync=": [f"--update.sync={v}" for v in ("auto", "last", "every", "replica_last")],
    "megabatch train r.toml --update.sync=re": ["--update.sync=replica_last"],
    "megabatch train r.toml --update.sync re": ["replica_last"],
    "megabatch verify r.toml --parallel.wrapper=f": ["--parallel.wrapper=fsdp2"],
    "megabatch plan r.toml --device=rtx": ["--device=rtx4090"],
    "megabatch plan r.toml --js": ["--json"],
    "megabatch train r.toml --run.resume=": ["--run.resume=true", "--run.resume=false"],
    "megabatch train r.toml --run.keep_b": ["--run.keep_best="],
    "megabatch train r.toml --tracking.trackers=w": ["--tracking.trackers=wandb"],
    "megabatch train r.toml --model.con": ["--model.config."],
    "megabatch export runs/a --step=": ["--step=best", "--step=latest"],
    "megabatch export runs/a --t": ["--to="],
    "megabatch completion z": ["zsh"],
    "megabatch train r.toml --data.path=recipes/gsm": [],
}
TYPED = {  # what is on the line after a tab
    "megabatch ver": "megabatch verify ",
    "megabatch train recipes/st": "megabatch train recipes/stdlib.toml",
    "megabatch train r.toml --update.glo": "--update.global_batch_size=",
    "megabatch train r.toml --update.sync=re": "--update.sync=replica_last",
    "megabatch train r.toml --data.path=recipes/gsm": "--data.path=recipes/gsm8k.toml",
}
BEGIN = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a person stands; with `megabatch` as a program."""
    (tmp_path / "recipes").mkdir()
    for name in ("stdlib.toml", "gsm8k.toml"):
        (tmp_path / "recipes" / name).write_text("")
    program = tmp_path / "megabatch"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m megabatch "$@"\n')
    program.chmod(0o755)
    return tmp_path


def environ(folder: Path) -> dict[str, str]:
    path = f"{folder}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8", "TERM": "dumb", "PS1": "$ "}


@pytest.mark.parametrize("line", WORDS)
def test_the_words_that_may_end_a_line(line: str) -> None:
    assert words_of(line) == WORDS[line]


def test_every_command_and_every_key_is_offered() -> None:
    assert set(words_of("megabatch ")) == {*COMMANDS, "--help"}
    keys = {word.removeprefix("--").rstrip("=.") for word in words_of("megabatch train r.toml --")}
    assert keys - {"help"} == {*known_keys()}


def test_the_options_of_plan_are_those_that_it_reads() -> None:
    assert {each.name for each in fields(Plan)} == {"recipe", "json", *VALUES}


@pytest.mark.slow
@pytest.mark.parametrize("shell", BEGIN)
def test_a_real_shell_completes_what_is_begun(shell: str, folder: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is a program of the system, which pip does not install: apt-get install {shell}")
    for line, whole in TYPED.items():
        terminal, end = pty.openpty()
        process = subprocess.Popen(BEGIN[shell], cwd=folder, env=environ(folder), stdin=end, stdout=end, stderr=end)
        try:
            compinit = "autoload -U compinit; compinit -u -D; " if shell == "zsh" else ""
            os.write(terminal, f'{compinit}eval "$(megabatch completion {shell})"; echo READ\\Y\n'.encode())
            seen_until(terminal, "READY")
            os.write(terminal, f"{line}\t".encode())
            assert whole in seen_until(terminal, whole)
        finally:
            process.kill()
            process.wait()
            os.close(terminal)
            os.close(end)


def seen_until(terminal: int, text: str) -> str:
    """What the terminal has shown when it shows the text, or after half a minute."""
    seen, deadline = "", time.monotonic() + 30
    while text not in seen and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace").replace("\x07", "").replace("\r", "")
    return seen


@pytest.mark.slow
def test_fish_completes_what_is_begun(folder: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is a program of the system, which pip does not install: apt-get install fish")
    (folder / "script").write_text(SCRIPTS["fish"])
    for line in [line for line in WORDS if WORDS[line]]:
        command = ["fish", "--no-config", "-c", f"source script; complete -C '{line}'"]
        done = subprocess.run(command, cwd=folder, env=environ(folder), capture_output=True, text=True, timeout=60)
        assert [each.partition("\t")[0] for each in done.stdout.splitlines()] == sorted(WORDS[line]), done.stderr


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_a_shell_that_is_none_is_one_line(words: list[str]) -> None:
    with pytest.raises(MegabatchError, match=r"; see megabatch completion --help$") as raised:
        read_arguments(Completion, words)
    assert "\n" not in str(raised.value)
