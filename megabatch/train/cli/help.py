"""Help of the commands, by tyro, with every key of a recipe.

tyro explains the keys and config/recipe.py reads them: a table's own keys are free (--optim.options.momentum=0.9).
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from megabatch.train.checkpoints.paths import recipe_named
from megabatch.train.cli.arguments import COMMANDS, WITH_RECIPE
from megabatch.train.config import Config, ModelConfig, RunConfig, Section, SourceConfig, UpdateConfig
from megabatch.train.config.recipe import load_config

# The defaults, and values of the keys that have none.
EXAMPLE = Config(
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
    with suppress(SystemExit):
        tyro.cli(kind, args=["--help"], prog=f"megabatch {name}", use_underscores=True)
    if name in WITH_RECIPE:
        print(f"{ENDING}{', '.join(SourceConfig.model_fields)}.")


def with_keys(command: type, config: Config) -> type:
    """Return the class of a command with a field for each section, of which tyro explains each key."""
    kinds = {name: section_kind(name, getattr(config, name)) for name in Config.model_fields}
    keys = make_dataclass("Keys", [(name, kind, field(default_factory=kind)) for name, kind in kinds.items()])
    fields = [("keys", Annotated[keys, tyro.conf.arg(name="")], field(default_factory=keys))]
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
