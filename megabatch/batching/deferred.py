"""Deferred: a batch whose samples are loaded when their microbatch runs."""

import math
import threading
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Real
from typing import Any, ClassVar

from megabatch.core.samples import STOPPED, Microbatch, Samples, Weigh, sample_length
from megabatch.errors import LossContractError, PlanError, require_count
from megabatch.inspection.tree import clone, each_leaf
from megabatch.planning.plan import Plan

KEPT_BYTES = 2**28  # 256 MiB hold the tokens of any update of text


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

    samples_class: "ClassVar[type[Samples]]"  # by which the accumulator reads it

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
        rows = range(len(self))[index]
        return self._load(rows) if isinstance(rows, int) else [self._load(row) for row in rows]

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


class DeferredSamples(Samples):
    """The samples of a `Deferred` batch. Those that wait for their turn are in memory."""

    is_list = is_in_memory = False

    def _read(self, batch: Deferred) -> Deferred:
        batch.check()
        # The last sample, once it is loaded: dummy microbatches repeat it.
        self._kept: dict[int, Any] = {}
        # Microbatches that were taken to weigh them, and room for more until the first turn.
        self._early: dict[tuple[int, ...], Microbatch] = {}
        self._room = batch.kept_bytes
        # One thread at a time loads and collates.
        self._loading = threading.Lock()
        return batch

    def _measure(self) -> list[int]:
        lengths = enumerate(self._batch.lengths)
        return [require_count(f"the length of sample {index}", length, least=0) for index, length in lengths]

    def _count_tokens(self) -> int:
        return sum(self.lengths)

    def take(self, indices: Sequence[int]) -> Microbatch:
        """Load and collate the samples at ``indices``."""
        microbatch = super().take(indices)
        if self._room > 0:
            self._keep_weighed(tuple(indices), microbatch)
        return microbatch

    def take_whole(self, indices: Sequence[int]) -> Microbatch:
        """Load and collate the samples at ``indices``, without the loss's view of them."""
        with self._loading:
            return self.batching.collate([self.one_view(index) for index in indices], indices)

    def one_view(self, index: int) -> Any:
        """Load a sample and compare it with its given length."""
        if index in self._kept:
            return self._kept[index]
        try:
            sample = self._batch[index]
        except StopIteration as error:
            raise PlanError(f"sample {index} of Deferred {STOPPED}") from error
        length = int((self._length or sample_length)(sample)) if self._batch.measured else self.lengths[index]
        if length != self.lengths[index]:
            raise PlanError(
                f"sample {index} of Deferred has {length} tokens, but lengths says {self.lengths[index]}; "
                "give the length that is counted when the sample is loaded, or measured=False"
            )
        if index == len(self) - 1:
            self._kept[index] = sample
        return sample

    def weigh(
        self, microbatches: Sequence[tuple[int, ...]], weigh: Weigh
    ) -> tuple[tuple[Microbatch, ...], Iterable[object]]:
        """Return the given weight of each microbatch, or what ``weigh`` counts. Keep no microbatch."""
        if self._batch.weights is not None:
            return (), map(self.given_weight, microbatches)
        # A comprehension would hold a microbatch while the next is loaded.
        return (), map(weigh, map(self.take, microbatches))

    def given_weight(self, rows: Sequence[int]) -> float | None:
        """Return the sum of the given weights of samples; None without them."""
        weights = self._batch.weights
        return None if weights is None else sum(weights[row] for row in rows)

    def check_names(
        self, microbatch: Microbatch, announced: dict[str, float], count: Callable[[Microbatch], dict[str, float]]
    ) -> None:
        """Compare the terms that ``weigh`` counts in a microbatch whose weight was given before it was loaded."""
        if self._batch.weights is None:
            return
        weights = count(microbatch)
        if weights.keys() != announced.keys():
            raise LossContractError(
                f"weigh names the terms {sorted(weights)} but weights of Deferred have no name; "
                "return a number from weigh, or leave weights out"
            )

    def in_turn(self, microbatches: Sequence[Sequence[int]]) -> Generator[Microbatch]:
        """Yield each of ``microbatches``, while the next ones are prepared in a thread.

        A caller that drops one before it asks for the next holds at most ``look_ahead + 1`` of them.
        """
        self._room = 0
        ahead: deque[Future[Microbatch]] = deque()
        thread = ThreadPoolExecutor(1, "megabatch-deferred")
        try:
            for index in range(len(microbatches)):
                due = microbatches[index + len(ahead) : index + self._batch.look_ahead + 1]
                ahead.extend(thread.submit(self._take_kept, rows) for rows in due)
                yield ahead.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)

    def _keep_weighed(self, indices: tuple[int, ...], microbatch: Microbatch) -> None:
        """Keep a microbatch that was taken before its turn, if there is room for it."""
        sizes: list[int] = []
        each_leaf(microbatch, lambda leaf: sizes.append(getattr(leaf, "nbytes", 0)))
        self._room -= sum(sizes)
        if self._room >= 0:  # the user's collate function may fill the same buffer again
            self._early[indices] = clone(microbatch) if self.batching.is_collated_by_user else microbatch

    def forget_early(self) -> None:
        """Free the microbatches that were taken before their turn."""
        self._early.clear()
        self._room = self._batch.kept_bytes

    def _take_kept(self, indices: Sequence[int]) -> Microbatch:
        """Take a microbatch that outlives the next: the user's collate function may fill the same buffer again."""
        if self._early and (microbatch := self._early.pop(tuple(indices), None)) is not None:
            return microbatch
        microbatch = self.take(indices)
        is_ahead = self._batch.look_ahead > 0
        return clone(microbatch) if is_ahead and self.batching.is_collated_by_user else microbatch

    def dummy_rows(self, plan: Plan) -> tuple[int, ...]:
        """Return the last sample, several times: the others would have to be loaded again."""
        last, rows = len(self) - 1, plan.microbatches[-1]
        several = plan.padded and last in rows  # in one row, the copies may be longer than the row
        return (last,) * (len(rows) if several else 1)

    def kinds(self) -> None:
        """Return None: kinds are not known of samples that are loaded later."""

    def copy_last(self) -> Samples:
        """Return these samples: no more of them is in memory."""
        return self

    def held(self) -> object:
        """Return the last sample, if it is loaded."""
        return list(self._kept.values())

    def keys(self) -> list[tuple[str, ...]]:
        """Return no keys: samples are not loaded."""
        return []

    def fingerprint(self) -> int:
        """Hash all lengths."""
        return zlib.crc32(repr(self.lengths).encode())


Deferred.samples_class = DeferredSamples
