"""Tensor files: save and load a checkpoint with torch.distributed.checkpoint (DCP), whole or not at all.

``checkpoints/step-N`` is written as ``step-N.tmp``. The main rank renames it once every rank has written its files and
``meta.json`` has their digests. A checkpoint is read as data: DCP's own reader unpickles a description and every value
that is not a tensor, which can call any function. Here only the names that DCP itself writes are known.
"""

import contextlib
import io
import os
import pathlib
import pickle
import shutil
import threading
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_leaves

from megabatch.errors import MegabatchError, in_one_line
from megabatch.train.checkpoints.metadata import (
    DamagedError,
    Digests,
    Meta,
    hash_written_files,
    is_plain_name,
    size_problem,
    write_meta,
)
from megabatch.train.checkpoints.paths import POINTER, path_of, unfinished_of
from megabatch.train.config.byte_sizes import gib_text
from megabatch.train.runtime.files import open_file, remove_path, replace_text, sync
from megabatch.train.runtime.ranks import Ranks

DESCRIPTION = ".metadata"
# By module, the names that a description may use.
CLASSES = {
    metadata.__name__: (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}  # fmt: skip
# Words of torch's writer for a file that was cut off.
CUT_OFF = ("unexpected pos", "iostream error", "PytorchStreamWriter failed")
# The function that a pickled numpy number calls.
NUMPY_SCALAR: Any = np.float64(0).__reduce__()[0]
NUMPY_TYPES: list[Any] = [NUMPY_SCALAR, np.dtype, *{type(np.dtype(code)) for code in "?bhilqBHILQefd"}]


def states_of(state: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the state of each part of a run under its name."""
    return {name: part.state_dict() for name, part in state.items()}


def save(folder: Path, states: Mapping[str, Any], meta: Meta, ranks: Ranks) -> Path:
    """Write ``checkpoints/step-N``, N being ``meta["step"]``, and point ``latest`` to it. Collective.

    Raises `MegabatchError` on every rank if one cannot write, and leaves no file behind.
    """
    checkpoint = path_of(folder, meta["step"])
    unfinished = unfinished_of(checkpoint)

    def begin() -> int:
        remove_path(unfinished)
        unfinished.mkdir(parents=True)
        return shutil.disk_usage(unfinished).free

    def finish() -> None:
        write_meta(unfinished, meta, digests)
        remove_path(checkpoint)
        os.replace(unfinished, checkpoint)
        sync(checkpoint.parent)
        replace_text(checkpoint.parent / POINTER, checkpoint.name)

    try:
        free_bytes = ranks.on_main(begin, str(unfinished))
        _write_states(states, unfinished, ranks, free_bytes)
        digests: Digests = hash_written_files(unfinished, ranks)
        ranks.on_main(finish, str(checkpoint))
    except MegabatchError:
        ranks.on_main(lambda: remove_path(unfinished), str(unfinished))
        raise
    return checkpoint


def _write_states(states: Mapping[str, Any], to: Path, ranks: Ranks, free_bytes: int) -> None:
    try:
        with without_group_warning():
            save_state(dict(states), checkpoint_id=to, process_group=ranks.group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        # DCP catches everything.
        if isinstance(first, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        tensors = [leaf for leaf in tree_leaves(dict(states)) if isinstance(leaf, Tensor)]
        tensor_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        sizes = f"{gib_text(tensor_bytes)} of tensors, with {gib_text(free_bytes)} free"
        raise MegabatchError(f"cannot write {to} ({write_problem(first)}); make room for it: {sizes}") from None


def write_problem(error: BaseException) -> str:
    """Return why a file was not written; torch's own writer tells of a full disk in words of its own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if any(sign in str(error) for sign in CUT_OFF):
        return "a file was cut off while it was written: the disk is full, or what you may write to it"
    return in_one_line(error)


def load(checkpoint: Path, state: Mapping[str, Stateful]) -> None:
    """Load each part of a run from a checkpoint of any number of ranks. Collective. Raises `DamagedError`."""
    reader, states = SafeReader(checkpoint), states_of(state)
    try:
        # DCP would log a traceback.
        reader.read_metadata()
    except Exception as error:
        raise DamagedError(checkpoint, in_one_line(error)) from None
    try:
        with without_group_warning():
            load_state(states, storage_reader=reader, planner=SafePlanner(), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise DamagedError(checkpoint, reason_of(error)) from None
    for name, part in state.items():
        part.load_state_dict(states[name])


def reason_of(error: CheckpointException) -> str:
    """Return why DCP failed on the first rank on which it did."""
    return in_one_line(next(iter(error.failures.values()))[0])


class SafeReader(FileSystemReader):
    """DCP's reader of a folder, with a description that is unpickled safely."""

    def read_metadata(self, *_: Any, **_of_a_rank: Any) -> Metadata:
        """Return what the checkpoint holds, and where."""
        with os.fdopen(open_file(Path(self.path) / DESCRIPTION), "rb") as file:
            layout: Any = _DescriptionUnpickler(file).load()
        if not isinstance(layout, Metadata):
            raise pickle.UnpicklingError(
                f"{DESCRIPTION} holds a {type(layout).__name__}, not what describes a checkpoint"
            )
        lengths: dict[str, int] = {}
        for part in (layout.storage_data or {}).values():
            if not is_plain_name(part.relative_path):
                raise pickle.UnpicklingError(
                    f"{DESCRIPTION} names {part.relative_path}, which lies outside of the checkpoint"
                )
            lengths[part.relative_path] = max(lengths.get(part.relative_path, 0), part.offset + part.length)
        for name, length in lengths.items():
            if problem := size_problem(Path(self.path) / name, length, or_more=True):
                raise pickle.UnpicklingError(problem)
        layout.storage_meta = layout.storage_meta or StorageMeta()
        layout.storage_meta.load_id = self.load_id
        return layout


class _DescriptionUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        if global_name not in CLASSES.get(module_name, ()):
            raise pickle.UnpicklingError(f"{DESCRIPTION} names {module_name}.{global_name}, which no checkpoint needs")
        if module_name == "pathlib._local":
            return getattr(pathlib, global_name)
        return super().find_class(module_name, global_name)


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner; values that are not tensors may only be numbers, texts and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            with torch.serialization.safe_globals(NUMPY_TYPES):
                loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise pickle.UnpicklingError(f"{name} is more than numbers, texts and containers of them") from None
        *path, last = self.mappings[name]
        place = cast(Any, self.original_state_dict)
        for key in path:
            place = place[key]
        place[last] = loaded


@contextlib.contextmanager
def without_group_warning() -> Generator[None, None, None]:
    """Silence DCP's warning that there is no process group.

    A filter set in one thread leaks into others, so a process that writes in threads calls `ignore_group_warning`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with warnings.catch_warnings():
        ignore_group_warning()
        yield


def ignore_group_warning() -> None:
    """Silence that warning for the rest of the process."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
