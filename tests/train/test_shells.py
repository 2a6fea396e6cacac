"""A shell completes commands, recipes, keys and their values: the real shell, on the script that is printed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megabatch.errors import MegabatchError
from megabatch.train.cli.shells import script_for
from megabatch.train.cli.usage import COMMANDS, SHELLS
from megabatch.train.config.keys import known_keys

DRIVE = {  # a shell's program that prints what completes the line in $LINE, one a line
    "bash": """
source ./script
COMP_LINE=$LINE COMP_POINT=${#LINE}
read -ra parts <<< "${LINE//=/ = }"
COMP_WORDS=("${parts[@]}")
[[ $LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
[[ $(complete -p megabatch) == "complete -F _megabatch megabatch" ]] && _megabatch
printf '%s\\n' "${COMPREPLY[@]}"
""",
    "zsh": """
compdef() { :; }
compset() { PREFIX=${PREFIX#*=}; }
compadd() {
    local -a found; local suffix=''
    [[ $1 == -S ]] && shift 2
    shift
    for each in "$@"; do [[ $each == $PREFIX* ]] && print -r -- "$each"; done
}
_files() { setopt nullglob; print -rl -- ${PREFIX}*; [[ $1 == -g ]] && return 1; return 0; }
source ./script
words=("${(@s: :)LINE}") CURRENT=${#words} PREFIX=${words[-1]}
_megabatch
""",
    "fish": "source script; complete -C $LINE",
}
WORDS = {
    "megabatch ver": {"verify"},
    "megabatch train recipes/st": {"recipes/stdlib.toml"},
    "megabatch train r.toml --update.glo": {"--update.global_batch_size="},
    "megabatch train r.toml --update.sync=": {"auto", "last", "every", "replica_last"},
    "megabatch train r.toml --update.sync=re": {"replica_last"},
    "megabatch verify r.toml --parallel.wrapper=f": {"fsdp2"},
    "megabatch plan r.toml --device=rtx": {"rtx4090"},
    "megabatch train r.toml --run.resume=": {"true", "false"},
    "megabatch train r.toml --tracking.trackers=w": {"wandb"},
    "megabatch train r.toml --model.con": {"--model.config."},
    "megabatch export runs/a --step=": {"best", "latest"},
    "megabatch export runs/a --t": {"--to="},
    "megabatch completion z": {"zsh"},
    "megabatch train r.toml --data.path=recipes/gsm": {"recipes/gsm8k.toml"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    for name in ("stdlib.toml", "gsm8k.toml", "notes.txt"):
        (tmp_path / "recipes" / name).write_text("")
    return tmp_path


def completed(shell: str, line: str, folder: Path) -> set[str]:
    """What the shell offers; of a word with an equals sign the value."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is a program of the system, which pip does not install: apt-get install {shell}")
    (folder / "script").write_text(script_for([shell]))
    environ = {"LINE": line, "PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
    done = subprocess.run(
        [shell, "-c", DRIVE[shell]], cwd=folder, env=environ, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr == ""
    offered = {line.partition("\t")[0] for line in done.stdout.splitlines() if line}
    value = "=" in line.split(" ")[-1]
    return {word.partition("=")[2] if value and word.startswith("--") else word for word in offered} - {""}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_real_shell_completes_what_is_begun(shell: str, folder: Path) -> None:
    assert {line: completed(shell, line, folder) - {"help"} for line in WORDS} == WORDS


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_every_key_is_offered(shell: str, folder: Path) -> None:
    assert completed(shell, "megabatch ", folder) - {"--help"} == {*COMMANDS}
    keys = completed(shell, "megabatch train r.toml --", folder) - {"--help"}
    assert {word.removeprefix("--").rstrip("=.") for word in keys} == {*known_keys()}


@pytest.mark.parametrize("words", [[], ["tcsh"], ["bash", "zsh"]])
def test_a_shell_that_is_none_is_one_line(words: list[str]) -> None:
    with pytest.raises(
        MegabatchError, match=r"^cannot read the arguments '.*'; write: megabatch completion bash\|zsh\|"
    ):
        script_for(words)
