"""A command with a recipe, before torch is imported: keys, types and paths are checked in under a second."""

import os
from collections.abc import Sequence
from pathlib import Path

from megabatch.errors import MegabatchError
from megabatch.train.checkpoints.paths import has_checkpoint, holds_a_run, recipe_named
from megabatch.train.cli.arguments import COMMANDS, check_removed, options_of
from megabatch.train.config import Config
from megabatch.train.config.keys import FOREIGN_KEYS, nearest
from megabatch.train.config.recipe import load_config, split_options
from megabatch.train.config.recipe_paths import check_paths, near
from megabatch.train.data.sources import KINDS, ending_of, find_files, named_sources
from megabatch.train.trust import check_trust


def read_config(name: str, arguments: Sequence[str], *, is_new: bool = True) -> Config:
    """Return the recipe of a command with its overrides; a run's folder stands for its own recipe, resumed.

    Raises `MegabatchError` for wrong keys, types and paths. `plan` looks at no data, and at no folder of a run.
    ``is_new``: look whether `train` may begin a run in its folder.
    """
    check_removed(name, arguments)
    if not arguments or arguments[0].startswith("-"):
        raise MegabatchError(f"no recipe; give the path of a TOML file first: megabatch {name} recipe.toml")
    recipe = Path(arguments[0])
    pairs, overrides = split_options(arguments[1:], *options_of(COMMANDS[name]))
    options = dict(pairs)
    names = [option for options in options_of(COMMANDS[name]) for option in options]
    for word in overrides:
        # Every key of a recipe has a dot.
        option = word.lstrip("-").partition("=")[0]
        if "." not in option and option not in FOREIGN_KEYS and (near_option := nearest(option, names)) is not None:
            raise MegabatchError(f"unknown option {word.partition('=')[0]}; the nearest one is --{near_option}")
    if recipe.is_file() and ending_of(recipe.name) in KINDS:
        raise MegabatchError(f"{recipe} is data, not a recipe; write a recipe for it: megabatch init --data {recipe}")
    if "sweep" in options:
        raise MegabatchError("--sweep makes one run after the other; under torchrun start each run by itself")
    is_run, path = recipe.is_dir(), recipe_named(recipe)
    if is_run and name != "plan":
        overrides = [f"--run.folder={recipe}", "--run.resume=true", *overrides]
    config = load_config(path, overrides)
    if "trust" not in options:
        check_trust(path, overrides, is_run=is_run)
    if name == "plan":
        return config
    check_paths(config)
    for key, source in named_sources(config).items():
        find_files(source, key)
    folder = Path(config.run.folder)
    # torchrun may have restarted the run; `resume_if_restarted` finds out.
    may_be_restarted = "TORCHELASTIC_RUN_ID" in os.environ
    if name == "train" and is_new and not config.run.resume and not may_be_restarted and has_checkpoint(folder):
        raise holds_a_run(folder)
    start = config.run.init_from
    if start is not None and not has_checkpoint(folder) and not has_checkpoint(Path(start)):
        raise MegabatchError(
            f"run.init_from is {start!r}, which holds no checkpoint{near(Path(start))}; name the folder of a run"
        )
    return config


def device_path(name: str, arguments: Sequence[str]) -> Path | None:
    """Return the file of `plan --measure FILE`. Raises `MegabatchError` for anything beside it."""
    if name != "plan" or not any(word.partition("=")[0] == "--measure" for word in arguments):
        return None
    pairs, words = split_options(arguments, *options_of(COMMANDS[name]))
    if words := [*words, *(f"--{option}" for option, _ in pairs if option != "measure")]:
        raise MegabatchError(f"--measure measures this machine, and {words[0]!r} is given too; leave it out")
    return Path(pairs[-1][1])
