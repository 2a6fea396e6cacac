"""Simulation of an update whose samples are longer than a microbatch and run in chunks, as with `InsideSamples`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megabatch.batching.inside_samples import OVERLAP, Chunk, LongSample, find_chunks
from megabatch.core.contract import LossFunction
from megabatch.errors import PlanError
from megabatch.simulate.simulated_update import REPEATED_FORWARD, Simulated, num_distinct


def simulate_long_samples(
    length_tokens: int,
    chunk_tokens: int,
    loss_fn: LossFunction,
    run: Callable[[LossFunction], Simulated],
    *,
    sync: str = "auto",
) -> Simulated:
    """Simulate an update of samples of ``length_tokens`` tokens, which run in chunks.

    It makes two simulations. The last chunks of a sample read the most keys and values, and say the memory. Chunks in
    the middle take the mean time. Every chunk but the last of a sample runs forward twice. States of linear attention,
    state-space layers and convolutions are kept for each chunk.

    Args:
        length_tokens: Tokens of a sample.
        chunk_tokens: Tokens of a chunk.
        loss_fn: As for `simulate`.
        run: Calls `simulate` with the loss that it is given, with ``make_batch`` of one chunk of one sample, and
            with as many microbatches as the update has chunks.
        sync: As for `simulate`.

    Raises:
        PlanError: For a sample that is not cut.
    """
    num_chunks = len(find_chunks(0, length_tokens, chunk_tokens))
    num_run = min(num_chunks, num_distinct(sync))
    if num_chunks < num_distinct("last"):
        raise PlanError(f"a sample of {length_tokens} tokens is not cut into chunks of {chunk_tokens}; use simulate()")
    last = run(_InChunks(loss_fn, length_tokens, length_tokens - OVERLAP, num_run, num_chunks))
    if REPEATED_FORWARD not in last.phases:
        raise PlanError(f"run simulates {last.num_microbatches} microbatches, and a sample has {num_chunks} chunks")
    middle_stop = (length_tokens + num_run * chunk_tokens) // 2
    middle_stop = min(middle_stop, length_tokens - OVERLAP)
    middle = run(_InChunks(loss_fn, length_tokens, middle_stop, num_run, num_chunks))
    phases = {
        name: replace(middle.phases[name], peak_bytes=phase.peak_bytes, at_peak=phase.at_peak)
        for name, phase in last.phases.items()
    }
    num_samples = -(-last.num_microbatches // num_chunks)
    times = last.times | {REPEATED_FORWARD: last.times[REPEATED_FORWARD] + last.num_microbatches - num_samples}
    return replace(last, phases=phases, times=times)


class _InChunks:
    """A loss each of whose calls runs on the chunk before that of the call before it."""

    def __init__(self, loss_fn: LossFunction, length: int, stop: int, num_run: int, num_chunks: int) -> None:
        self._loss_fn, self._length, self._stop = loss_fn, length, stop
        self._num_run, self._num_chunks = num_run, num_chunks
        self._num_calls = 0
        self._sample: LongSample | None = None

    def __call__(self, model: Any, microbatch: Any) -> Any:
        index = self._num_calls % self._num_run
        self._num_calls += 1
        stride = microbatch["input_ids"].shape[1] - OVERLAP
        stop = max(self._stop - index * stride, stride)
        chunk = Chunk(0, self._num_run - index, stop - stride, stop, self._length)
        if index == 0 or self._sample is None:
            self._sample = LongSample(chunk, model)
        self._sample.running.enter(chunk)
        with self._sample.watched():
            returned = self._loss_fn(model, microbatch)
        if index == 0:
            for state in self._sample.states.kept:
                state.fill_up(self._num_chunks)
        if index == self._num_run - 1:
            self._sample = None  # the graph keeps it until the backward has run
        return returned
