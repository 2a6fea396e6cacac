"""Parts of the user, named in a recipe as "module:function" or "file.py:function", and the event that they get."""

import contextlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from megabatch import JointLoss
from megabatch.errors import MegabatchError, in_one_line
from megabatch.losses import LossFunction, loss_hooks

OURS = str(Path(__file__).parents[2])
# Folder of installed packages.
INSTALLED = str(Path(torch.__file__).parents[1])


@dataclass(frozen=True)
class Event:
    """The argument of your functions after an update or an evaluation, and of your own evaluation.

    Every rank calls them, so that you can run a sharded model. Write files on the main rank only.
    """

    step: int  # updates so far
    model: nn.Module  # without its DDP wrapper
    device: torch.device
    folder: Path  # the run's
    is_main: bool  # whether this rank writes files and speaks
    row: Mapping[str, Any]  # what metrics.jsonl has of it; empty for eval.function, which makes one
    sets: Mapping[str, Sequence[Any]]  # the evaluation's samples, by the name of their set
    tokenizer: Any  # None for data of one's own


def load_function(name: str, key: str) -> Callable[..., Any]:
    """Return the function that the recipe's ``key`` names. Raises `MegabatchError` if there is none."""
    place, _, attribute = name.rpartition(":")
    try:
        module = load_file(Path(place)) if place.endswith(".py") else load_module(place)
    except Exception as error:
        change = "install it, or mend its name" if isinstance(error, ModuleNotFoundError) else "mend it or its name"
        raise MegabatchError(
            f"{key} is {name!r} and {place} cannot be imported ({in_one_line(error)}); {change}"
        ) from None
    value: Any = getattr(module, attribute, None)
    if not callable(value) and not isinstance(value, JointLoss):
        kind = "has no such name" if value is None else f"has a {type(value).__name__} of that name"
        raise MegabatchError(f"{key} is {name!r} and {place} {kind}; name a function in it")
    return cast(Any, value)


def load_module(name: str) -> ModuleType:
    """Import a module by its dotted name. The working folder counts, as for `python -m`."""
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return importlib.import_module(name)


def load_file(path: Path) -> ModuleType:
    """Import a file as a module, once. Its functions can be sent to other processes by name."""
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


@contextlib.contextmanager
def blamed(title: str, change: str = "mend it") -> Generator[None]:
    """Turn what a function of the user raises into one line, with the line of its file."""
    try:
        yield
    except MegabatchError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if not frame.filename.startswith((OURS, INSTALLED))]
        place = (user_frames or frames)[-1]
        words = in_one_line(error)
        raise MegabatchError(f"{title} raised {words} ({place.filename}, line {place.lineno}); {change}") from error


def in_place_of(loss_fn: LossFunction, compute: Callable[..., Any]) -> LossFunction:
    """Return ``compute``, which says of its data what the loss says, and by `inspect.unwrap` what it stands for."""
    replaced = partial(compute)
    for name, hook in {**loss_hooks(loss_fn)._asdict(), "__wrapped__": loss_fn}.items():
        setattr(replaced, name, hook)
    return replaced
