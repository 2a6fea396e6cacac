"""Counts for the mean losses of other libraries, and a trial that each loss is the mean over its count."""

import contextlib
import copy
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from megabatch.core.samples import Length, Microbatch
from megabatch.errors import LossContractError, MegabatchError, in_one_line
from megabatch.inspection import random_state
from megabatch.inspection.mixing_causes import find_mixing_causes
from megabatch.torch_private.classes import is_fsdp2
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.operations import TorchDispatchMode, pytree, schema_of

Mean = Callable[[Any, Any], Any]  # a scalar tensor, of a model and a microbatch
Count = Callable[[Any], Any]  # what a microbatch's mean is over
GIVE = "give loss_fn=, which returns (total, weight), or a JointLoss where samples are each other's negatives"


def copy_mapping(microbatch: Microbatch) -> Microbatch:
    """Return a shallow copy of a mapping, since a loss may pop the labels."""
    return copy.copy(cast(Any, microbatch)) if isinstance(microbatch, Mapping) else microbatch


def count_labels(microbatch: Microbatch, *, shifted: bool) -> Tensor:
    """Count the labels that are not -100, or the rows if there are no labels or one number for each row.

    Args:
        microbatch: A mapping of tensors, or another tree of them.
        shifted: The model is causal and never uses the label at position 0.
    """
    named: Mapping[str, Any] = cast(Any, microbatch) if isinstance(microbatch, Mapping) else {}
    labels: Any = named.get("shift_labels")
    if labels is None and (labels := named.get("labels")) is not None and shifted and labels.ndim > 1:
        labels = labels[..., 1:]
    if labels is None:
        return count_rows(microbatch)
    if labels.is_floating_point() and labels.numel() == len(labels):
        return torch.tensor(len(labels))  # regression targets, for which -100 is a value
    return (labels != IGNORED_LABEL).sum()


def count_rows(microbatch: Microbatch) -> Tensor:
    """Return the size of dim 0 of the first tensor."""
    leaves = microbatch.values() if isinstance(microbatch, Mapping) else pytree.tree_leaves(microbatch)
    for leaf in cast(Any, leaves):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return torch.tensor(len(leaf))
    raise LossContractError(
        f"a microbatch is a {type(microbatch).__name__} without tensors, so what a mean is over cannot be counted; "
        f"override count_targets(), or {GIVE}"
    )


TOKENS = ("input_ids", "inputs_embeds")
PACKED_KEYS = ("cu_seq", "seq_idx")  # how keys begin that say where the samples of a row end


def is_packed(microbatch: Microbatch, num_samples: int) -> bool:
    """Return True unless each sample of a microbatch of tokens has a row of its own, as far as the tensors tell."""
    if num_samples < 2 or not isinstance(microbatch, Mapping):
        return False
    named = cast(Mapping[str, Any], microbatch)
    tokens = next((named[name] for name in TOKENS if isinstance(named.get(name), Tensor)), None)
    if tokens is None:
        return False
    num_rows = len(tokens) if tokens.ndim > 1 else 1
    # A pair of texts has two rows. Samples that are joined and cut again have any number.
    if num_rows % num_samples or any(str(name).startswith(PACKED_KEYS) for name in named):
        return True
    positions: Any = named.get("position_ids")
    if not isinstance(positions, Tensor) or positions.shape[-1] < 2:
        return False
    rises = positions[..., 1:] > positions[..., :-1]  # [..., T - 1]
    begins = rises & ~nn.functional.pad(rises[..., :-1], (1, 0))  # padding does not rise
    return bool((begins.sum(-1) > 1).any())


MAX_TRIED = 8  # samples in a trial
MAX_NUMEL = 2**20  # largest parameter whose gradient is compared
MAX_COMPARED = 2**12  # elements of such a gradient


def choose_samples(samples: Iterable[Any], length: Length) -> list[Any]:
    """Choose up to MAX_TRIED samples, evenly by length, the shortest and the longest among them."""
    in_order = sorted(samples, key=length)
    step = max(1.0, (len(in_order) - 1) / (MAX_TRIED - 1))
    return [in_order[round(index * step)] for index in range(min(len(in_order), MAX_TRIED))]


