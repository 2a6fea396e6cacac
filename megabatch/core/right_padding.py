"""Right padding: samples of unequal lengths as one microbatch.

A key's name tells labels and tokens from other tensors: labels are padded with -100, other keys with 0.
"""

import functools
import re
from collections.abc import Hashable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.core.samples import Batching, Microbatch, Pad
from megabatch.errors import PlanError
from megabatch.inspection.mappings import as_dict, is_dense
from megabatch.inspection.odd_values import can_hold, check_fills, to_dense_tensor
from megabatch.inspection.sample_kinds import kind_of
from megabatch.torch_private.loss_nodes import IGNORED_LABEL

DTYPE, SHAPE, NUM_DIMS = attrgetter("dtype"), attrgetter("shape"), attrgetter("ndim")
LABELS = re.compile(r"(^|_)(labels?|label_ids)(_|$)")
"""Keys of labels: labels, shift_labels, label_ids, chosen_labels."""
# Tensors of the key "labels" that `stack_padded` has padded.
_PADDED_NUMBERS = WeakTensorKeyDictionary()


class RightPad(Pad):
    """Pads samples by `pad_right`, without a model.

    `GradientAccumulator` puts a `Padding` in its place, which knows the model, and which alone pads with ``fills`` and
    to a ``shape``.

    Args:
        fills: Padding values of your own, ``{key: value}``, for that `Padding`.

    Raises:
        PlanError: A value that is no number.
    """

    def __init__(self, fills: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.fills = check_fills(fills)

    def __call__(self, samples: list[Mapping[str, Any]], shape: tuple[int, int] | None = None) -> dict[str, Tensor]:
        length = None if shape is None else shape[1]
        columns = gather_columns(samples).items()
        return {name: stack_padded(name, values, self.fills.get(name), length) for name, values in columns}


class Padded(Batching):
    """The default: pads samples on the right, and takes rows of tensors as they are.

    `Padding` says with which values, and which masks are made.

    Args:
        fills: Padding values of your own, ``{key: value}``.

    Raises:
        PlanError: A value that is no number.
    """

    is_collated_by_user = False
    shape_problem = None

    def __init__(self, fills: Mapping[str, float] | None = None) -> None:
        super().__init__(pad_right, RightPad(fills))

    def collate(self, samples: list[Any], rows: Sequence[int], shape: tuple[int, int] | None = None) -> Microbatch:
        """Return samples as one microbatch, of so many rows and tokens where a ``shape`` is given."""
        return self.pad(samples, shape)

    def collate_rows(self, samples: dict[str, Tensor], rows: Sequence[int]) -> Microbatch:
        """Return the rows. Their memory is the caller's."""
        self.pad.check(samples)
        return samples

    @property
    def is_repeatable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True unless a subclass may draw random numbers."""
        return type(self) is Padded

    def owned(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return ``moved``: its memory was made for it, unless a subclass gives away that of a sample."""
        return moved if type(self) is Padded else super().owned(microbatch, moved)

    def kinds(self, samples: list[Any]) -> list[Hashable] | None:
        """Return the kind of each sample: its keys, and sizes that are not padded. None if all are of one kind."""
        if _are_rows_of_tokens(samples):
            return None
        kinds = [kind_of(sample, self.pad.fills) for sample in samples]
        return kinds if len(set(kinds)) > 1 else None


def _are_rows_of_tokens(samples: Sequence[Any]) -> bool:
    """Return True if samples are dicts of the same keys, of numbers or rows of numbers. This check is fast."""
    if not {dict}.issuperset(map(type, samples)):
        return False
    names = set(map(tuple, samples))
    if len(names) != 1:
        return False
    try:
        return all(max(map(NUM_DIMS, map(itemgetter(name), samples))) < 2 for name in names.pop())
    except AttributeError:
        # Lists of numbers have no dims.
        return False


def pad_right(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack samples, padding dim 0 on the right to the longest: labels with -100, other keys with 0.

    Labels are ``labels``, and whole numbers under ``label``, ``label_ids`` and keys such as ``shift_labels``.

    Returns ``{name: [B, longest, ...]}``, or ``[B]`` for scalars. Raises `PlanError` where the samples' keys or
    their other dims differ, and where the dtype of a key cannot hold its padding value.
    """
    return {name: stack_padded(name, values) for name, values in gather_columns(samples).items()}


def gather_columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Return the tensors of each key, one per sample. Raises `PlanError` unless all samples have the same keys."""
    samples = list(map(as_dict, samples))
    names = samples[0].keys()
    columns: dict[str, list[Tensor]] = {}
    for sample in samples:
        if sample.keys() != names:
            raise PlanError(f"samples of one batch have the keys {list(names)} and {list(sample)}; give all the same")
    for name in names:
        values = list(map(itemgetter(name), samples))
        columns[name] = values if all(map(is_dense, values)) else [to_dense_tensor(name, value) for value in values]
    return columns


def stack_padded(name: str, values: list[Tensor], fill: float | None = None, length: int | None = None) -> Tensor:
    """Stack one key of samples as [B, longest, ...], padded with ``fill``; None: with -100 for labels, else with 0.

    With a ``length``, all are padded to it: [B, length, ...].
    """
    _check_dtype(name, values)
    shapes = set(map(SHAPE, values))
    if len(shapes) == 1 and not _needs_length(values[0], length):
        return torch.stack(values)
    _check_sizes(name, shapes)
    fill = _default_fill(name, values[0].dtype) if fill is None else fill
    _check_fill(name, values[0].dtype, fill)
    padded = pad_sequence(values, batch_first=True, padding_value=fill)
    if length is not None:
        missing = padded.new_full((len(values), length - padded.shape[1], *padded.shape[2:]), fill)
        padded = torch.cat([padded, missing], dim=1)
    if name == "labels":
        _PADDED_NUMBERS[padded] = True
    return padded


def join_rows(name: str, values: list[Tensor]) -> Tensor:
    """Concatenate one key of samples in dim 0, [sum of lengths, ...]. Raises `PlanError` where their types differ."""
    _check_dtype(name, values)
    return torch.cat(values)


def _check_dtype(name: str, values: list[Tensor]) -> None:
    if len(dtypes := set(map(DTYPE, values))) > 1:
        raise PlanError(f"{name!r} has the types {sorted(map(str, dtypes))}; give one to all samples")


def _needs_length(value: Tensor, length: int | None) -> bool:
    """Return True for a value that is to be padded to a length. Scalars are not."""
    return length is not None and value.shape[:1] not in ((), (length,))


def _check_sizes(name: str, shapes: set[torch.Size]) -> None:
    # Scalars have no dim 0 either.
    if len({(shape[1:], len(shape)) for shape in shapes}) > 1:
        raise PlanError(
            f"{name!r} has the shapes {sorted(map(tuple, shapes))}; only dim 0 is padded, the others must agree"
        )


def _default_fill(name: str, dtype: torch.dtype) -> float:
    # Soft labels, which are floating, have no value that a loss leaves out.
    is_class = is_label(name) and not dtype.is_floating_point
    return IGNORED_LABEL if name == "labels" or is_class else 0


def _check_fill(name: str, dtype: torch.dtype, fill: float) -> None:
    if not can_hold(dtype, fill):
        raise PlanError(
            f"{name!r} has samples of unequal lengths and the dtype {dtype}, which cannot hold the padding value "
            f"{fill}; give it as torch.long, say, or another value in batching=Padded({{...}})"
        )


@functools.lru_cache
def is_label(name: str) -> bool:
    """Return True if a key of a sample holds labels, by its name."""
    return LABELS.search(name) is not None and "mask" not in name


def holds_tokens(name: str) -> bool:
    """Return True for the key of tokens."""
    return name == "input_ids" or name.endswith("_input_ids")


def has_padded_numbers(labels: Tensor) -> bool:
    """Return True for labels that were padded here. To a loss over numbers, their padding looks like any other."""
    return labels in _PADDED_NUMBERS
