"""Samples: a batch as samples, and any of them as one microbatch.

A batch is a mapping of tensors with samples in dim 0, or a list of samples (mappings of tensors of any length).
Rows of a mapping are taken as they are. Samples of a list are padded to the longest of their microbatch.
A `Deferred` batch is a list whose samples are loaded when their microbatch runs.
"""

import functools
import math
import re
import threading
import zlib
from collections import deque
from collections.abc import Callable, Container, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Real
from operator import attrgetter, itemgetter
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.weak import WeakTensorKeyDictionary

from megabatch.batching.tree import clone, each_leaf
from megabatch.errors import PlanError, require_count
from megabatch.torch_private import pytree

Batch = Mapping[str, Tensor] | Sequence[Any]  # all samples of this rank
Microbatch = Any  # what collate returns: a mapping of tensors unless the user's collate says otherwise
Collate = Callable[[list[Any]], Microbatch]
Length = Callable[[Any], int]

IGNORED_LABEL = -100
"""The label of a position without a target: the default ``ignore_index`` of torch's cross-entropy."""
HALF_TYPES = (torch.bfloat16, torch.float16)
STOPPED = "raised StopIteration: an iterator in it has ended, and not the data; give next() a default"
KEPT_BYTES = 2**28  # of a deferred batch: 256 MiB hold the tokens of any update of text
DTYPE, SHAPE, NUM_DIMS = attrgetter("dtype"), attrgetter("shape"), attrgetter("ndim")
_PADDED_NUMBERS = WeakTensorKeyDictionary()
# Keys of samples in microbatches that are filled up to a shape: what is known to say nothing about other tokens.
OTHERS = ("attention_mask", "position_ids", "token_type_ids")
FILLED = {"input_ids", "labels", "shift_labels", *OTHERS}
BESIDE_TOKENS = ("_mask", "position_ids", "token_type_ids")  # ends of keys that are no targets
NOT_COUNTED = ("input_ids", *BESIDE_TOKENS)  # ends of keys whose padding no weight counts
LABELS = re.compile(r"(^|_)(labels?|label_ids)(_|$)")  # keys of labels: labels, shift_labels, label_ids, chosen_labels


