"""Batches that a thread prepares before their calls, see `GradientAccumulator.prepare`."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import Any, cast

from torch import Tensor

from megabatch.core.call import PreparedBatch
from megabatch.core.contract import counted_weights, is_own
from megabatch.core.samples import Batch
from megabatch.torch_private.autograd import count_writes

Settings = tuple[Any, Any, Any]  # the planner, the hooks of the loss, and a plan


class EarlyPreparation:
    """The preparation of a batch in a thread, which ends with its work."""

    def __init__(self, tensors: list[Tensor], prepare: Callable[[], Any], settings: Settings) -> None:
        self._tensors, self._writes = tensors, list(map(count_writes, tensors))
        self._settings = settings
        thread = ThreadPoolExecutor(1, "megabatch-prepare")
        self._result: Future[Any] | None = thread.submit(prepare)
        thread.shutdown(wait=False)

    def take(self, settings: Settings) -> Any:
        """Wait for the thread and return its result, once.

        Return None by other settings, after a write to a tensor, where ``weigh`` now counts other weights, and if the
        thread has failed: the call then prepares the samples itself, finds the same fault, and tells the other ranks.
        """
        result, self._result = self._result, None
        if result is None or settings != self._settings or self._writes != list(map(count_writes, self._tensors)):
            return None
        if result.exception() is not None:
            return None
        prepared, hooks = result.result(), settings[1]
        return prepared if _weighs_as_before(hooks.weigh, prepared) else None


def _weighs_as_before(weigh: Any, prepared: PreparedBatch) -> bool:
    """Return True if microbatches have their weights still: a user's ``weigh`` may read what has changed since."""
    if weigh is None or is_own(weigh) or not prepared.collated:
        return True
    try:
        return list(prepared.weights) == [counted_weights(weigh(microbatch)) for microbatch in prepared.collated]
    except Exception:
        # The call then weighs them itself, and tells the other ranks about the error.
        return False


class EarlySamples(tuple[Any, ...]):
    """A list of samples that a thread prepares. Nobody can add a sample or take one away."""

    preparation: EarlyPreparation


class EarlyRows(Mapping[str, Any]):
    """A mapping of tensors that a thread prepares. Nobody can put other tensors into it."""

    preparation: EarlyPreparation

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self._rows = dict(rows)

    def __getitem__(self, name: str) -> Any:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def prepare_early(batch: Batch, prepare: Callable[[Batch], Any], settings: Settings) -> Batch:
    """Begin ``prepare(batch)`` in a thread. Return a batch of the same samples, for the call that takes the result.

    Return the batch itself if its samples are not dicts of tensors on the CPU. A class of the user's may be another
    in each call, and a device's stream is another one in the thread.
    """
    samples: Any = [batch] if isinstance(batch, Mapping) else batch
    if not isinstance(samples, list | tuple) or not all(type(sample) is dict for sample in cast(Any, samples)):
        return batch
    # The caller may put other tensors into its dicts later, so each is copied.
    early = EarlyRows(batch) if isinstance(batch, Mapping) else EarlySamples(map(dict.copy, cast(Any, samples)))
    tensors = list(chain.from_iterable(sample.values() for sample in cast(Any, samples)))
    if not all(isinstance(tensor, Tensor) and tensor.is_cpu and not tensor.is_inference() for tensor in tensors):
        return batch
    early.preparation = EarlyPreparation(tensors, lambda: prepare(early), settings)
    return early
