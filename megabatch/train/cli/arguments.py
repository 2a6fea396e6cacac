"""Arguments of each command. tyro reads them and writes the help. No torch is imported here."""

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Literal, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional

from megabatch.errors import MegabatchError
from megabatch.train.init.hardware import Device

Arguments = TypeVar("Arguments")


@dataclass(frozen=True)
class Init:
    """Write a recipe that runs."""

    file: Positional[Path] = Path("recipe.toml")
    """The file to write; one that exists is never overwritten."""
    model: str = "small"
    """small (a Llama on bytes, from nothing), a name of the hub, or a folder of save_pretrained."""
    data: str = "stdlib"
    """stdlib (Python's own functions), a file, a glob, a folder, or a name of the hub. Files are read whole."""
    task: Literal["language", "classification"] | None = None
    """None: classification where rows have a text and a label."""
    hardware: str | None = None
    """cpu, 8 gpus, 8 h100, 2 nodes of 8 h100. None: what this machine has."""
    text_field: str | None = None
    """Column of the text. This and the other columns: None: by the usual names, else by the values, which is said."""
    label_field: str | None = None
    """Column of the label of a text, which makes a classifier."""
    prompt_field: str | None = None
    """Column of the prompt, or several with commas between them: instruction,input."""
    response_field: str | None = None
    """Column of the response, which is learned."""


@dataclass(frozen=True)
class Recipe:
    """A recipe and overrides of its keys."""

    recipe: Positional[Path]
    """A TOML file, or the folder of a run."""
    trust: FlagCreatePairsOff[bool] = False
    """Run functions that the recipe names and that may be somebody else's: read them first."""


@dataclass(frozen=True)
class Train(Recipe):
    """Train; a run's folder as RECIPE resumes the run. torchrun -m megabatch train RECIPE: on several ranks."""

    sweep: tuple[str, ...] = ()
    """optim.lr=1e-3,3e-3: a run for each value, one after the other, then their table. Several: all combinations."""


@dataclass(frozen=True)
class Plan(Recipe):
    """Print what fits in memory and what it costs, without a GPU and without weights."""

    world: int = 1
    """Processes, as torchrun would start them."""
    ranks_per_node: int = 8
    """Processes of a node; between nodes the network is slower."""
    device: Device | Path = "a100-80g"
    """The device of a rank, or a file that --measure has written."""
    memory: str | None = None
    """Memory of a rank, 80GiB say. None: the device's."""
    bandwidth: str | None = None
    """Bandwidth of a rank inside a node, and at most between nodes, 235GB/s say. None: the device's."""
    length: int | None = None
    """Tokens of the longest sample. None: data.pack_tokens, data.max_sample_tokens, or the data are read."""
    tokens: str | None = None
    """Tokens of a whole training, 300M, 15B or 1T: print the days that it takes."""
    layouts: FlagCreatePairsOff[bool] = False
    """Compare the layouts of the processes, whatever [parallel] has: FSDP2, HSDP, copies, with tp, cp and pp too."""
    json: FlagCreatePairsOff[bool] = False
    """Print every choice, as a list of objects."""
    measure: Path | None = None
    """Without a recipe: measure this machine and write a device file for --device; under torchrun with all ranks."""


@dataclass(frozen=True)
class Verify(Recipe):
    """Compare the cut gradient with the uncut one, on the recipe's model, loss, data and, under torchrun, wrapper."""


@dataclass(frozen=True)
class Show(Recipe):
    """Print the first samples of a recipe as text, with the learned tokens marked, and what is left out."""


@dataclass(frozen=True)
class Chat:
    """Generate text with the model of a run, or of an export of one."""

    run: Positional[Path]
    """The run's folder, or a folder that export wrote."""
    prompt: str | None = None
    """A text to answer. None: each line of the input."""
    step: int | Literal["best", "latest"] | None = None
    """The checkpoint. None: the best where one is kept, else the latest."""
    mode: Literal["chat", "text"] | None = None
    """Prompts go through the chat template, or are continued as they are. None: chat for runs with messages_field and
    exports with a template."""
    tokens: int = 200
    """Most tokens of an answer."""
    temperature: float = 0.8
    """0: the likeliest token each time."""
    seed: int = 0
    """Seed of the drawn tokens."""
    trust: FlagCreatePairsOff[bool] = False
    """Run a model.function of a run that you have not started: read it first."""


@dataclass(frozen=True)
class Export:
    """Write a run's model as a Hugging Face folder; of model.lora its adapters."""

    run: Positional[Path]
    """The run's folder."""
    to: Path
    """The folder to write."""
    step: int | Literal["best", "latest"] | None = None
    """The checkpoint. None: the best where one is kept, else the latest."""
    merged: FlagCreatePairsOff[bool] = False
    """With model.lora: write the whole model with the adapters in it."""
    trust: FlagCreatePairsOff[bool] = False
    """Run a model.function of a run that you have not started: read it first."""


