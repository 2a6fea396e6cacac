"""The only file that knows what a batch looks like.

A batch is a mapping of tensors with samples in dim 0, or a list of samples (mappings of tensors of any length).
A mapping is cut by rows and never trimmed; samples are padded to the longest of their microbatch.
A deferred batch is a list whose samples are loaded when their microbatch comes.
"""

import math
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Real
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.batching.tree import clone, each_leaf
from megabatch.errors import PlanError, require_count
from megabatch.torch_private import pytree

Batch = Mapping[str, Tensor] | Sequence[Any]  # all samples of this rank
Microbatch = Any  # what collate returns: a mapping of tensors unless the user's collate says otherwise
Collate = Callable[[list[Any]], Microbatch]
Length = Callable[[Any], int]

IGNORED_LABEL = -100  # torch's cross-entropy ignores it by default
_PADDED_NUMBERS = WeakTensorKeyDictionary()
LABELS = re.compile(r"(^|_)(labels?|label_ids)(_|$)")  # keys of labels: labels, shift_labels, label_ids, chosen_labels


class Deferred(Sequence[Any]):
    """A batch whose samples are loaded when their microbatch comes, at most ``look_ahead`` microbatches before it.

    Args:
        load: Gives a sample by its index, on the CPU. It and the collate function are called in a thread of its own;
            they must not draw from generators that the model draws from.
        lengths: Tokens of each sample, as they will be counted when it is loaded.
        weights: What the loss's ``weigh`` counts for each sample alone, where it returns a number. With them the first
            forward waits for its own microbatch only (and for a sample to send, where a rank has none); without them
            a loss that weighs has every sample loaded twice. A loss without ``weigh`` does not look at them.
        look_ahead: Microbatches that are made while one runs. 0 makes each in its turn.
        measured: Whether lengths are what is counted when a sample is loaded. False: of another kind, patches of an
            image say, and taken as told.
    """

    def __init__(
        self,
        load: Callable[[int], Any],
        lengths: Sequence[int],
        weights: Sequence[float] | None = None,
        *,
        look_ahead: int = 1,
        measured: bool = True,
    ) -> None:
        self._load = load
        self.lengths, self.weights, self.look_ahead, self.measured = lengths, weights, look_ahead, measured

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        """The sample at ``index``, loaded; a list of them for a slice."""
        asked = range(len(self))[index]
        return self._load(asked) if isinstance(asked, int) else [self._load(each) for each in asked]

    def check(self) -> None:
        """Raise `PlanError` for what cannot be; by the accumulator, which tells all ranks."""
        require_count("look_ahead", self.look_ahead, least=0)
        weights = [] if self.weights is None else self.weights
        if self.weights is not None and len(weights) != len(self):
            raise PlanError(f"Deferred has {len(self)} lengths and {len(weights)} weights; give one of each per sample")
        for sample, weight in enumerate(weights):
            if not isinstance(weight, Real) or not 0 <= weight < math.inf:
                raise PlanError(f"the weight of sample {sample} is {weight!r}; expected a finite number, not negative")


