"""The only file that knows what a batch looks like.

A batch is a mapping of tensors with samples in dim 0, or a list of samples (mappings of tensors of any length).
A mapping is cut by rows and never trimmed; samples are padded to the longest of their microbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megabatch.errors import PlanError

Batch = Mapping[str, Tensor] | Sequence[Any]  # all samples of this rank
Microbatch = Any  # what collate returns: a mapping of tensors unless the user's collate says otherwise
Collate = Callable[[list[Any]], Microbatch]
Length = Callable[[Any], int]

IGNORED_LABEL = -100  # torch's cross-entropy ignores it by default


class Samples:
    """A batch seen as samples: how many, how long, and any of them as one microbatch."""

    def __init__(self, batch: Batch, collate: Collate | None = None, length: Length | None = None) -> None:
        self._rows = _checked_rows(batch) if isinstance(batch, Mapping) else None
        self._list = [] if self._rows is not None else _checked_list(batch)
        self._collate = collate
        self.lengths: list[int] = self._measure(length)

    def __len__(self) -> int:
        if self._rows is None:
            return len(self._list)
        return len(next(iter(self._rows.values())))

    def take(self, indices: Sequence[int]) -> Microbatch:
        """The samples at ``indices``, collated; on the device where the batch is."""
        if self._rows is None:
            return (self._collate or pad_right)([self._list[index] for index in indices])
        rows: slice | Tensor = torch.tensor(indices)
        if list(indices) == list(range(indices[0], indices[0] + len(indices))):
            rows = slice(indices[0], indices[0] + len(indices))  # a view, where a copy would say the same
        taken = {name: tensor[rows] for name, tensor in self._rows.items()}
        return taken if self._collate is None else self._collate(_split(taken))

    def last(self) -> Any:
        """The last sample, on its own memory, so that keeping it does not keep the batch."""
        if self._rows is None:
            return self._list[-1]
        return {name: tensor[-1].clone() for name, tensor in self._rows.items()}

    def _measure(self, length: Length | None) -> list[int]:
        if self._rows is None:
            return [int((length or sample_length)(sample)) for sample in self._list]
        if length is not None:
            return [int(length(sample)) for sample in _split(self._rows)]
        first = next(iter(self._rows.values()))
        return [first.shape[1] if first.ndim > 1 else 1] * len(first)


def sample_length(sample: Any) -> int:
    """Tokens of a sample: the size of dim 0 of its first tensor, 1 for a scalar."""
    if not isinstance(sample, Mapping) or not sample:
        raise PlanError(
            f"a sample is {'empty' if sample == {} else f'a {type(sample).__name__}'}; expected a mapping of tensors. "
            "Give such mappings, or say collate= and length= of your own"
        )
    name, value = next(iter(cast(Mapping[str, Any], sample).items()))
    first = _tensor(name, value)
    return first.shape[0] if first.ndim else 1


def pad_right(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack samples, padding dim 0 on the right to the longest: ``labels`` with -100, other keys with 0.

    Returns ``{name: [B, longest, ...]}``, or ``[B]`` for scalars. Raises `PlanError` where the samples' keys or
    their other dims differ.
    """
    for sample in samples:
        if sample.keys() != samples[0].keys():
            raise PlanError(
                f"samples of one batch have the keys {list(samples[0])} and {list(sample)}; give all the same"
            )
    return {name: _stack(name, [_tensor(name, sample[name]) for sample in samples]) for name in samples[0]}


def _tensor(name: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"{name!r} of a sample is a {type(value).__name__}; expected a tensor, or numbers") from None


def _stack(name: str, values: list[Tensor]) -> Tensor:
    first = values[0]
    if any(value.dtype != first.dtype for value in values):
        raise PlanError(
            f"{name!r} has the types {sorted({str(value.dtype) for value in values})}; give one to all samples"
        )
    if all(value.shape == first.shape for value in values):
        return torch.stack(values)
    if any(value.shape[1:] != first.shape[1:] or value.ndim != first.ndim for value in values):
        shapes = sorted({tuple(value.shape) for value in values})
        raise PlanError(f"{name!r} has the shapes {shapes}; only dim 0 is padded, the others must agree")
    fill = IGNORED_LABEL if name == "labels" else 0
    padded = first.new_full((len(values), max(len(value) for value in values), *first.shape[1:]), fill)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded


def to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch, from the CPU to ``device``; copies from pinned memory do not wait."""

    def move(leaf: Any) -> Any:
        return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) and leaf.device != device else leaf

    return microbatch if device.type == "cpu" else pytree.tree_map(move, microbatch)


def _checked_list(batch: Any) -> list[Any]:
    if not isinstance(batch, Sequence) or isinstance(batch, (str, bytes)):
        raise PlanError(
            f"the batch is a {type(batch).__name__}; expected a mapping of tensors with samples in dim 0, "
            "or a list of samples"
        )
    return list(cast(Sequence[Any], batch))


def _checked_rows(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    if not batch:
        raise PlanError(
            "the batch is a mapping without tensors; expected samples in dim 0 of each. For no samples give []"
        )
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            kind = "a scalar" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise PlanError(f"{name!r} of the batch is {kind}; expected a tensor with samples in dim 0")
    sizes = {name: len(value) for name, value in batch.items()}
    if len(set(sizes.values())) > 1:
        raise PlanError(f"the tensors of the batch differ in dim 0: {sizes}; expected one row per sample in each")
    return dict(batch)


def _split(rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    size = len(next(iter(rows.values())))
    return [{name: tensor[row] for name, tensor in rows.items()} for row in range(size)]
