"""What is counted: collectives and their bytes, and operations on tensors as large as a parameter."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d", "_c10d_functional")
SMALL_BYTES = 1024  # a message; whatever FSDP2 gathers of the counted model is larger


class Collectives(TorchDispatchMode):
    """Notes every collective that this rank issues, with the bytes of its largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # so that what is inside of its operations is seen
        if func.namespace in COLLECTIVES:
            tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.seen.append((func.__name__.split(".")[0].strip("_"), max((t.nbytes for t in tensors), default=0)))
        return func(*args, **(kwargs or {}))

    def table(self) -> dict[str, int]:
        """Calls and bytes by collective; small gathers are messages."""
        counts: Counter[str] = Counter()
        for name, size in self.seen:
            name = "message" if size < SMALL_BYTES and "gather" in name else name
            counts[name] += 1
            counts[f"{name}_bytes"] += size
        return dict(counts)


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
