"""Safe: a checkpoint is read as data. Whatever it holds, nothing in it is run.

torch.distributed.checkpoint describes a checkpoint in a pickle, and keeps what is no tensor in pickles; either can name
any function of Python, to be called while it is read. Here only the names that DCP itself writes are known.
"""

import io
import pathlib
import pickle
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

DESCRIPTION = ".metadata"
CLASSES = {  # of each module that a description may name
    metadata.__name__: (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # a layout by its name
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),  # where Python 3.13 has them
}  # fmt: skip
NUMPY_SCALAR = np.float64(0).__reduce__()[0]  # what numpy's numbers are pickled as a call of
NUMPY_NUMBERS = "?bhilqBHILQefd"  # the types of numbers that an optimizer of one's own may keep in its groups


class DescriptionUnpickler(pickle.Unpickler):
    """Reads a checkpoint's description, and refuses to look up anything that is no part of one."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(dtype := getattr(torch, global_name, None), torch.dtype):
            return dtype
        if global_name not in CLASSES.get(module_name, ()):
            raise pickle.UnpicklingError(f"{DESCRIPTION} names {module_name}.{global_name}, which no checkpoint needs")
        if module_name == "pathlib._local":
            return getattr(pathlib, global_name)
        return super().find_class(module_name, global_name)


class SafeReader(FileSystemReader):
    """Reads a checkpoint's files; its tensors are loaded as such by torch's reader itself."""

    def read_metadata(self, *_: Any, **_of_a_rank: Any) -> Metadata:
        """What the checkpoint holds, and where; no rank has a description of its own."""
        with (Path(self.path) / DESCRIPTION).open("rb") as file:
            found = read_description(file)
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class SafePlanner(DefaultLoadPlanner):
    """Puts what was read in its place; what is no tensor, only where it consists of numbers, texts and containers."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            with torch.serialization.safe_globals(numpy_number_types()):
                loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:
            raise pickle.UnpicklingError(f"{name} is more than numbers, texts and containers of them") from None
        *path, last = self.mappings[name]
        place = cast(Any, self.original_state_dict)
        for key in path:
            place = place[key]
        place[last] = loaded


def read_description(file: IO[bytes]) -> Metadata:
    """A checkpoint's description. Raises `pickle.UnpicklingError` where the file is none."""
    found = DescriptionUnpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{DESCRIPTION} holds a {type(found).__name__}, not what describes a checkpoint")
    return found


def numpy_number_types() -> list[Any]:
    """What torch must know to load numpy's numbers."""
    return [NUMPY_SCALAR, np.dtype, *{type(np.dtype(code)) for code in NUMPY_NUMBERS}]