@dataclass(frozen=True)
class Report:
    """Write a run's page, or one page of several runs beside each other."""

    runs: Positional[tuple[Path, ...]]
    """The run's folder; with --compare the folders of several, or a folder in which they are."""
    compare: FlagCreatePairsOff[bool] = False
    """Lay the runs' curves one over the other, print what differs and which is best."""
    to: Path | None = None
    """The file to write. None: report.html in the run's folder; of several runs, comparison.html beside them."""


@dataclass(frozen=True)
class Runs:
    """Print the runs of a folder side by side: what differs, the best held-out loss, speed and time."""

    folder: Positional[Path] = Path("runs")
    """The folder in which runs are."""
    json: FlagCreatePairsOff[bool] = False
    """Print a list of objects, with the whole recipe of each run."""


@dataclass(frozen=True)
class Audit:
    """Watch the first updates of any training script, unmodified: megabatch audit -- python train.py."""

    command: Positional[tuple[str, ...]] = ()
    """The command, after --. None: the folder of --to is read again."""
    updates: int = 3
    """Optimizer steps to watch."""
    to: Path | None = None
    """The folder to write. None: megabatch-audit, or a number behind it where that exists."""
    mean: Literal["token", "sample", "sequence", "any"] = "token"
    """The mean that --fail-over compares the gradient with."""
    fail_over: float | None = None
    """Status 1 if the gradient's relative error is above it, or anything else is wrong; 0 where it cannot be told."""


COMMANDS: dict[str, type] = {
    kind.__name__.lower(): kind for kind in (Init, Show, Train, Plan, Verify, Chat, Export, Report, Runs, Audit)
}
# By command of the last version, its replacement.
REMOVED_COMMANDS = {
    "watch": "open report.html in the run's folder, which is written again while the run goes on and reloads itself",
    "doctor": "run `megabatch verify RECIPE`, under torchrun on all ranks, and `megabatch plan --measure FILE`",
    "completion": "name commands and keys in full; `megabatch --help` and `megabatch train --help` list them",
}
# By command, the replacement of each option of the last version.
REMOVED_OPTIONS: dict[str, dict[str, str]] = {
    "verify": {"step": "`megabatch verify RECIPE` compares gradients alone, and on several ranks under torchrun"},
    "plan": {
        "published": "run `python -m benchmarks.published` in the repository",
        "chart": "the table and --json have the memory of each choice by category",
    },
    "report": {
        "same": "compare run_hash, losses and norms in the rows of metrics.jsonl",
        "within": "compare run_hash, losses and norms in the rows of metrics.jsonl",
    },
}
WITH_RECIPE = ("train", "plan", "verify", "show")
ALONE = ("init", "show", "chat", "export", "report", "runs", "audit")

ENDING = """
RECIPE is a TOML file. Any key of it is overridden as --section.key=value; `megabatch train --help` explains the keys,
`megabatch train RECIPE --help` shows them with the recipe's values. Several processes are started by torchrun:
torchrun --nproc-per-node N -m megabatch train RECIPE"""


def options_of(command: type) -> tuple[list[str], list[str]]:
    """Return the names of a command's own options, of those with a value and of those without, as they are written."""
    flags = [option for option in fields(command) if option.type == FlagCreatePairsOff[bool]]
    named = [option for option in fields(command) if option not in flags and "Positional" not in str(option.type)]
    return [_option(option.name) for option in named], [_option(flag.name) for flag in flags]


def _option(name: str) -> str:
    return name.replace("_", "-")


def overview() -> str:
    """Return the commands, a line each."""
    lines = [f"  {name:12}{kind.__doc__}" for name, kind in COMMANDS.items()]
    return "\n".join(["usage: megabatch COMMAND ... (megabatch COMMAND --help)", "", *lines, ENDING])


def check_removed(command: str, arguments: Sequence[str]) -> None:
    """Raise for an option that the command had in the last version."""
    removed = REMOVED_OPTIONS.get(command, {})
    for word in arguments:
        option = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and option in removed:
            raise MegabatchError(f"--{option} is removed; {removed[option]}")


def read_arguments(kind: type[Arguments], arguments: Sequence[str]) -> Arguments:
    """Return the arguments of a command without a recipe. Raises `MegabatchError` where they cannot be read."""
    check_removed(kind.__name__.lower(), arguments)
    command, output = f"megabatch {kind.__name__.lower()}", io.StringIO()
    try:
        with redirect_stderr(output):
            return tyro.cli(kind, args=arguments, prog=command)
    except SystemExit:
        raise MegabatchError(f"{reason_of(output.getvalue())}; see {command} --help") from None


def reason_of(output: str) -> str:
    """Return the reason in what tyro tells in a frame: the lines between its title and the next rule."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", output)
    lines = [line.strip("\u2502 ") for line in plain.splitlines()[1:]]
    return " ".join(takewhile(is_text, dropwhile(lambda line: not is_text(line), lines)))


def is_text(line: str) -> bool:
    """Return False for a rule of the frame: it is of ASCII where stdout is."""
    return bool(line.strip("\u2500\u256d\u256e\u2570\u256f- "))