class Deferred(Sequence[Any]):
    """A batch whose samples are loaded when their microbatch runs, at most ``look_ahead`` microbatches early.

    Args:
        load: Returns a sample by its index, on the CPU. It and the collate function run in a thread of their own and
            must not draw from generators that the model draws from.
        lengths: Tokens of each sample, as they are counted when it is loaded.
        weights: The weight of each sample alone, as the loss's ``weigh`` counts it, where it returns a number. With
            them the first forward waits for its own microbatch only (and for a sample to send, where a rank has none).
            Without them a loss that weighs has every sample loaded before the first forward. A loss without ``weigh``
            ignores them.
        look_ahead: Microbatches that are prepared while one runs. 0 prepares each in its turn.
        measured: True if lengths are counted when a sample is loaded. False for lengths of another kind, patches of an
            image say, which are taken as given.
        kept_bytes: Memory for microbatches that are weighed before the first forward, which keep their samples until
            their turn. The samples of the others are loaded a second time.
    """

    def __init__(
        self,
        load: Callable[[int], Any],
        lengths: Sequence[int],
        weights: Sequence[float] | None = None,
        *,
        look_ahead: int = 1,
        measured: bool = True,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._load = load
        self.lengths, self.weights, self.look_ahead, self.measured = lengths, weights, look_ahead, measured
        self.kept_bytes = kept_bytes

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        """Load the sample at ``index``; a list of them for a slice."""
        asked = range(len(self))[index]
        return self._load(asked) if isinstance(asked, int) else [self._load(each) for each in asked]

    def check(self) -> None:
        """Raise `PlanError` for invalid arguments. The accumulator calls it, which tells all ranks."""
        require_count("look_ahead", self.look_ahead, least=0)
        require_count("kept_bytes", self.kept_bytes, least=0)
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
        """Measure the samples of a batch.

        Args:
            batch: All samples of this rank.
            collate: The user's collate function.
            length: The user's length of a sample; None counts the size of dim 0 of its first tensor.
            part: Returns the loss's view of a collated microbatch on this rank.
            pad: Collates samples where there is no ``collate``, and checks the microbatches of the others. None pads as
                `pad_right` does.
        """
        is_list = not isinstance(batch, Mapping | Deferred)
        if is_list and (not isinstance(cast(Any, batch), Sequence) or isinstance(batch, str | bytes)):
            raise PlanError(
                f"the batch is a {type(batch).__name__}; expected a mapping of tensors with samples in dim 0, "
                "or a list of samples"
            )
        self.deferred = batch if isinstance(batch, Deferred) else None
        self._rows = _checked_rows(batch) if isinstance(batch, Mapping) else None
        self._list = list(batch) if is_list else []
        self._collate = collate
        self._length = length
        self._part = part
        self._pad = pad
        self._stack = collate if collate is not None else pad if pad is not None else pad_right
        self._kept: dict[int, Any] = {}  # the last sample of a deferred batch, once it is loaded
        # Microbatches of a deferred batch that were taken to weigh them, and room for more until the first turn.
        self._early: dict[tuple[int, ...], Microbatch] = {}
        self._room = 0 if self.deferred is None else self.deferred.kept_bytes
        self._loading = threading.Lock()  # one thread at a time loads and collates
        self.is_collated_by_user = collate is not None
        self.is_shared = self._rows is not None or collate is not None  # microbatches may be the caller's own tensors
        self.expect: Callable[[Microbatch], None] | None = None  # is told the microbatch to run next; set by `take`
        self.shared: Sequence[int] = ()  # `Plan.shared`, which a `SharedPrefix` lays out
        self.shapes: Mapping[tuple[int, ...], tuple[int, int]] = {}  # `Plan.shapes`, and that of a dummy microbatch
        if self._rows is not None:
            lengths = _row_lengths(self._rows, length)
        elif self.deferred is not None:
            lengths = _given_lengths(self.deferred)
        else:
            try:
                lengths = [int((length or sample_length)(sample)) for sample in self._list]
            except StopIteration as error:
                raise PlanError(f"the function length= {STOPPED}") from error
        if 0 in lengths and length is None and self.deferred is None:
            raise PlanError(
                f"sample {lengths.index(0)} of the batch has length 0; leave it out, or give length= if it has tokens "
                "elsewhere"
            )
        self.lengths: list[int] = lengths
        self.num_samples = len(lengths)
        may_be_images = length is None and self.deferred is None and len(set(lengths)) == 1
        # Real tokens, without padding; samples where none has a length.
        self.num_tokens = len(lengths) if may_be_images and self._are_images() else sum(lengths)

    def _are_images(self) -> bool:
        """Return True for images [C, H, W]: their dim 0 counts nothing."""
        value: Any = next(iter((self._list[0] if self._rows is None else self._rows).values()))
        num_dims = value.ndim - (self._rows is not None) if isinstance(value, Tensor) else 0
        return num_dims > 2 and value.is_floating_point()

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: Sequence[int]) -> Microbatch:
        """Collate the samples at ``indices``, on the device of the batch."""
        try:
            made = self._collate_rows(indices)
            if self.shared:
                lengths, shared = ([each[index] for index in indices] for each in (self.lengths, self.shared))
                cast(Any, self._collate).lay_out(made, lengths, shared)
            made = made if self._part is None else self._part(made)
        except StopIteration as error:
            raise PlanError(f"collate, or prepare= of the loss, {STOPPED}") from error
        if self._room > 0:
            self._keep_weighed(tuple(indices), made)
        return made

    def _collate_rows(self, indices: Sequence[int]) -> Microbatch:
        """Collate samples, one thread at a time."""
        with self._loading:
            if self.shapes:
                get = self._list.__getitem__ if self.deferred is None else self._load
                rows = None if self._rows is None else _split(_take_rows(self._rows, indices))
                made = cast(Any, self._stack)(rows or [get(index) for index in indices], self.shapes[tuple(indices)])
            elif self._rows is not None:
                rows = _take_rows(self._rows, indices)
                made = rows if self._collate is None else self._collate(_split(rows))
            else:
                get = self._list.__getitem__ if self.deferred is None else self._load
                made = self._stack([get(index) for index in indices])
            if self._pad is not None and (self._rows is not None or self._collate is not None):
                self._pad.check(made)
            if self._pad is not None:
                self.expect = self._pad.expect
        return made

    @property
    def is_list(self) -> bool:
        """True for a list of samples in memory."""
        return self._rows is None and self.deferred is None

    def kinds(self) -> list[Hashable] | None:
        """Return the kind of each sample: its keys, and sizes that are not padded. None if all are of one kind.

        Samples of one microbatch are of one kind. Kinds are not known of a batch that is loaded later, and of samples
        that the user's collate function puts together.
        """
        if self._collate is not None or not self.is_list or _are_rows_of_tokens(self._list):
            return None
        padded = () if self._pad is None else self._pad.fills
        kinds = [_kind_of(sample, padded) for sample in self._list]
        return kinds if len(set(kinds)) > 1 else None

    def ragged_keys(self, indices: Sequence[int]) -> list[str]:
        """Return the keys of a list's samples that differ in shape, without tokens and masks."""
        samples = [self._list[index] for index in indices]
        names = [name for name in samples[0].keys() if not name.endswith(NOT_COUNTED)]  # noqa: SIM118 - a TensorDict
        return [name for name in names if len({_shape_of(sample[name]) for sample in samples}) > 1]

    def column(self, name: str) -> list[Tensor]:
        """Return one tensor of each sample. Raises `PlanError` for samples without it, and for a deferred batch."""
        if self.deferred is not None:
            raise PlanError(f"{name!r} of samples is compared, and Deferred loads samples later; give a list of them")
        if self._rows is not None and name in self._rows:
            return list(self._rows[name])
        if self._rows is not None or any(name not in sample for sample in self._list):
            raise PlanError(f"a sample has no {name!r}, by which samples are compared; give it to all")
        return [to_dense_tensor(name, sample[name]) for sample in self._list]

    def _load(self, index: int) -> Any:
        """Load a sample of a deferred batch and compare it with its given length."""
        assert self.deferred is not None
        if index in self._kept:
            return self._kept[index]
        try:
            sample = self.deferred[index]
        except StopIteration as error:
            raise PlanError(f"sample {index} of Deferred {STOPPED}") from error
        length = int((self._length or sample_length)(sample)) if self.deferred.measured else self.lengths[index]
        if length != self.lengths[index]:
            raise PlanError(
                f"sample {index} of Deferred has {length} tokens, but lengths says {self.lengths[index]}; "
                "give the length that is counted when the sample is loaded, or measured=False"
            )
        if index == len(self) - 1:
            self._kept[index] = sample
        return sample

    def in_turn(self, microbatches: Sequence[Sequence[int]]) -> Generator[Microbatch]:
        """Yield each of ``microbatches``; of a deferred batch, the next are prepared in a thread meanwhile.

        A caller that drops one before it asks for the next holds at most ``look_ahead + 1`` of a deferred batch.
        """
        if self.deferred is None:
            yield from map(self.take, microbatches)
            return
        self._room = 0
        ahead: deque[Future[Microbatch]] = deque()
        thread = ThreadPoolExecutor(1, "megabatch-deferred")
        try:
            for index in range(len(microbatches)):
                due = microbatches[index + len(ahead) : index + self.deferred.look_ahead + 1]
                ahead.extend(thread.submit(self._take_kept, rows) for rows in due)
                yield ahead.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)

    def _keep_weighed(self, indices: tuple[int, ...], made: Microbatch) -> None:
        """Keep a microbatch of a deferred batch that was taken before its turn, if there is room for it."""
        sizes: list[int] = []
        each_leaf(made, lambda leaf: sizes.append(getattr(leaf, "nbytes", 0)))
        self._room -= sum(sizes)
        if self._room >= 0:  # the user's collate function may fill the same buffer again
            self._early[indices] = made if self._collate is None else clone(made)

    def forget_early(self) -> None:
        """Free the microbatches that were taken before their turn."""
        self._early.clear()
        self._room = 0 if self.deferred is None else self.deferred.kept_bytes

    def _take_kept(self, indices: Sequence[int]) -> Microbatch:
        """Take a microbatch that outlives the next: the user's collate function may fill the same buffer again."""
        if self._early and (made := self._early.pop(tuple(indices), None)) is not None:
            return made
        made = self.take(indices)
        is_ahead = self.deferred is not None and self.deferred.look_ahead > 0
        return clone(made) if is_ahead and self._collate is not None else made

    def copy_last(self) -> "Samples":
        """Return the last sample. Rows of a mapping are copied, so that keeping one does not keep the batch."""
        if self.deferred is not None:
            return self  # of a deferred batch there is no more in memory
        if self._rows is None:
            return Samples(self._list[-1:], self._collate, self._length, self._part, self._pad)
        rows = {name: tensor[-1:].clone() for name, tensor in self._rows.items()}
        return Samples(rows, self._collate, self._length, self._part, self._pad)

    def one(self, index: int) -> Any:
        """Return the sample at ``index``, on its own memory, as an element of a list of samples."""
        if self._rows is not None:
            return {name: tensor[index].clone() for name, tensor in self._rows.items()}
        sample = self._list[index] if self.deferred is None else self._load(index)
        return clone(sample)

    def dummy(self) -> Microbatch:
        """Return the last sample as a microbatch of its own."""
        return self.take([len(self) - 1])

    def owned(self, microbatch: Microbatch, moved: Microbatch) -> Microbatch:
        """Return ``moved``, the microbatch on its device, on memory of its own, so that a loss may write to it.

        Rows of a mapping and tensors of the user's collate function may be the caller's own.
        """
        if not self.is_shared:
            return moved
        if moved is microbatch:
            made = clone(moved)
        else:
            kept: set[int] = set()
            each_leaf(microbatch, lambda leaf: kept.add(id(leaf)) or leaf)
            made = each_leaf(
                moved, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and id(leaf) in kept else leaf
            )
        if self.shared:
            cast(Any, self._collate).follow(microbatch, made)
        return made

    def held(self) -> object:
        """Return the batch, as far as it is in memory."""
        return [self._list, self._rows, list(self._kept.values())]

    def keys(self) -> list[tuple[str, ...]]:
        """Return each set of keys of samples once; none before samples are loaded or if the user's collate chooses."""
        if self._collate is not None:
            return []
        if self._rows is not None:
            return [tuple(sorted(self._rows))] if len(self) else []
        kinds = {tuple(sample.keys()) for sample in self._list if type(sample) is dict or isinstance(sample, Mapping)}
        return sorted({tuple(sorted(map(str, names))) for names in kinds})

    def fingerprint(self) -> int:
        """Hash all lengths and the last sample's numbers."""
        found = zlib.crc32(repr(self.lengths).encode())
        if len(self) and self.deferred is None:
            last = self._list[-1] if self._rows is None else {name: rows[-1] for name, rows in self._rows.items()}
            for leaf in pytree.tree_leaves(last):
                if isinstance(leaf, Tensor) and leaf.device.type == "cpu":  # reading others would wait
                    found = zlib.crc32(leaf.detach().reshape(-1).view(torch.uint8).numpy().tobytes(), found)
        return found