class Samples:
    """A batch seen as samples: how many, how long, and any of them as one microbatch."""

    def __init__(
        self,
        batch: Batch,
        collate: Collate | None = None,
        length: Length | None = None,
        part: Callable[[Microbatch], Microbatch] | None = None,
        pad: "Pad | None" = None,
    ) -> None:
        """``part`` is what the loss sees of a microbatch on this rank, where that is not what was collated.

        ``pad`` collates samples where there is no ``collate``, and checks what either has made; None pads as
        `pad_right` does.
        """
        self.deferred = batch if isinstance(batch, Deferred) else None
        self._rows = _checked_rows(batch) if isinstance(batch, Mapping) else None
        self._list = [] if self._rows is not None or self.deferred is not None else _checked_list(batch)
        self._collate = collate
        self._length = length
        self._part = part
        self._pad = pad
        self._kept: dict[int, Any] = {}  # the last sample of a deferred batch, once it is loaded
        self._loading = threading.Lock()  # one thread at a time loads and collates
        self.lengths: list[int] = self._measure(length)

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: Sequence[int]) -> Microbatch:
        """The samples at ``indices``, collated; on the device where the batch is."""
        with self._loading:
            whole = self._take(indices)
        return whole if self._part is None else self._part(whole)

    def _take(self, indices: Sequence[int]) -> Microbatch:
        if self._rows is None:
            get = self._list.__getitem__ if self.deferred is None else self._loaded
            return self._collated([get(index) for index in indices])
        rows: slice | Tensor = torch.tensor(indices, device="cpu")
        if list(indices) == list(range(indices[0], indices[0] + len(indices))):
            rows = slice(indices[0], indices[0] + len(indices))  # a view, where a copy would say the same
        taken = {name: tensor[rows] for name, tensor in self._rows.items()}
        if self._collate is not None:
            return self._collated(_split(taken))
        if self._pad is not None:
            self._pad.check(taken)
        return taken

    def _collated(self, samples: list[Any]) -> Microbatch:
        if self._collate is None:
            return pad_right(samples) if self._pad is None else self._pad(samples)
        made = self._collate(samples)
        if self._pad is not None:
            self._pad.check(made)
        return made

    def in_turn(self, microbatches: Sequence[Sequence[int]]) -> Generator[Microbatch]:
        """Each of ``microbatches`` when it is asked for; of a deferred batch, the next are made while it is used.

        Who lets go of one before asking for the next has at most ``look_ahead + 1`` of a deferred batch in memory.
        """
        if self.deferred is None:
            yield from map(self.take, microbatches)
            return
        ahead: deque[Future[Microbatch]] = deque()
        thread = ThreadPoolExecutor(1, "megabatch-deferred")
        try:
            for index in range(len(microbatches)):
                due = microbatches[index + len(ahead) : index + self.deferred.look_ahead + 1]
                ahead.extend(thread.submit(self._take_kept, rows) for rows in due)
                yield ahead.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)

    def _take_kept(self, indices: Sequence[int]) -> Microbatch:
        """A microbatch that outlives the next: a collate function of the user may fill the same buffer again."""
        made = self.take(indices)
        is_ahead = self.deferred is not None and self.deferred.look_ahead > 0
        return clone(made) if is_ahead and self._collate is not None else made

    def last(self) -> "Samples":
        """The last sample, on its own memory, so that keeping it does not keep the batch."""
        if self.deferred is not None:
            return self  # of a deferred batch there is no more in memory
        if self._rows is None:
            return Samples(self._list[-1:], self._collate, self._length, self._part, self._pad)
        rows = {name: tensor[-1:].clone() for name, tensor in self._rows.items()}
        return Samples(rows, self._collate, self._length, self._part, self._pad)

    def one(self, index: int) -> Any:
        """The sample at ``index``, on its own memory, as an element of a list of samples."""
        if self._rows is not None:
            return {name: tensor[index].clone() for name, tensor in self._rows.items()}
        sample = self._list[index] if self.deferred is None else self._loaded(index)
        return clone(sample)

    def dummy(self) -> Microbatch:
        """The last sample as a microbatch of its own."""
        return self.take([len(self) - 1])

    def owned(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """``moved``, the microbatch on its device, on memory of its own, so that a loss may write to it.

        Rows of a mapping and what the user's collate returns may be the caller's own tensors.
        """
        if self._rows is None and self._collate is None:
            return moved
        kept: set[int] = set()
        each_leaf(microbatch, lambda leaf: kept.add(id(leaf)) or leaf)
        return each_leaf(moved, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and id(leaf) in kept else leaf)

    @property
    def is_collated_by_user(self) -> bool:
        """True if the user has a collate function."""
        return self._collate is not None

    def expect(self, microbatch: Microbatch) -> None:
        """Note the microbatch that runs next, on the CPU."""
        if self._pad is not None:
            self._pad.expect(microbatch)

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding; samples where none has a length, as images."""
        return sum(self.lengths) if self._has_lengths else len(self)

    def held(self) -> object:
        """The batch, as far as it is in memory."""
        return [self._list, self._rows, list(self._kept.values())]

    def keys(self) -> list[tuple[str, ...]]:
        """The keys of samples, each set once; none where samples are not there yet, or the user's collate chooses."""
        if self._collate is not None:
            return []
        if self._rows is not None:
            return [tuple(sorted(self._rows))] if len(self) else []
        return sorted({tuple(sorted(map(str, sample))) for sample in self._list if isinstance(sample, Mapping)})

    def fingerprint(self) -> int:
        """A number that nearly always differs where the samples do: of all lengths, and of what the last one holds."""
        found = zlib.crc32(repr(self.lengths).encode())
        if len(self) and self.deferred is None:
            last = self._list[-1] if self._rows is None else {name: rows[-1] for name, rows in self._rows.items()}
            for leaf in pytree.tree_leaves(last):
                if isinstance(leaf, Tensor) and leaf.device.type == "cpu":  # reading others would wait
                    found = zlib.crc32(leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes(), found)
        return found

    def _loaded(self, index: int) -> Any:
        """A sample of a deferred batch, held against what was told of it."""
        assert self.deferred is not None
        if index in self._kept:
            return self._kept[index]
        sample = self.deferred[index]
        length = int((self._length or sample_length)(sample)) if self.deferred.measured else self.lengths[index]
        if length != self.lengths[index]:
            raise PlanError(
                f"sample {index} of Deferred has {length} tokens, but lengths says {self.lengths[index]}; "
                "give the length that is counted when the sample is loaded, or measured=False"
            )
        if index == len(self) - 1:
            self._kept[index] = sample
        return sample

    def _measure(self, length: Length | None) -> list[int]:
        if self.deferred is not None:
            self.deferred.check()
            told = enumerate(self.deferred.lengths)
            return [require_count(f"the length of sample {index}", length, least=0) for index, length in told]
        if self._rows is None:
            lengths = [int((length or sample_length)(sample)) for sample in self._list]
        elif length is not None:
            lengths = [int(length(sample)) for sample in _split(self._rows)]
        else:
            first = next(iter(self._rows.values()))
            lengths = [first.shape[1] if first.ndim > 1 else 1] * len(first)
        if length is None and 0 in lengths:
            raise PlanError(
                f"sample {lengths.index(0)} of the batch has length 0; leave it out, or give length= if it has tokens "
                "elsewhere"
            )
        return lengths

    @property
    def _has_lengths(self) -> bool:
        """True if lengths count tokens; dim 0 of images, [C, H, W] and of one shape, counts nothing."""
        if self.deferred is not None or self._length is not None or len(set(self.lengths)) > 1 or not len(self):
            return True
        first = self._list[0] if self._rows is None else {name: value[0] for name, value in self._rows.items()}
        value = next(iter(fields_of(first).values()))
        return not (isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 2)


class Pad(Protocol):
    """Makes a microbatch of samples of unequal lengths, and checks a microbatch that was made otherwise."""

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Tensor]: ...

    def check(self, microbatch: Microbatch) -> None: ...

    def expect(self, microbatch: Microbatch) -> None: ...


