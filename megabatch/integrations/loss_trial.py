"""The trial of another library's loss: is it the mean that it is taken for? Nothing is left of it."""

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, Sampler

from megabatch.autotune.snapshot import ModuleSnapshot
from megabatch.batching.samples import IGNORED_LABEL, Microbatch
from megabatch.engine import random_state
from megabatch.errors import LossContractError, MegabatchError, in_one_line
from megabatch.integrations.metric_means import GIVE, Count, Mean, own_entries

MAX_TRIED = 8  # samples of a trial
MAX_LOOKED_AT = 256  # samples of a rank among which they are chosen
MAX_NUMEL = 2**20  # of a parameter whose gradient is compared
MAX_COMPARED = 2**12  # elements of it
MAX_DEPTH = 5  # of objects whose attributes are put back
OTHERS = {"torch", "accelerate", "datasets", "megabatch"}  # whose objects a user's loss does not write to by itself
MAX_ENTRIES = 1000  # of a container whose entries are put back one by one
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


def choose(samples: Sequence[Any], known: set[Any], most: int = MAX_TRIED) -> list[Any]:
    """Samples that differ in class, length, number of targets or whatever else they hold; the most telling first.

    Args:
        known: What earlier samples had. Without anything new, nothing is chosen.
    """
    stride = max(1, len(samples) // MAX_LOOKED_AT)
    left = [(_features(sample), sample) for sample in samples[::stride]]
    seen, chosen = set(known), list[Any]()
    while left and len(chosen) < most:
        index = max(range(len(left)), key=lambda index: len(left[index][0] - seen))
        if not left[index][0] - seen and (not chosen or len(chosen) > 1):
            break
        features, sample = left.pop(index)
        seen |= features
        chosen.append(sample)
    return chosen


def features_of(samples: Iterable[Any]) -> set[Any]:
    """What tells these samples from others."""
    return {each for sample in samples for each in _features(sample)}


def _features(sample: Any) -> set[Any]:
    """By key: a number itself; of several their shape, how many are -100 or 0, and which they are, if few."""
    named = sample.items() if isinstance(sample, Mapping) else enumerate(sample if type(sample) is tuple else (sample,))
    found: set[Any] = set()
    for name, value in cast(Any, named):
        if isinstance(value, str | bytes):
            found.add((name, len(value)))
            continue
        try:
            numbers = torch.as_tensor(value).cpu()
        except Exception:  # of whatever a sample holds
            continue
        if numbers.ndim == 0:
            found.add((name, numbers.item()))
            continue
        found.add((name, "shape", tuple(numbers.shape)))
        if not numbers.is_floating_point() and numbers.ndim == 1:
            found.add((name, "targets", int((numbers != IGNORED_LABEL).sum())))
            found.add((name, "not 0", int((numbers != 0).sum())))
            if len(few := numbers.unique()) <= MAX_TRIED:
                found |= {(name, each) for each in few.tolist()}
    return found


def groupings(num_samples: int, size: int) -> list[tuple[int, ...]]:
    """Groups of at least two, of at most ``size``; each sample in two different ones where there are enough."""
    inorder, size = list(range(num_samples)), max(2, min(size, num_samples))
    dealt = [*inorder[::2], *inorder[1::2]]
    second = max(2, min(size, (num_samples + 1) // 2))
    groups = [order[start : start + each] for order, each in ((inorder, size), (dealt, second))
              for start in range(0, num_samples, each)]  # fmt: skip
    return list(dict.fromkeys(tuple(sorted(group)) for group in groups if len(group) > 1))


class NotFiniteError(LossContractError):
    """A gradient that is not finite, by which nothing can be told."""


@dataclass(frozen=True)
class Trial:
    """Samples of an update, and what is asked of them.

    Args:
        mean: The scalar loss of a model and a microbatch.
        count: What a microbatch's mean is over.
        size: Samples of a group, as a microbatch may have.
        one_row: Microbatches are of one sample, so a model or collator may take no two.
        tolerance: Relative error of a gradient.
    """

    model: nn.Module
    samples: Sequence[Any]
    collate: Callable[[list[Any]], Microbatch]
    prepare: Callable[[Microbatch], Microbatch]
    mean: Mean
    count: Count
    size: int
    one_row: bool
    tolerance: float

    def check_mean(self) -> None:
        """Raise `LossContractError` unless the mean of several samples follows from those of each alone.

        Gradients times counts are compared, of the small parameters, without dropout.
        """
        indices = range(len(self.samples))
        take, is_drawn = self._microbatches()
        alone = [take((index,)) for index in indices]
        counts = [self._count(each) for each in alone]
        if self._draws(alone[counts.index(max(counts))], max(counts)):
            is_drawn, take = True, self._cut_by_rows() or take
            alone = [take((index,)) for index in indices]
            counts = [self._count(each) for each in alone]
        sums = [self._sum(each, count) for each, count in zip(alone, counts, strict=True)]
        for group in groupings(len(self.samples), self.size):
            try:
                together = take(group)
                count = self._count(together)
                found = self._sum(together, count, rows=len(group) if is_drawn else 1)
            except LossContractError:
                if self.one_row:
                    return
                raise
            added = sum(counts[index] for index in group)
            if abs(count - added) > 1e-6 * added:
                if self.one_row:  # what the collator leaves out of several is never fed
                    return
                raise LossContractError(
                    f"count_targets() counts {count:g} in {len(group)} samples together and {added:g} in each alone; "
                    f"{GIVE}, or count what adds up"
                )
            self._compare(found, [sums[index] for index in group], count, is_drawn=is_drawn)

    def _draws(self, microbatch: Microbatch, count: float) -> bool:
        """Whether the loss draws random numbers. Raises where they cannot be drawn again."""
        first, again, other = (self._gradient(microbatch, seed) for seed in (0, 0, 1))
        if not count:
            return False
        if not first.isfinite().all():
            raise NotFiniteError(f"the gradient of compute_loss is not finite for a sample with {count:g} targets")
        if _distance(first, again) > self.tolerance / 10:
            raise LossContractError(
                "compute_loss gives two gradients for one sample and one seed, so it draws random numbers that cannot "
                f"be drawn again and a mean cannot be told; {GIVE}, or check_loss=False"
            )
        return _distance(first, other) > self.tolerance / 10

    def check_same(self, total: Mean) -> None:
        """Raise `LossContractError` unless ``total`` has the gradient of the mean times the count."""
        take, _ = self._microbatches()
        alone = [(index,) for index in range(len(self.samples))]
        for group in alone if self.one_row else groupings(len(self.samples), self.size) or alone:
            microbatch = take(group)
            count = self._count(microbatch)
            expected, found = self._sum(microbatch, count), self._gradient(microbatch, 0, total)
            error = _distance(found, expected) if count else 0.0
            if error == float("inf"):
                raise NotFiniteError(f"the gradient of the model's loss is not finite for {count:g} targets")
            if error > self.tolerance:
                raise LossContractError(
                    f"the model's own loss is not the mean over next tokens: its gradient is off by {error:.2g}; {GIVE}"
                )

    def _compare(self, found: Tensor, parts: list[Tensor], count: float, *, is_drawn: bool) -> None:
        error = _distance(found, torch.stack(parts).sum(0), *parts)
        if error <= self.tolerance:
            return
        if error == float("inf"):
            raise NotFiniteError(
                f"the gradient of compute_loss is not finite for {len(parts)} samples with {count:g} targets"
            )
        drawn, instead = "", "say in count_targets() what it is a mean over"
        if is_drawn:
            drawn, instead = ", as far as its random numbers let it be told", "check_loss=False if it is one"
        raise LossContractError(
            f"the loss of {len(parts)} samples is no mean over their {count:g} targets{drawn}: its gradient is off by "
            f"{error:.2g}; {GIVE}, or {instead}"
        )

    def _sum(self, microbatch: Microbatch, count: float, rows: int = 1) -> Tensor:
        """The gradient of the mean, times the count: called for every microbatch, since a loss may ask other ranks."""
        found = self._gradient(microbatch, 0, rows=rows)
        return found * count if count else torch.zeros_like(found)

    def _count(self, microbatch: Microbatch) -> float:
        with _blamed("count_targets()"):
            return float(self.count(microbatch))

    def _microbatches(self) -> tuple[Callable[[Sequence[int]], Microbatch], bool]:
        """What makes a microbatch of some samples, and whether random numbers of the collator differ between two.

        Samples are collated apart, as they are when they are cut, unless the collator draws random numbers.
        """
        if all(_same(self._collated((index,)), self._collated((index,), 1)) for index in range(len(self.samples))):
            return lambda indices: self._prepared(self._collated(indices)), False
        by_rows = self._cut_by_rows()
        return by_rows or (lambda indices: self._prepared(self._collated(indices))), by_rows is None

    def _cut_by_rows(self) -> Callable[[Sequence[int]], Microbatch] | None:
        """Cuts a microbatch of all samples by rows, so that nothing is drawn or padded anew; None where it has none."""
        whole: Any = None
        with contextlib.suppress(LossContractError):  # a collator may take only one
            whole = self._collated(range(len(self.samples)))
        if not isinstance(whole, Mapping) or _rows_of(cast(Any, whole)) != len(self.samples):
            return None
        return lambda indices: self._prepared(_cut(cast(Any, whole), indices))

    def _collated(self, indices: Sequence[int], seed: int = 0) -> Microbatch:
        with _blamed(f"the data collator, given {len(indices)} of the samples,"), _seeded(self._device, seed):
            return self.collate([copy.copy(self.samples[index]) for index in indices])

    def _prepared(self, microbatch: Microbatch) -> Microbatch:
        with _blamed("_prepare_inputs()"), _seeded(self._device, 0):
            return self.prepare(microbatch)

    def _gradient(self, microbatch: Microbatch, seed: int, scalar: Mean | None = None, rows: int = 1) -> Tensor:
        """Of some parameters, as one vector in float64 on the CPU."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        small = [each for each in trained if each.numel() <= MAX_NUMEL] or [min(trained, key=Tensor.numel)]
        alike = _DrawnAlike(rows, self._device) if rows > 1 else contextlib.nullcontext()
        with _blamed("compute_loss, tried on samples of the update,"), _seeded(self._device, seed):
            with alike:
                loss = (scalar or self.mean)(self.model, own_entries(microbatch))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                raise LossContractError(f"compute_loss gives {kind}; expected a scalar tensor")
            found: Any = torch.autograd.grad(loss, small, allow_unused=True)
        return torch.cat([_some(each, like) for each, like in zip(found, small, strict=True)])

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _some(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """At most so many elements, evenly spread; zeros where the loss does not come to the parameter."""
    stride = max(1, parameter.numel() // MAX_COMPARED)
    size = len(range(0, parameter.numel(), stride))
    if gradient is None:
        return torch.zeros(size, dtype=torch.float64)
    return gradient.detach().to_dense().flatten()[::stride].to("cpu", torch.float64)


def _distance(found: Tensor, expected: Tensor, *parts: Tensor) -> float:
    """Relative to the largest of all; infinite where a number is not finite."""
    scale = max(float(each.norm()) for each in (found, expected, *parts))
    error = float((found - expected).norm())
    return error / (scale or 1.0) if np.isfinite(error) and np.isfinite(scale) else float("inf")


class _DrawnAlike(TorchDispatchMode):
    """Lets each row of a microbatch draw what it would draw alone."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__()
        self._num_rows, self._of = num_rows, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or len(func._schema.returns) != 1:
            return func(*args, **kwargs)
        if not any(map(self._has_rows, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        before, drawn = random_state.note(self._of), list[Tensor]()
        for row in range(self._num_rows):
            random_state.put_back(before)
            cut = partial(self._row, row=row)
            drawn.append(func(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()}))
        return args[0] if func._schema.is_mutable else torch.cat(drawn)

    def _has_rows(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.ndim > 0 and len(value) == self._num_rows
        return isinstance(value, list) and value[:1] == [self._num_rows]  # a size

    def _row(self, value: Any, row: int) -> Any:
        if not self._has_rows(value):
            return value
        return value[row : row + 1] if isinstance(value, Tensor) else [1, *value[1:]]


@contextlib.contextmanager
def _blamed(whose: str) -> Generator[None]:
    """Say whose error it is."""
    try:
        yield
    except MegabatchError:
        raise
    except Exception as error:
        instead = "; check_loss=False leaves the trial out" if isinstance(error, torch.OutOfMemoryError) else ""
        raise LossContractError(f"{whose} failed: {in_one_line(error)}{instead}") from error


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Generator[None]:
    """The generators of torch, numpy and Python begin with a seed, and stand afterwards where they stood before."""
    state, of_python, of_numpy = random_state.note(device), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random_state.put_back(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _rows_of(microbatch: Mapping[str, Any]) -> int | None:
    sizes = {len(each) if each.ndim else None for each in microbatch.values() if isinstance(each, Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def _cut(microbatch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    rows = list(indices)
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in microbatch.items()}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in cast(Any, one))
    if isinstance(one, list | tuple):
        return len(cast(Any, one)) == len(other) and all(map(_same, cast(Any, one), other))
    if isinstance(one, Tensor | np.ndarray):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        return one.shape == other.shape and bool(torch.allclose(one.double(), other.double(), 0, 0, equal_nan=True))
    return not isinstance(one, int | float | str | bytes | bool) or one == other


@contextlib.contextmanager
def without_traces(model: nn.Module, remembered: "Remembered") -> Generator[None]:
    """In eval mode; what is written to the model's modules, and to what is remembered, is put back."""
    kept = [ModuleSnapshot(module) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        remembered.put_back()
        for each in kept:
            each.put_back()


class Remembered:
    """What plain objects hold: their attributes, and the entries of containers and tensors among them.

    Args:
        leave: Objects that are not looked into.
    """

    def __init__(self, *objects: Any, leave: Iterable[Any] = ()) -> None:
        self._undo: list[Callable[[], Any]] = []
        self._seen = {id(each): each for each in leave}
        for each in objects:
            self._note(vars(each), MAX_DEPTH)

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def _note(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._seen or isinstance(value, LEFT_ALONE):
            return
        self._seen[id(value)] = value
        inner: Iterable[Any] = ()
        if isinstance(value, Tensor):
            if not value.requires_grad and value.numel() <= MAX_NUMEL:
                self._undo.append(partial(_fill, value, value.detach().clone()))
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
            self._undo.append(partial(_refill, value, value.extend, list(cast(Any, value))))
            inner = value
        elif isinstance(value, set):
            self._undo.append(partial(_refill, value, value.update, set(cast(Any, value))))
        elif isinstance(value, tuple):
            inner = value
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in OTHERS:
            self._undo.append(partial(_put_back_entries, vars(value), dict(vars(value))))
            inner = vars(value).values()
        if len(cast(Any, inner)) <= MAX_ENTRIES:
            for each in list(inner):
                self._note(each, depth - 1)


def _put_back_entries(found: dict[Any, Any], entries: dict[Any, Any]) -> None:
    """Only what has changed is touched, since other threads may read."""
    if [*found] != [*entries]:
        for name in found.keys() - entries.keys():
            del found[name]
    for name, value in entries.items():
        if name not in found or found[name] is not value:
            found[name] = value


def _refill(container: Any, fill: Callable[[Any], Any], entries: Any) -> None:
    if len(container) != len(entries) or any(one is not other for one, other in zip(container, entries, strict=True)):
        container.clear()
        fill(entries)


@torch.no_grad()
def _fill(tensor: Tensor, numbers: Tensor) -> None:
    if tensor.shape != numbers.shape:
        tensor.resize_(numbers.shape)
    tensor.copy_(numbers)