class Pad(Protocol):
    """Pads samples into a microbatch, and checks a microbatch that was made otherwise."""

    fills: dict[str, float]  # padding values that the user says, by key

    def __call__(self, samples: list[Mapping[str, Any]]) -> dict[str, Tensor]: ...

    def check(self, microbatch: Microbatch) -> None: ...

    def expect(self, microbatch: Microbatch) -> None: ...


def sample_length(sample: Any) -> int:
    """Return the tokens of a sample: the size of dim 0 of its first tensor, 1 for a scalar.

    This is the default ``length`` of a `GradientAccumulator`. Raises `PlanError` for a sample that is no mapping of
    tensors.
    """
    if type(sample) is not dict and not isinstance(sample, Mapping):  # isinstance alone is slow
        raise _no_mapping(sample)
    # Mappings may have another truth value than that of their keys, as a TensorDict has.
    first_item = next(iter(cast(Mapping[str, Any], sample).items()), None)
    if first_item is None:
        raise _no_mapping(sample)
    name, value = first_item
    first = value if _is_dense(value) else to_dense_tensor(name, value)
    return first.size(0) if first.ndim else 1


def _shape_of(value: Any) -> tuple[int, ...]:
    """Return the shape of a value of a sample: a tensor, an array, or nested lists of numbers."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    is_nested = isinstance(value, list | tuple)
    return (len(value), *(_shape_of(value[0]) if value else ())) if is_nested else ()


def _is_dense(value: Any) -> bool:
    return type(value) is Tensor and value.layout == torch.strided and not value.is_nested


def pad_right(samples: list[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Stack samples, padding dim 0 on the right to the longest: labels with -100, other keys with 0.

    Labels are ``labels``, and whole numbers under ``label``, ``label_ids`` and keys such as ``shift_labels``.

    Returns ``{name: [B, longest, ...]}``, or ``[B]`` for scalars. Raises `PlanError` where the samples' keys or
    their other dims differ, and where the dtype of a key cannot hold its padding value.
    """
    return {name: stack_padded(name, values) for name, values in gather_columns(samples).items()}


