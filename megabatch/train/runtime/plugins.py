"""Own: the user's own parts, named in a recipe as "module:function" or "file.py:function", and what they are told."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from megabatch import JointLoss
from megabatch.errors import MegabatchError, in_one_line

OURS = str(Path(__file__).parents[2])
INSTALLED = str(Path(torch.__file__).parents[1])  # among other packages


@dataclass(frozen=True)
class Event:
    """What a function of the user's is told after an update or an evaluation, or to evaluate; it is called on every
    rank, so that a sharded model can be run, and writes files on the main one only."""

    step: int  # updates so far
    model: nn.Module  # without its DDP wrapper
    device: torch.device
    folder: Path  # the run's
    is_main: bool  # whether this rank writes files and speaks
    row: Mapping[str, Any]  # what metrics.jsonl has of it; empty for eval.function, which makes one
    sets: Mapping[str, Sequence[Any]]  # the evaluation's samples, by the name of their set
    tokenizer: Any  # None for data of one's own


def load_function(name: str, key: str) -> Callable[..., Any]:
    """The function that the recipe's ``key`` names. Raises `MegabatchError` where it cannot be had."""
    place, _, attribute = name.rpartition(":")
    try:
        module = load_file(Path(place)) if place.endswith(".py") else load_module(place)
    except Exception as error:  # whatever the user's module raises when it is read
        reason = in_one_line(error)
        raise MegabatchError(
            f"{key} is {name!r} and {place} cannot be imported ({reason}); mend it or its name"
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found) and not isinstance(found, JointLoss):
        kind = "has no such name" if found is None else f"has a {type(found).__name__} of that name"
        raise MegabatchError(f"{key} is {name!r} and {place} {kind}; name a function in it")
    return cast(Any, found)


def load_module(name: str) -> ModuleType:
    """A module by its dotted name; the working folder counts, as it does for `python -m`."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def load_file(path: Path) -> ModuleType:
    """A file as a module, read once; its functions can be sent to other processes by name."""
    name = f"megabatch_own_{path.resolve().as_posix().strip('/').replace('/', '_').removesuffix('.py')}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.exists():
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_listener(name: str | None, key: str) -> Callable[[Event], object]:
    """The user's function that is told of events; where the recipe names none, nobody listens."""
    if name is None:
        return lambda _: None
    function = load_function(name, key)

    def listen(event: Event) -> object:
        with blamed(f"{key} {name!r}"):
            return function(event)

    return listen


@contextlib.contextmanager
def blamed(title: str) -> Generator[None]:
    """Surrounds a function of the user's: what it raises is told in one line, with the line of its file."""
    try:
        yield
    except MegabatchError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith((OURS, INSTALLED))]
        place = (theirs or frames)[-1]
        words = in_one_line(error)
        raise MegabatchError(f"{title} raised {words} ({place.filename}, line {place.lineno}); mend it") from error
