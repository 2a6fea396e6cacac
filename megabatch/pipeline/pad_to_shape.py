"""Microbatches padded to one shape for a pipeline's schedule, and outputs cropped to the real shape."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.errors import PlanError
from megabatch.torch_private.classes import is_dtensor
from megabatch.torch_private.operations import pytree

SEEN_BYTES = 1 << 16  # of each tensor, in the number by which stages compare their microbatches


class Inputs(NamedTuple):
    """The arguments of one call of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the arguments, in order."""
        return [leaf for leaf in pytree.tree_leaves(tuple(self)) if isinstance(leaf, Tensor)]

    @property
    def num_rows(self) -> int:
        """Samples: dim 0 of the first tensor that has one."""
        return next((len(tensor) for tensor in self.tensors if tensor.ndim), 0)

    @property
    def num_columns(self) -> int:
        """The longest dim 1 of any tensor; 1 if none has one."""
        return max((tensor.shape[1] for tensor in self.tensors if tensor.ndim > 1), default=1)


Shape = Callable[..., Any]  # called as the model is; returns a meta tensor, or a tuple of them


def meta_tensors(shape: Shape, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the meta tensors of ``shape`` for these inputs."""
    answer = shape(*inputs.args, **inputs.kwargs)
    tensors = _leaves_of(answer)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise PlanError(
            f"boundary= or output= of Pipeline returned {answer!r:.80}; return the shape and dtype of what the stage "
            'does: torch.empty(*shape, dtype=dtype, device="meta")'
        )
    return tuple(tensor.detach().to("meta") for tensor in tensors)


def difference(output: Any, expected: Sequence[Tensor]) -> str | None:
    """Describe the difference between tensors and their expected shapes and dtypes; None where there is none."""
    leaves = _leaves_of(output)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or is_dtensor(leaf):
            return f"a {type(leaf).__name__} where a plain tensor was expected"
    shapes, wanted = _shapes_of(leaves), _shapes_of(expected)
    return None if shapes == wanted else f"{shapes} where {wanted} was said"


def _leaves_of(output: Any) -> tuple[Any, ...]:
    return tuple(output) if isinstance(output, tuple | list) else (output,)


def _shapes_of(tensors: Sequence[Tensor]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def in_one_shape(calls: Sequence[Inputs]) -> list[Inputs]:
    """Pad all microbatches to the largest: repeat the last row, and append zeros to dim 1."""
    if not calls:
        return []
    flat, specs = zip(*(pytree.tree_flatten(tuple(call)) for call in calls), strict=True)
    kinds = [list(map(_kind_of, leaves)) for leaves in flat]
    if specs.count(specs[0]) < len(specs) or kinds.count(kinds[0]) < len(kinds):
        raise PlanError(
            "the loss calls the model with other arguments for other microbatches of one call; under a Pipeline give "
            "all the same names, types and numbers of dims"
        )
    rows = [call.num_rows for call in calls]
    leaves = [_pad_input(values, rows) for values in zip(*flat, strict=True)]
    return [Inputs(*pytree.tree_unflatten(list(values), specs[0])) for values in zip(*leaves, strict=True)]


def _kind_of(leaf: Any) -> tuple[type, int, Any]:
    """Return what the values of an input have in common in all microbatches."""
    return type(leaf), getattr(leaf, "ndim", 0), getattr(leaf, "dtype", 0)


def _pad_input(values: Sequence[Any], rows: Sequence[int]) -> Sequence[Any]:
    """Pad one input of all microbatches to one shape."""
    if not isinstance(values[0], Tensor):
        return values
    shapes = [tuple(value.shape) for value in values]
    if shapes.count(shapes[0]) == len(shapes):
        return values
    if len({shape[2:] for shape in shapes}) > 1 or [shape[0] for shape in shapes] != rows:
        raise PlanError(
            f"an input of the model has the shapes {sorted(set(shapes))} in one call of a Pipeline; only dim 0, the "
            "samples, and dim 1 are filled up, the others must agree"
        )
    largest = list(map(max, *shapes))[:2]
    return [_pad_tensor(value, largest) for value in values]


def _pad_tensor(value: Tensor, largest: Sequence[int]) -> Tensor:
    """Pad [B, T, ...] to [largest B, largest T, ...], or [B] to [largest B]."""
    if len(largest) > 1 and value.shape[1] < largest[1]:
        zeros = value.new_zeros(len(value), largest[1] - value.shape[1], *value.shape[2:])
        value = torch.cat([value, zeros], dim=1)
    if len(value) == largest[0]:
        return value
    return torch.cat([value, value[-1:].expand(largest[0] - len(value), *value.shape[1:])])


def crop_output(output: Sequence[Tensor], shape: Shape, padded: Inputs, real: Inputs) -> list[Tensor]:
    """Crop the output for the ``padded`` inputs to the shapes that ``shape`` gives for ``real``."""
    wanted = meta_tensors(shape, real)
    if padded.num_rows != real.num_rows:
        _check_rows(meta_tensors(shape, padded), wanted, padded, real)
    return [leaf[tuple(map(slice, target.shape))] for leaf, target in zip(output, wanted, strict=True)]


def _check_rows(expected: Sequence[Tensor], wanted: Sequence[Tensor], padded: Inputs, real: Inputs) -> None:
    """Raise `PlanError` where repeated rows cannot be removed from the output."""
    for before, after in zip(expected, wanted, strict=True):
        if (before.shape[:1], after.shape[:1]) != ((padded.num_rows,), (real.num_rows,)):
            raise PlanError(
                f"a microbatch of {real.num_rows} rows was filled up to {padded.num_rows}, but output= says no samples "
                "in dim 0, so they cannot be taken out again; return samples in dim 0 from the last stage"
            )


def fingerprint(microbatches: Sequence[Any]) -> int:
    """Hash the shapes of microbatches, and the numbers that are on the CPU."""
    digest = 0
    for leaf in pytree.tree_leaves(list(microbatches)):
        if isinstance(leaf, Tensor):
            digest = zlib.crc32(repr((leaf.shape, leaf.dtype)).encode(), digest)
            # Reading a tensor of another device would wait.
            if leaf.device.type == "cpu":
                start = leaf.detach().reshape(-1)[: SEEN_BYTES // leaf.element_size()]
                digest = zlib.crc32(start.contiguous().view(torch.uint8).numpy().tobytes(), digest)
    return digest