def gather_columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Tensor]]:
    """Return the tensors of each key, one per sample. Raises `PlanError` unless all samples have the same keys."""
    samples = [sample if type(cast(Any, sample)) is dict else _as_dict(sample) for sample in samples]
    names = samples[0].keys()
    for sample in samples:
        if not sample:
            raise _no_mapping(sample)
        if sample.keys() != names:
            raise PlanError(f"samples of one batch have the keys {list(names)} and {list(sample)}; give all the same")
    columns = {name: list(map(itemgetter(name), samples)) for name in names}
    return {
        name: values if all(map(_is_dense, values)) else [to_dense_tensor(name, value) for value in values]
        for name, values in columns.items()
    }


def _as_dict(sample: Any) -> dict[str, Any]:
    if not isinstance(sample, Mapping):
        raise _no_mapping(sample)
    return dict(cast(Mapping[str, Any], sample).items())


def _are_rows_of_tokens(samples: Sequence[Any]) -> bool:
    """Return True if samples have the same keys, of numbers or rows of numbers, which is quickly found."""
    try:
        names = {tuple(sample) for sample in samples if type(sample) is dict}
        if len(names) != 1 or not {dict}.issuperset(map(type, samples)):
            return False
        return all(max(map(NUM_DIMS, map(itemgetter(name), samples))) < 2 for name in names.pop())
    except AttributeError:  # lists of numbers
        return False


