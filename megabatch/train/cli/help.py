"""Help of the commands, by tyro, with every key of a recipe, and the words that a shell completes.

tyro explains the keys and config/recipe.py reads them: a table's own keys are free (--optim.options.momentum=0.9).
At each tab the shell asks `megabatch completion words` what may end the line: tyro's own scripts complete neither files
of positional arguments nor --key=value, and zsh cannot evaluate them.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff

from megabatch.train.checkpoints.paths import recipe_named
from megabatch.train.cli.arguments import COMMANDS, WITH_RECIPE
from megabatch.train.config import Config, ModelConfig, RunConfig, Section, SourceConfig, UpdateConfig
from megabatch.train.config.keys import is_named_sources, is_options, known_keys
from megabatch.train.config.recipe import load_config

EXAMPLE = Config(  # the defaults, and values of the keys that have none
    model=ModelConfig(config={"model_type": "llama"}),
    update=UpdateConfig(global_batch_size=32, max_microbatch_tokens=8192),
    run=RunConfig(folder="runs/RECIPE"),
)

ENDING = """Write --section.key=value: none for no value, a,b,c for a list, ["a", "b"] for a list of paths, and
--section.table.key=value for a key of a table. Keys of [data.mixture.NAME] and [eval.sets.NAME]:
"""
TEN_KEYS = """The ten keys that matter:
  --data.path=FILE                   what is learned
  --model.name=NAME                  weights to start from: a name of the hub or a folder
  --update.global_batch_size=N       samples of an optimizer step, over all ranks
  --update.max_microbatch_tokens=N   lower it if memory is short: the gradient stays the same
  --optim.lr=RATE                    peak learning rate
  --optim.warmup_steps=N             updates over which it rises
  --run.max_epochs=N                 passes over the data
  --run.folder=FOLDER                everything that the run writes
  --run.save_every=N                 updates between two checkpoints
  --run.resume=true                  go on from the latest checkpoint

All options and keys:
"""
SCRIPTS = {  # a shell offers files where no word is printed; words that end in = or . are followed by no space
    "bash": "complete -o default -o nospace -C 'megabatch completion words' megabatch",
    "zsh": """_megabatch() {
    local -a found=("${(@f)$(COMP_LINE="${(j: :)words[1,CURRENT]}" megabatch completion words)}")
    compadd -S '' -- ${(M)found:#*[=.]}
    compadd -- ${found:#*[=.]} || { compset -P '*='; _files }
}
compdef _megabatch megabatch""",
    "fish": """function __megabatch_words
    set -g __megabatch_found (COMP_LINE=(commandline -cp) megabatch completion words)
    test -n "$__megabatch_found"
end
complete -c megabatch -n __megabatch_words -f -a '$__megabatch_found'""",
}


def print_help(name: str, arguments: Sequence[str]) -> None:
    """Print what a command takes; of one with a recipe every key, with the values of the recipe that is named first."""
    kind = COMMANDS[name]
    if name in WITH_RECIPE:
        config = EXAMPLE
        if not arguments[0].startswith("-"):
            config = load_config(recipe_named(Path(arguments[0])), [], may_be_masked=True)
        kind = with_keys(kind, config)
    if name == "train":
        print(TEN_KEYS)
    with suppress(SystemExit):  # the end of tyro's help
        tyro.cli(kind, args=["--help"], prog=f"megabatch {name}", use_underscores=True)
    if name in WITH_RECIPE:
        print(f"{ENDING}{', '.join(SourceConfig.model_fields)}.")


def with_keys(command: type, config: Config) -> type:
    """Return the class of a command with a field for each section, of which tyro explains each key."""
    kinds = {name: section_kind(name, getattr(config, name)) for name in Config.model_fields}
    keys = make_dataclass("Keys", [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()])
    fields = [("keys", Annotated[keys, tyro.conf.arg(name="")], field(default_factory=keys))]  # "": --optim.lr
    namespace = {"__doc__": command.__doc__}
    return make_dataclass(command.__name__, fields, bases=(command,), frozen=True, namespace=namespace)


def section_kind(name: str, section: Section) -> type:
    """Return a dataclass of a section's keys, with their values as defaults."""
    fields: list[Any] = []
    for key, info in type(section).model_fields.items():
        kind, value, metavar = shown(info.rebuild_annotation(), getattr(section, key))
        text = tyro.conf.arg(help=" ".join((info.description or "").split()), metavar=metavar)
        fields.append((key, Annotated[kind, text], field(default=value)))
    return make_dataclass(name, fields, namespace={"__doc__": type(section).__doc__})


def shown(kind: Any, value: Any) -> tuple[Any, Any, str | None]:
    """Return type, value and name of a key's value, as the command line has it: lists and tables are text."""
    words = str(kind)
    if kind is bool:
        return Literal["true", "false"], str(value).lower(), None
    if not any(word in words for word in ("dict[", "list[", "tuple[")):
        return kind, value, None
    text = None if value is None else json.dumps(value, default=lambda source: source.path)
    return str | None, text, "TABLE" if "dict[" in words else "VALUE,..."


def print_words(arguments: Sequence[str]) -> None:
    """Print the words that may end $COMP_LINE, a line each.

    Args:
        arguments: What bash adds to the command, and nobody else. bash splits words at "=", and adds no space.
    """
    line, point = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_POINT", "")
    for word in words_of(line[: int(point)] if point.isdecimal() else line):
        print(f"{word.rpartition('=')[2] or word}{'' if word[-1] in '=.' else ' '}" if arguments else word)


def words_of(line: str) -> list[str]:
    """Return the words that may end the line; none where a file may."""
    *before, word = line.split(" ")
    before = [part for part in before if part]
    if len(before) < 2:
        words = [*COMMANDS, "--help"] if before else []
    else:
        words = words_of_command(before[1], before[-1], word)
    return [candidate for candidate in words if candidate.startswith(word)]


def words_of_command(command: str, last: str, word: str) -> list[str]:
    """Return the words that may stand after a command, the ``last`` one before them."""
    if command not in COMMANDS:
        return []
    options = get_type_hints(COMMANDS[command], include_extras=True)
    keys = known_keys() if command in WITH_RECIPE else {}
    kinds = {f"--{name}": kind for name, kind in (options | keys).items() if not is_positional(kind)}
    name, has_value, _ = word.partition("=")
    if has_value:
        return [f"{name}={value}" for value in values_of(kinds.get(name))]
    if word.startswith("-"):
        return [*map(option_of, kinds, kinds.values()), "--help"]
    if last in kinds:
        return [*values_of(kinds[last])]
    return [value for kind in options.values() if is_positional(kind) for value in values_of(kind)]


def option_of(name: str, kind: Any) -> str:
    """Return the option as it is begun on the command line."""
    if is_options(kind) or is_named_sources(kind):
        return f"{name}."
    return name if kind == FlagCreatePairsOff[bool] else f"{name}="


def is_positional(kind: Any) -> bool:
    """Return True for an argument without a name."""
    return "Positional" in map(str, getattr(kind, "__metadata__", ()))


def values_of(kind: Any) -> Iterator[str]:
    """Yield the values of a type that has few, as the command line writes them."""
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif kind is bool:
        yield from ("true", "false")
    elif get_origin(kind) in (Annotated, Union, UnionType, list):
        members = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
        for member in members:
            yield from values_of(member)