def sample_length(sample: Any) -> int:
    """Tokens of a sample: the size of dim 0 of its first tensor, 1 for a scalar."""
    name, value = next(iter(fields_of(sample).items()))
    first = tensor_of(name, value)
    return first.shape[0] if first.ndim else 1


def pad_right(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack samples, padding dim 0 on the right to the longest: labels with -100, other keys with 0.

    Labels are ``labels``, and whole numbers under ``label``, ``label_ids`` and keys such as ``shift_labels``.

    Returns ``{name: [B, longest, ...]}``, or ``[B]`` for scalars. Raises `PlanError` where the samples' keys or
    their other dims differ, and where the dtype of a key cannot hold what it is padded with.
    """
    check_keys(samples)
    return {name: stacked(name, values) for name, values in columns_of(samples).items()}


def columns_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """The tensors of each key, one per sample."""
    return {name: [tensor_of(name, sample[name]) for sample in samples] for name in samples[0]}


def is_label(name: str) -> bool:
    """Return True if a key of a sample holds labels, by its name."""
    return LABELS.search(name) is not None and "mask" not in name


def check_keys(samples: Sequence[Mapping[str, Any]]) -> None:
    """Raise `PlanError` where samples are no mappings of the same names."""
    for sample in samples:
        if fields_of(sample).keys() != samples[0].keys():
            raise PlanError(
                f"samples of one batch have the keys {list(samples[0])} and {list(sample)}; give all the same"
            )


def fields_of(sample: Any) -> Mapping[str, Any]:
    if not isinstance(sample, Mapping) or not sample:
        raise PlanError(
            f"a sample is {'empty' if sample == {} else f'a {type(sample).__name__}'}; expected a mapping of tensors. "
            "Give such mappings, or say collate= and length= of your own"
        )
    return cast(Mapping[str, Any], sample)


def tensor_of(name: str, value: Any) -> Tensor:
    try:
        made = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"{name!r} of a sample is a {type(value).__name__}; expected a tensor, or numbers") from None
    _check_layout(f"{name!r} of a sample", made)
    return made


def stacked(name: str, values: list[Tensor], fill: float | None = None) -> Tensor:
    """One key of samples as [B, longest, ...]."""
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
    is_class = name == "labels" or (is_label(name) and not first.is_floating_point())  # soft labels have no such value
    fill = (IGNORED_LABEL if is_class else 0) if fill is None else fill
    if not _holds(first.dtype, fill):
        raise PlanError(
            f"{name!r} has samples of unequal lengths and the dtype {first.dtype}, which cannot hold the padding value "
            f"{fill}; give it as torch.long, say, or another value in padding="
        )
    padded = first.new_full((len(values), max(len(value) for value in values), *first.shape[1:]), fill)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    if is_class and padded.is_floating_point():
        _PADDED_NUMBERS[padded] = True
    return padded


def has_padded_numbers(labels: Tensor) -> bool:
    """Return True for floating labels that were padded here: their padding looks like any number."""
    return labels in _PADDED_NUMBERS


def _holds(dtype: torch.dtype, number: float) -> bool:
    """Return True if a dtype holds a number, to its own rounding."""
    if dtype == torch.bool:
        return number in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return abs(number) <= torch.finfo(dtype).max or not math.isfinite(number)
    info = torch.iinfo(dtype)
    return info.min <= number <= info.max and number == int(number)


def _check_layout(what: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise PlanError(
            f"{what} is a {kind} tensor; give dense ones, as a list of samples where lengths differ, or collate= and "
            "length= of your own"
        )


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
        _check_layout(f"{name!r} of the batch", value)
    sizes = {name: len(value) for name, value in batch.items()}
    if len(set(sizes.values())) > 1:
        raise PlanError(f"the tensors of the batch differ in dim 0: {sizes}; expected one row per sample in each")
    return dict(batch)


def _split(rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    size = len(next(iter(rows.values())))
    return [{name: tensor[row] for name, tensor in rows.items()} for row in range(size)]
