"""The metrics of TRL's trainers, over the whole update."""

import contextlib
import inspect
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.errors import MegabatchError

try:
    from accelerate.utils import gather_object
except ModuleNotFoundError:
    raise MegabatchError(
        "megabatch.integrations.transformers needs accelerate, which is not installed: pip install accelerate"
    ) from None


def has_metrics(trainer: Any) -> bool:
    """Return True for a trainer of TRL, which counts tokens and gathers metrics in its loss."""
    return hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens")


class UpdateMetrics:
    """Makes the metrics that a TRL trainer logs those of whole updates, whatever their microbatches are.

    The loss of such a trainer gathers or adds sums, counts, rows or means over ranks, and appends quotients of them to
    ``trainer._metrics["train"]``. Here each gather returns what its line of code has gathered in all microbatches of
    the update so far, and what an earlier microbatch appended is dropped. The last microbatch then appends the metrics
    of the update. Means are weighed by the weight of their microbatch, and dummy microbatches add nothing.

    Args:
        trainer: A trainer of TRL.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.open_update()

    def open_update(self) -> None:
        """Keep the metrics of earlier updates, and begin those of the next."""
        self._gathered: dict[object, list[tuple[Tensor, float]]] = {}  # values and their weights, by line of code
        self._earlier = {name: list(values) for name, values in self._trainer._metrics["train"].items()}
        self._num_tokens = self._trainer._total_train_tokens

    @contextlib.contextmanager
    def gathering(self, weight: float | None) -> Generator[None]:
        """Surround the loss of a microbatch. ``weight`` is None for a dummy microbatch."""
        accelerator, metrics = self._trainer.accelerator, self._trainer._metrics["train"]
        metrics.clear()
        metrics.update({name: list(values) for name, values in self._earlier.items()})
        self._trainer._total_train_tokens = self._num_tokens

        def add(values: Tensor) -> list[tuple[Tensor, float]]:
            records = self._gathered.setdefault(_line_of(cast(Any, inspect.currentframe()).f_back.f_back), [])
            local_records = [] if weight is None else [(values.detach().cpu(), weight)]
            records += cast(list[tuple[Tensor, float]], gather_object(local_records))
            return records

        def gather(values: Tensor, *_: Any, **__: Any) -> Tensor:
            return _join(add(values), values).to(values.device)

        def reduce(values: Tensor, reduction: str = "mean", scale: float = 1.0) -> Tensor:
            if reduction != "sum":
                return type(accelerator).reduce(accelerator, values, reduction, scale)
            return sum((total for total, _ in add(values)), torch.zeros_like(values).cpu()).to(values.device) * scale

        accelerator.gather = accelerator.gather_for_metrics = gather
        accelerator.reduce = reduce
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics, accelerator.reduce


def _line_of(frame: Any) -> object:
    """Return the line of code that gathers, with its callers in the same file: a helper gathers several metrics."""
    callers, file = [], frame.f_code.co_filename
    while frame is not None and frame.f_code.co_filename == file:
        callers.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(callers)


class _Means(Tensor):
    """Scalars of several microbatches, whose mean is weighed."""

    weights: Tensor

    def mean(self, *args: Any, **named: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        values = self.as_subclass(Tensor)
        if args or named or not hasattr(self, "weights"):
            return values.mean(*args, **named)
        return torch.where(self.weights > 0, values * self.weights, 0.0).sum() / self.weights.sum()


def _join(records: list[tuple[Tensor, float]], like: Tensor) -> Tensor:
    """Return the values of all records in dim 0. Without a record, return an empty tensor."""
    if not records:
        return like.new_empty((0, *like.shape[1:]))
    values = [value for value, _ in records]
    if values[0].ndim:
        return torch.cat(values)
    means = torch.stack(values).as_subclass(_Means)
    means.weights = torch.tensor([weight for _, weight in records])
    return means