def _kind_of(sample: Any, padded: Container[str]) -> Hashable:
    """Return the keys of a sample and the sizes that are not padded: all but the first, and all of images."""
    if not isinstance(sample, Mapping):
        return None  # which is refused when it is collated
    kind: list[tuple[str, int, tuple[int, ...]]] = []
    for name, value in cast(Mapping[str, Any], sample).items():
        shape = _shape_of(value)
        is_image = len(shape) > 2 and name not in padded and _is_floating(value)
        kind.append((str(name), len(shape), shape if is_image else shape[1:]))
    return tuple(sorted(kind))


def _is_floating(value: Any) -> bool:
    while isinstance(value, list | tuple) and value:
        value = value[0]
    dtype = getattr(value, "dtype", type(value))
    return (
        dtype.is_floating_point
        if isinstance(dtype, torch.dtype)
        else getattr(dtype, "kind", "") == "f" or dtype is float
    )


def join_rows(name: str, values: list[Tensor]) -> Tensor:
    """Concatenate one key of samples in dim 0, [sum of lengths, ...]. Raises `PlanError` where their types differ."""
    dtypes = set(map(DTYPE, values))
    if len(dtypes) > 1:
        raise PlanError(f"{name!r} has the types {sorted(map(str, dtypes))}; give one to all samples")
    return torch.cat(values)


def to_dense_tensor(name: str, value: Any) -> Tensor:
    """Return a value of a sample as a dense tensor."""
    try:
        made = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(
            f"{name!r} of a sample is a {type(value).__name__}; expected a tensor, or numbers. For other samples say "
            "collate= and length= of your own (length=lambda sample: 1 where none has a length)"
        ) from None
    if made.layout != torch.strided or made.is_nested:
        raise _not_dense(f"{name!r} of a sample", made)
    return made


def stack_padded(name: str, values: list[Tensor], fill: float | None = None, length: int | None = None) -> Tensor:
    """Stack one key of samples as [B, longest, ...], padded with ``fill``; None: with -100 for labels, else with 0.

    With a ``length``, all are padded to it: [B, length, ...].
    """
    first = values[0]
    dtypes, shapes = set(map(DTYPE, values)), set(map(SHAPE, values))
    if len(dtypes) > 1:
        raise PlanError(f"{name!r} has the types {sorted(map(str, dtypes))}; give one to all samples")
    if len(shapes) == 1 and (length is None or first.ndim == 0 or len(first) == length):
        return torch.stack(values)
    if len({each[1:] for each in shapes}) > 1 or len(set(map(len, shapes))) > 1:
        raise PlanError(
            f"{name!r} has the shapes {sorted(map(tuple, shapes))}; only dim 0 is padded, the others must agree"
        )
    is_class = name == "labels" or (is_label(name) and not first.is_floating_point())  # soft labels have no such value
    fill = (IGNORED_LABEL if is_class else 0) if fill is None else fill
    if not _can_hold(first.dtype, fill):
        raise PlanError(
            f"{name!r} has samples of unequal lengths and the dtype {first.dtype}, which cannot hold the padding value "
            f"{fill}; give it as torch.long, say, or another value in padding="
        )
    padded = pad_sequence(values, batch_first=True, padding_value=fill)
    if length is not None:
        more = padded.new_full((len(values), length - padded.shape[1], *first.shape[1:]), fill)
        padded = torch.cat([padded, more], dim=1)
    if name == "labels":
        _PADDED_NUMBERS[padded] = True
    return padded


