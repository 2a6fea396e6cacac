"""Batches that a thread prepares before their calls; loaded only by `GradientAccumulator.prepare`."""

import operator
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from megabatch.batching.samples import Batch
from megabatch.torch_private import count_writes

MAX_BATCHES = 2  # that are kept
Settings = tuple[Any, Any]  # the planner and the hooks of the loss
IS_CPU = operator.attrgetter("is_cpu")  # of every tensor of a batch


class EarlyPreparations:
    """The newest batches that threads prepare before their calls."""

    def __init__(self) -> None:
        self.batches: list[EarlyPreparation] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "EarlyPreparations":
        return EarlyPreparations()  # threads have no copy

    def begin(self, batch: Batch, prepare: Callable[[Batch], Any], settings: "Settings") -> None:
        """Begin ``prepare(batch)`` in a thread. Do nothing for samples whose changes would not be seen."""
        snapshot = BatchSnapshot.of(batch)
        if snapshot is None or not all(map(IS_CPU, snapshot.tensors)):  # a device's stream is another one in the thread
            return
        early = EarlyPreparation(batch, prepare, settings, snapshot)
        self.batches = [*self.batches[1 - MAX_BATCHES :], early]

    def take(self, batch: Batch, settings: "Settings") -> Any:
        """Return what was prepared for a batch. None if there is nothing for these samples as they are now."""
        snapshot = BatchSnapshot.of(batch) if self.batches else None
        if snapshot is not None:
            for early in self.batches:
                if early.is_of(snapshot, settings):
                    self.batches.remove(early)
                    prepared = early.result()
                    return prepared if prepared is not None and _weighs_alike(prepared, settings[1].weigh) else None
        return None


class BatchSnapshot(NamedTuple):
    """The tensors of a batch in memory, their names, the number of writes to each, and where its values are."""

    sizes: list[int] | None  # tensors of each sample; None: the batch is a mapping
    names: list[str]
    tensors: list[Tensor]  # references keep them alive, so that their identity cannot be reused
    writes: list[int]
    addresses: list[int]  # a list of its own: thousands of pairs would cost as much as the rest

    @classmethod
    def of(cls, batch: Batch) -> "BatchSnapshot | None":
        """Take a snapshot. Return None for samples that are not dicts of tensors, whose changes would not be seen."""
        samples: Any = [batch] if isinstance(batch, Mapping) else batch
        if not isinstance(samples, list | tuple):
            return None
        try:
            if not {dict}.issuperset(map(type, samples)):  # a class of the user's may answer otherwise each time
                return None
            tensors: list[Tensor] = list(chain.from_iterable(map(dict.values, samples)))
            writes, addresses = list(map(count_writes, tensors)), list(map(Tensor.data_ptr, tensors))
        except (AttributeError, RuntimeError, TypeError):  # no tensors, tensors of inference mode, odd classes
            return None
        sizes = None if samples is not batch else list(map(len, samples))
        return cls(sizes, list(chain.from_iterable(samples)), tensors, writes, addresses)

    def same_as(self, other: "BatchSnapshot") -> bool:
        """Return True if both have the same tensors in the same order, and none was written to in between."""
        same = (self.sizes, self.names, self.writes, self.addresses) == (
            other.sizes, other.names, other.writes, other.addresses,
        )  # fmt: skip
        return same and all(map(operator.is_, self.tensors, other.tensors))


class EarlyPreparation:
    """A batch that a thread prepares. The thread ends with its work."""

    def __init__(
        self, batch: Batch, prepare: Callable[[Batch], Any], settings: Settings, snapshot: BatchSnapshot
    ) -> None:
        self._settings, self._snapshot = settings, snapshot
        # The caller may put other tensors into its dicts meanwhile, and the former ones back before the call.
        batch = dict(batch) if isinstance(batch, Mapping) else list(map(dict.copy, batch))
        thread = ThreadPoolExecutor(1, "megabatch-prepare")
        self._prepared: Future[Any] = thread.submit(prepare, batch)
        thread.shutdown(wait=False)

    def is_of(self, snapshot: BatchSnapshot, settings: Settings) -> bool:
        """Return True if this is what a call would prepare."""
        return settings == self._settings and snapshot.same_as(self._snapshot)

    def result(self) -> Any:
        """Wait for the thread. Return None if it failed: the call finds the same fault, and tells the other ranks."""
        return None if self._prepared.exception() is not None else self._prepared.result()


def _weighs_alike(prepared: Any, weigh: Callable[[Any], Any] | None) -> bool:
    """Return True if every microbatch has its weight still: ``weigh`` may read what has changed since."""
    if weigh is None or not prepared.collated:
        return True
    for microbatch, weights in zip(prepared.collated, prepared.weights, strict=True):
        now = weigh(microbatch)
        if [float(each) for each in (now.values() if isinstance(now, Mapping) else [now])] != list(weights.values()):
            return False
    return True
