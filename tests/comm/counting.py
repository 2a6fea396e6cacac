"""Counts of collectives and their bytes, and of operations on tensors as large as a parameter."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d", "_c10d_functional")
KINDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast")
SMALL_BYTES = 1024  # a message; whatever is gathered of the counted model is larger


class Collectives(TorchDispatchMode):
    """Notes every collective that this rank issues, with the bytes of the larger of what goes in and what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # so that what is inside of its operations is seen
        result = func(*args, **(kwargs or {}))
        if func.namespace in COLLECTIVES and (kind := _kind(func.__name__)):
            self.seen.append(_named(kind, (args, kwargs, result)))
        return result

    def table(self) -> dict[str, int]:
        """Calls and bytes by collective; small gathers are messages."""
        counts: Counter[str] = Counter()
        for name, size in self.seen:
            counts[name] += 1
            counts[f"{name}_bytes"] += size
        return dict(counts)


def _named(kind: str, values: Any) -> tuple[str, int]:
    """A collective with the bytes of its larger side; a list of tensors is one side."""
    sides = [[side] if isinstance(side, Tensor) else side for side in pytree.tree_leaves(values, _is_side)]
    sizes = [[tensor.nbytes for tensor in side] for side in sides if isinstance(side, list)]
    is_small = max(map(max, sizes)) < SMALL_BYTES
    return "message" if is_small and kind == "all_gather" else kind, max(map(sum, sizes))


def _is_side(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, Tensor) for each in value)


def _kind(name: str) -> str:
    """One name for what torch calls in several ways: allreduce_, all_reduce, _allgather_base_..."""
    plain = name.replace("_", "")
    return next((kind for kind in KINDS if plain.startswith(kind.replace("_", ""))), "")


class ParameterSized(TorchDispatchMode):
    """Notes the operations that read or write a tensor with as many numbers as a parameter has."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._sizes = {parameter.numel() for parameter in parameters}
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, result))
        sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
        if any(size in self._sizes for size in sizes):
            self.seen.append(f"{func} {[size for size in sizes if size in self._sizes]}")
        return result


class Touching(TorchDispatchMode):
    """Notes the operations that touch the memory of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if any(leaf.untyped_storage().data_ptr() in self._storages for leaf in leaves if leaf.layout == torch.strided):
            self.seen.append(str(func))
        return result