@functools.lru_cache
def is_label(name: str) -> bool:
    """Return True if a key of a sample holds labels, by its name."""
    return LABELS.search(name) is not None and "mask" not in name


def without_labels(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample with labels of -100, which fills a microbatch up to a shape and adds nothing to its loss.

    Raises `PlanError` for keys that a model may read beside its tokens, and for labels that cannot be -100.
    """
    tensors = {name: to_dense_tensor(name, value) for name, value in sample.items()}
    labels = {name: each for name, each in tensors.items() if name in ("labels", "shift_labels")}
    if "input_ids" not in tensors or not labels or not tensors.keys() <= FILLED:
        raise PlanError(
            f"shapes= fills microbatches up with tokens without a label, and the samples have {', '.join(tensors)}; "
            f"expected input_ids, labels or shift_labels, and at most {', '.join(OTHERS)}; leave shapes= out"
        )
    for name, each in labels.items():
        if each.is_floating_point() or not each.dtype.is_signed:
            raise PlanError(
                f"shapes= fills microbatches up with {name} of {IGNORED_LABEL}, and those of samples are {each.dtype}; "
                "give signed whole numbers, or leave shapes= out"
            )
    return {**tensors, **{name: torch.full_like(each, IGNORED_LABEL) for name, each in labels.items()}}


@functools.lru_cache
def _can_hold(dtype: torch.dtype, number: float) -> bool:
    """Return True if a dtype holds a number, to its own rounding."""
    if dtype == torch.bool:
        return number in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return abs(number) <= torch.finfo(dtype).max or not math.isfinite(number)
    info = torch.iinfo(dtype)
    return info.min <= number <= info.max and number == int(number) == float(number)


def has_padded_numbers(labels: Tensor) -> bool:
    """Return True for labels that were padded here. To a loss over numbers, their padding looks like any other."""
    return labels in _PADDED_NUMBERS


def _no_mapping(sample: Any) -> PlanError:
    return PlanError(
        f"a sample is {'empty' if isinstance(sample, Mapping) else f'a {type(sample).__name__}'}; expected a mapping "
        "of tensors. "
        "Give such mappings, or say collate= and length= of your own"
    )


def _not_dense(what: str, tensor: Tensor) -> PlanError:
    kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    return PlanError(
        f"{what} is a {kind} tensor; give dense ones, as a list of samples where lengths differ, or collate= and "
        "length= of your own"
    )


def _checked_rows(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    batch = dict(batch.items())
    if not batch:
        raise PlanError(
            "the batch is a mapping without tensors; expected samples in dim 0 of each. For no samples give []"
        )
    for name, value in batch.items():
        if not isinstance(value, Tensor) or value.ndim == 0:
            kind = "a scalar" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise PlanError(f"{name!r} of the batch is {kind}; expected a tensor with samples in dim 0")
        if value.layout != torch.strided or value.is_nested:
            raise _not_dense(f"{name!r} of the batch", value)
    sizes = {name: len(value) for name, value in batch.items()}
    if len(set(sizes.values())) > 1:
        raise PlanError(f"the tensors of the batch differ in dim 0: {sizes}; expected one row per sample in each")
    return batch


def _take_rows(batch: Mapping[str, Tensor], indices: Sequence[int]) -> dict[str, Tensor]:
    first = indices[0]
    if list(indices) == list(range(first, first + len(indices))):
        rows = slice(first, first + len(indices))  # a view, where a copy would say the same
    else:
        rows = torch.tensor(indices, device="cpu")
    return {name: tensor[rows] for name, tensor in batch.items()}


def _row_lengths(rows: Mapping[str, Tensor], length: Length | None) -> list[int]:
    if length is not None:
        return [int(length(sample)) for sample in _split(rows)]
    first = next(iter(rows.values()))
    return [first.shape[1] if first.ndim > 1 else 1] * len(first)


def _given_lengths(batch: Deferred) -> list[int]:
    batch.check()
    given = enumerate(batch.lengths)
    return [require_count(f"the length of sample {index}", length, least=0) for index, length in given]


def _split(rows: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    size = len(next(iter(rows.values())))
    return [{name: tensor[row] for name, tensor in rows.items()} for row in range(size)]