def make_groups(num_samples: int, size: int) -> list[tuple[int, ...]]:
    """Return groups of 2 to ``size`` samples, each sample in two different groups if there are enough."""
    in_order, size = list(range(num_samples)), max(2, min(size, num_samples))
    alternating = [*in_order[::2], *in_order[1::2]]
    second = max(2, min(size, (num_samples + 1) // 2))
    groups = [order[start : start + group_size] for order, group_size in ((in_order, size), (alternating, second))
              for start in range(0, num_samples, group_size)]  # fmt: skip
    return list(dict.fromkeys(tuple(sorted(group)) for group in groups if len(group) > 1))


class NotFiniteError(LossContractError):
    """A gradient that is not finite, of a model that has diverged: the trial has no result."""


@dataclass(frozen=True)
class LossTrial:
    """A trial of a mean loss on samples of an update.

    Args:
        model: The unwrapped model, in eval mode.
        samples: Uncollated samples.
        collate: Makes a microbatch of samples.
        prepare: Moves a microbatch to the device.
        mean: The scalar loss of a model and a microbatch.
        count: Counts the targets of a microbatch.
        size: Samples of a group: as many as a microbatch may have.
        one_row: Microbatches have one sample, so model and collator need not take two.
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
        """Raise `LossContractError` unless the mean of several samples follows from the mean of each alone.

        This compares gradients times counts, of small parameters, without dropout.
        """
        try:
            self._check_sums()
        except NotFiniteError as error:
            take, _ = self._microbatches()
            bad = {index for index in range(len(self.samples)) if not self._is_finite_alone(take((index,)))}
            for group in [] if self.one_row else make_groups(len(self.samples), self.size):
                if bad.isdisjoint(group):
                    continue
                if self._count(together := take(group)) and self._gradient(together, 0).isfinite().all():
                    raise LossContractError(f"{error}, and is finite for several samples together; {GIVE}") from None
            raise

    def _is_finite_alone(self, microbatch: Microbatch) -> bool:
        return not self._count(microbatch) or bool(self._gradient(microbatch, 0).isfinite().all())

    def _check_sums(self) -> None:
        indices = range(len(self.samples))
        take, is_drawn = self._microbatches()
        alone = [take((index,)) for index in indices]
        counts = [self._count(microbatch) for microbatch in alone]
        if self._is_random(alone[counts.index(max(counts))], max(counts)):
            is_drawn, take = True, self._cut_by_rows() or take
            alone = [take((index,)) for index in indices]
            counts = [self._count(microbatch) for microbatch in alone]
        sums = [self._scaled_gradient(microbatch, count) for microbatch, count in zip(alone, counts, strict=True)]
        for group in make_groups(len(self.samples), self.size):
            try:
                together = take(group)
                count = self._count(together)
                gradient = self._scaled_gradient(together, count, rows=len(group) if is_drawn else 1)
            except LossContractError:
                if self.one_row:
                    return
                raise
            added = sum(counts[index] for index in group)
            if abs(count - added) > 1e-6 * added:
                if self.one_row:  # the model never sees what the collator drops from several samples
                    return
                raise LossContractError(
                    f"count_targets() counts {count:g} in {len(group)} samples together and {added:g} in each alone; "
                    f"{GIVE}, or count what adds up"
                )
            self._compare(gradient, [sums[index] for index in group], count, is_drawn=is_drawn)

    def _is_random(self, microbatch: Microbatch, count: float) -> bool:
        """Return true if the loss draws random numbers. Raise if a seed does not repeat them."""
        first, again, other_seed = (self._gradient(microbatch, seed) for seed in (0, 0, 1))
        if not count:
            return False
        if not first.isfinite().all():
            raise NotFiniteError(f"the gradient of compute_loss is not finite for a sample with {count:g} targets")
        if _distance(first, again) > self.tolerance / 10:
            raise LossContractError(
                "compute_loss gives two gradients for one sample and one seed, so it draws random numbers that cannot "
                f"be drawn again and a mean cannot be told; {GIVE}, or check_loss=False"
            )
        return _distance(first, other_seed) > self.tolerance / 10

    def check_same(self, total: Mean) -> None:
        """Raise `LossContractError` unless ``total`` has the gradient of the mean times the count."""
        take, _ = self._microbatches()
        alone = [(index,) for index in range(len(self.samples))]
        for group in alone if self.one_row else make_groups(len(self.samples), self.size) or alone:
            microbatch = take(group)
            count = self._count(microbatch)
            expected, gradient = self._scaled_gradient(microbatch, count), self._gradient(microbatch, 0, total)
            error = _distance(gradient, expected) if count else 0.0
            if error == float("inf") and not gradient.isfinite().all():
                raise NotFiniteError(f"the gradient of the model's loss is not finite for {count:g} targets")
            if error > self.tolerance:
                raise LossContractError(
                    f"the model's own loss is not the mean over next tokens: its gradient is off by {error:.2g}; {GIVE}"
                )

    def check_rows(self, total: Mean) -> None:
        """Raise `LossContractError` unless ``total`` of all samples has the sum of the gradients of each alone.

        A loss that draws random numbers tells nothing.
        """
        take, is_drawn = self._microbatches()
        alone = [take((index,)) for index in range(len(self.samples))]
        if is_drawn or _distance(*(self._gradient(alone[-1], seed, total) for seed in (0, 1))) > self.tolerance / 10:
            return
        parts = [self._gradient(microbatch, 0, total) for microbatch in alone]
        together = self._gradient(take(range(len(self.samples))), 0, total)
        error = _distance(together, torch.stack(parts).sum(0), *parts)
        if error == float("inf"):
            raise NotFiniteError(f"the gradient of {len(parts)} samples in one row is not finite")
        if error > self.tolerance:
            raise LossContractError(
                f"the data collator lays {len(parts)} samples in fewer rows, where they change each other's gradient: "
                f"it is off by {error:.2g} from the sum of each sample's own; give a data_collator that pads, or an "
                "attention that goes by position_ids (with use_cache = False)"
            )

    def _compare(self, gradient: Tensor, parts: list[Tensor], count: float, *, is_drawn: bool) -> None:
        error = _distance(gradient, torch.stack(parts).sum(0), *parts)
        if error <= self.tolerance:
            return
        if error == float("inf"):
            raise NotFiniteError(
                f"the gradient of compute_loss is not finite for {len(parts)} samples with {count:g} targets"
            )
        drawn, instead = "", "say in count_targets() what it is a mean over"
        if cause := next((cause for cause, _ in find_mixing_causes(self.model)), None):
            raise LossContractError(
                f"the loss of {len(parts)} samples is no mean over their {count:g} targets: its gradient is off by "
                f"{error:.2g}, for {cause}, so that padding changes it; set per_device_train_batch_size=1, or give "
                "samples of one length"
            )
        if is_drawn:
            drawn, instead = ", as far as its random numbers let it be told", "check_loss=False if it is one"
        raise LossContractError(
            f"the loss of {len(parts)} samples is no mean over their {count:g} targets{drawn}: its gradient is off by "
            f"{error:.2g}; {GIVE}, or {instead}"
        )

    def _scaled_gradient(self, microbatch: Microbatch, count: float, rows: int = 1) -> Tensor:
        """Return the gradient of the mean, times the count; even for a count of 0, since a loss may be collective."""
        gradient = self._gradient(microbatch, 0, rows=rows)
        return gradient * count if count else torch.zeros_like(gradient)

    def _count(self, microbatch: Microbatch) -> float:
        with _naming_source("count_targets()"):
            return float(self.count(microbatch))

    def _microbatches(self) -> tuple[Callable[[Sequence[int]], Microbatch], bool]:
        """Return a function that makes a microbatch of some samples, and true if its random numbers differ per call.

        Each microbatch is collated by itself, as in training, unless the collator draws random numbers.
        """
        if all(_same(self._collated((index,)), self._collated((index,), 1)) for index in range(len(self.samples))):
            return lambda indices: self._prepared(self._collated(indices)), False
        by_rows = self._cut_by_rows()
        return by_rows or (lambda indices: self._prepared(self._collated(indices))), by_rows is None

    def _cut_by_rows(self) -> Callable[[Sequence[int]], Microbatch] | None:
        """Return a function that slices rows of one microbatch, so that nothing is redrawn; None without rows."""
        rows_together: Any = None
        with contextlib.suppress(LossContractError):  # a collator may take only one sample
            rows_together = self._collated(range(len(self.samples)))
        if not isinstance(rows_together, Mapping) or _rows_of(cast(Any, rows_together)) != len(self.samples):
            return None
        return lambda indices: self._prepared(_cut(cast(Any, rows_together), indices))

    def _collated(self, indices: Sequence[int], seed: int = 0) -> Microbatch:
        with _naming_source(f"the data collator, given {len(indices)} of the samples,"), _seeded(self._device, seed):
            return self.collate([copy.copy(self.samples[index]) for index in indices])

    def _prepared(self, microbatch: Microbatch) -> Microbatch:
        with _naming_source("_prepare_inputs()"), _seeded(self._device, 0):
            return self.prepare(microbatch)

    def _gradient(self, microbatch: Microbatch, seed: int, scalar: Mean | None = None, rows: int = 1) -> Tensor:
        """Return the gradient of the small parameters as one float64 vector on the CPU."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        small = [parameter for parameter in trained if parameter.numel() <= MAX_NUMEL]
        small = small or [min(trained, key=Tensor.numel)]
        draws = _RowwiseRandom(rows, self._device) if rows > 1 else contextlib.nullcontext()
        with _naming_source("compute_loss, tried on samples of the update,"), _seeded(self._device, seed):
            with draws:
                loss = (scalar or self.mean)(self.model, copy_mapping(microbatch))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
                raise LossContractError(f"compute_loss gives {kind}; expected a scalar tensor")
            gradients = _differentiate(loss, self.model, small)
        return torch.cat([_sample_gradient(gradient, like) for gradient, like in zip(gradients, small, strict=True)])

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


def _differentiate(loss: Tensor, model: nn.Module, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    if not any(map(is_fsdp2, model.modules())):
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    loss.backward()  # autograd.grad does not reach FSDP2's parameters: its hooks fill their grad
    gradients = [
        None if parameter.grad is None else cast(Any, parameter.grad).full_tensor() for parameter in parameters
    ]
    model.zero_grad()
    return gradients


def _sample_gradient(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """Return up to MAX_COMPARED elements, evenly spaced; zeros if the loss does not reach the parameter."""
    stride = max(1, parameter.numel() // MAX_COMPARED)
    size = len(range(0, parameter.numel(), stride))
    if gradient is None:
        return torch.zeros(size, dtype=torch.float64)
    return gradient.detach().to_dense().flatten()[::stride].to("cpu", torch.float64)


def _distance(gradient: Tensor, expected: Tensor, *parts: Tensor) -> float:
    """Return the difference relative to the largest norm; infinite if a number is not finite."""
    scale = max(float(vector.norm()) for vector in (gradient, expected, *parts))
    error = float((gradient - expected).norm())
    return error / (scale or 1.0) if np.isfinite(error) and np.isfinite(scale) else float("inf")


class _RowwiseRandom(TorchDispatchMode):
    """Give each row of a microbatch the random numbers that it would draw alone."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__()
        self._num_rows, self._device = num_rows, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or len(schema_of(func).returns) != 1:
            return func(*args, **kwargs)
        if not any(map(self._has_rows, (*args, *kwargs.values()))):
            return func(*args, **kwargs)
        before, drawn = random_state.note(self._device), list[Tensor]()
        for row in range(self._num_rows):
            random_state.put_back(before)
            cut = partial(self._row, row=row)
            drawn.append(func(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()}))
        return args[0] if schema_of(func).is_mutable else torch.cat(drawn)

    def _has_rows(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.ndim > 0 and len(value) == self._num_rows
        return isinstance(value, list) and value[:1] == [self._num_rows]  # the sizes argument of an operation

    def _row(self, value: Any, row: int) -> Any:
        if not self._has_rows(value):
            return value
        return value[row : row + 1] if isinstance(value, Tensor) else [1, *value[1:]]


@contextlib.contextmanager
def _naming_source(source: str) -> Generator[None]:
    """Name the source of an error raised inside."""
    try:
        yield
    except MegabatchError:
        raise
    except Exception as error:
        instead = "; check_loss=False leaves the trial out" if isinstance(error, torch.OutOfMemoryError) else ""
        raise LossContractError(f"{source} failed: {in_one_line(error)}{instead}") from error


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Generator[None]:
    """Seed the generators of torch, numpy and Python inside, and restore them afterwards."""
    put_back = note_generators(device)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        put_back()


def note_generators(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the present states of the generators of torch, numpy and Python."""
    state, of_python, of_numpy = random_state.note(device), random.getstate(), np.random.get_state()

    def put_back() -> None:
        random_state.put_back(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    return put_back


def _rows_of(microbatch: Mapping[str, Any]) -> int | None:
    sizes = {len(tensor) if tensor.ndim else None for tensor in microbatch.values() if isinstance(tensor, Tensor)}
    return sizes.pop() if len(sizes) == 1 else None


def _cut(microbatch: Mapping[str, Any], indices: Sequence[int]) -> dict[str, Any]:
    rows = list(indices)
    return {name: value[rows] if isinstance(value, Tensor) else value for name, value in microbatch.items()}


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in cast(Any, first))
    if isinstance(first, list | tuple):
        return len(cast(Any, first)) == len(second) and all(map(_same, cast(Any, first), second))
    if isinstance(first, Tensor | np.ndarray):
        first, second = torch.as_tensor(first), torch.as_tensor(second)
        if first.shape != second.shape:
            return False
        return bool(torch.allclose(first.double(), second.double(), 0, 0, equal_nan=True))
    return not isinstance(first, int | float | str | bytes | bool) or first == second
