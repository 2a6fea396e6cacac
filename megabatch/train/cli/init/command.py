"""Command: `megabatch init`, which asks what its flags do not say, and writes a recipe."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.prompt import Prompt

from megabatch.errors import MegabatchError
from megabatch.train.cli.init.hardware import Hardware, read_hardware, seen_hardware
from megabatch.train.cli.init.look import STDLIB, look
from megabatch.train.cli.init.model import SMALL, read_model
from megabatch.train.cli.init.text import launch, recipe
from megabatch.train.cli.usage import parted
from megabatch.train.runtime.files import write_new

Answer = TypeVar("Answer")

DEFAULT = "recipe.toml"
FLAGS = ("model", "data", "hardware")
EXAMPLE = 'megabatch init FILE --model small --data "corpus/*.txt" --hardware cpu'


def write_recipe(arguments: list[str]) -> None:
    """Write a recipe of three answers, flags or asked for, and say what to do with it. Raises `MegabatchError`, with
    nothing written, for a bad answer, a file that is there already, and where there is nobody to ask."""
    path, given = read_arguments(arguments)
    if path.exists():
        raise MegabatchError(f"{path} is there already, and nothing is overwritten; give another FILE")
    missing = [f"--{name}" for name in FLAGS if name not in given]
    if missing and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise MegabatchError(f"{' and '.join(missing)} not given, and no terminal to ask on; write: {EXAMPLE}")
    model = answer(given.get("model"), f"model ({SMALL}, a name of the hub, or a folder)", SMALL, read_model)
    data = answer(given.get("data"), f"data ({STDLIB}, a file, a glob, or a name of the hub)", STDLIB, look)
    seen = "" if "hardware" in given else seen_hardware()
    hardware = answer(given.get("hardware"), "hardware (cpu, 8 gpus, 2 nodes of 8 h100)", seen, read_hardware)
    text = recipe(str(path), model, data, hardware)
    try:
        write_new(path, text)
    except OSError as error:
        raise MegabatchError(f"cannot write {path} ({error.strerror or error}); give another FILE") from None
    except UnicodeError:
        raise MegabatchError(f"an answer has bytes that are no text, which {path} cannot hold; rename it") from None
    print(next_commands(str(path), hardware))


def read_arguments(arguments: list[str]) -> tuple[Path, dict[str, str]]:
    """The file to write, and the flags by name. Raises `MegabatchError` for anything else."""
    words = parted(arguments)
    files = [words.pop(0)] if words and not words[0].startswith("--") else []
    names, values = words[::2], words[1::2]
    if len(names) > len(values) or {*names} - {f"--{name}" for name in FLAGS} or len({*names}) < len(names):
        raise MegabatchError(f"cannot read the arguments {' '.join(arguments)!r}; write: {EXAMPLE}")
    given = {name.removeprefix("--"): value for name, value in zip(names, values, strict=True)}
    return Path(files[0] if files else DEFAULT), given


def answer(given: str | None, question: str, default: str, read: Callable[[str], Answer]) -> Answer:
    """The flag's value, or what a person answers, asked again where it cannot be."""
    while given is None:
        try:
            return read(Prompt.ask(question, default=default))
        except MegabatchError as error:
            print(f"  {error}")
        except EOFError:
            raise MegabatchError(f"no answer; write: {EXAMPLE}") from None
    return read(given)


def next_commands(path: str, hardware: Hardware) -> str:
    """What to do with the recipe, line by line."""
    word = shlex.quote(path)
    on_all = f"torchrun --nproc-per-node {hardware.per_node} -m " if hardware.per_node > 1 else ""
    device = "" if hardware.device == "gpu" else f" --device {hardware.device}"
    lines = {
        f"{on_all}megabatch doctor": "what is here, and whether it works",
        f"megabatch verify {word}": "proof: cut against uncut",
        f"megabatch plan {word} --world {hardware.num_processes}{device}": "what fits, and what it costs",
        launch(path, hardware): "train",
    }
    width = min(60, max(map(len, lines)))
    return "\n".join([f"wrote {path}; next:", *(f"  {line:{width}}  # {why}" for line, why in lines.items())])
