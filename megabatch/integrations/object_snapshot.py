"""Snapshots of the attributes of plain objects, put back after a trial of a loss."""

import contextlib
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from megabatch.autotune.snapshot import ModuleSnapshot

MAX_NUMEL = 2**20  # of a tensor whose numbers are put back
MAX_DEPTH = 5  # of nested objects
LIBRARIES = {"torch", "accelerate", "datasets", "megabatch"}  # whose objects a user's loss does not write to by itself
MAX_ENTRIES = 1000  # largest container whose entries are looked into
LEFT_ALONE = (
    nn.Module,
    torch.optim.Optimizer,
    Dataset,
    DataLoader,
    Sampler,
    type,
    FunctionType,
    MethodType,
    ModuleType,
)


@contextlib.contextmanager
def restore_after_trial(model: nn.Module, snapshot: "ObjectSnapshot") -> Generator[None]:
    """Run a trial in eval mode, then restore the model's modules and the objects of ``snapshot``."""
    module_snapshots = [ModuleSnapshot(module) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        snapshot.put_back()
        for module_snapshot in module_snapshots:
            module_snapshot.put_back()


class ObjectSnapshot:
    """The attributes of plain objects, with the contents of their containers and tensors.

    Args:
        objects: Objects to look into, up to MAX_DEPTH levels deep.
        leave: Objects to leave out.
    """

    def __init__(self, *objects: Any, leave: Iterable[Any] = ()) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._seen = {id(untouched): untouched for untouched in leave}
        for noted in objects:
            self._note(vars(noted), MAX_DEPTH)

    def put_back(self) -> None:
        """Restore every object in place."""
        for undo in self._undo:
            undo()

    def _note(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._seen or isinstance(value, LEFT_ALONE):
            return
        self._seen[id(value)] = value
        inner: Iterable[Any] = ()
        if isinstance(value, Tensor):
            if not value.requires_grad and value.numel() <= MAX_NUMEL:
                self._undo.append(partial(_put_back_numbers, value, value.detach().clone()))
        elif isinstance(value, np.ndarray):
            self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, dict):
            self._undo.append(partial(_put_back_entries, value, dict(value)))
            inner = value.values()
        elif isinstance(value, list | deque):
            self._undo.append(partial(_put_back_items, value, value.extend, list(cast(Any, value))))
            inner = value
        elif isinstance(value, set):
            self._undo.append(partial(_put_back_items, value, value.update, set(cast(Any, value))))
        elif isinstance(value, tuple):
            inner = value
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in LIBRARIES:
            self._undo.append(partial(_put_back_entries, vars(value), dict(vars(value))))
            inner = vars(value).values()
        if len(cast(Any, inner)) <= MAX_ENTRIES:
            for content in list(inner):
                self._note(content, depth - 1)


def _put_back_entries(attributes: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Restore changed entries only, since other threads may read the rest."""
    if [*attributes] != [*entries]:
        for name in attributes.keys() - entries.keys():
            del attributes[name]
    for name, value in entries.items():
        if name not in attributes or attributes[name] is not value:
            attributes[name] = value


def _put_back_items(container: Any, fill: Callable[[Any], Any], entries: Any) -> None:
    if [*map(id, container)] != [*map(id, entries)]:
        container.clear()
        fill(entries)


@torch.no_grad()
def _put_back_numbers(tensor: Tensor, numbers: Tensor) -> None:
    if tensor.shape != numbers.shape:
        tensor.resize_(numbers.shape)
    tensor.copy_(numbers)
