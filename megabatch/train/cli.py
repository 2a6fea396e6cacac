"""The command line: `megabatch train RECIPE [--section.key=value ...]`.

Everything wrong with what the user gave ends as one line on stderr and status 2.
"""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import NoReturn

import tyro

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, ModelConfig, RunConfig, UpdateConfig
from megabatch.train.ranks import FAILED, FailedError, Meeting, drop_output, fail, join, meeting
from megabatch.train.recipe import load_config
from megabatch.train.trainer import Trainer

USAGE = """usage: megabatch train RECIPE [--section.key=value ...]
       torchrun --nproc-per-node N -m megabatch train RECIPE [--section.key=value ...]

RECIPE is a TOML file; the command line overrides any key of it. `megabatch train --help` explains the keys,
`megabatch train RECIPE --help` shows them with the recipe's values."""

EXAMPLE = Config(
    model=ModelConfig(config={"model_type": "llama"}),
    update=UpdateConfig(global_batch_size=32, max_microbatch_tokens=8192),
    run=RunConfig(folder="runs/RECIPE"),
)


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    status = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads what was printed last
        drop_output()
    sys.stderr.flush()
    if "RANK" in os.environ:  # gloo's threads can abort an interpreter that closes, after all work is done
        os._exit(status)
    sys.exit(status)


def run(arguments: list[str]) -> int:
    """Do what the arguments say; the exit status."""
    try:
        with meeting() as met:
            command(arguments, met)
    except FailedError as failed:
        return failed.status
    return 0


def command(arguments: list[str], met: Meeting) -> None:
    """`train`, or help."""
    if not arguments:
        fail(met, f"megabatch: no command; {USAGE}", FAILED)
    elif arguments[0] in ("-h", "--help"):
        print(USAGE)
    elif arguments[0] != "train":
        raise MegabatchError(f"unknown command {arguments[0]!r}; the command is: megabatch train RECIPE")
    else:
        train(arguments[1:], met)


def train(arguments: list[str], met: Meeting) -> None:
    """Read the recipe, join the other ranks, run."""
    recipe = Path(arguments[0]) if arguments and not arguments[0].startswith("-") else None
    if "-h" in arguments or "--help" in arguments:
        print(help_text(EXAMPLE if recipe is None else load_config(recipe, [])))
    elif recipe is None:
        raise MegabatchError("no recipe; give the path of a TOML file first: megabatch train recipes/stdlib.toml")
    else:
        config = load_config(recipe, arguments[1:])
        Trainer(config, join(met, config)).fit()


def help_text(config: Config) -> str:
    """Every key with its type, its meaning, and its value in this config."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        tyro.cli(Config, args=["--help"], default=config, prog="megabatch train RECIPE", use_underscores=True)
    return out.getvalue()
