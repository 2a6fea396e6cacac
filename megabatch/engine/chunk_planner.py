"""Plan and run the chunks of samples that are longer than a microbatch: `batching.inside_samples` in a call."""

import contextlib
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.batching.inside_samples import (
    HALF_TYPES,
    OVERLAP,
    Chunk,
    LongSample,
    check_chunks,
    cut,
    find_chunks,
)
from megabatch.batching.padding import with_config
from megabatch.batching.samples import Batch, Collate, Deferred, Length, Microbatch, Samples
from megabatch.batching.tree import to_device
from megabatch.engine import random_state
from megabatch.engine.call import MicrobatchPlanner, MicrobatchStep, PreparedBatch, weights_of
from megabatch.engine.ownership import ByLoss
from megabatch.errors import LossContractError, PlanError
from megabatch.losses.contract import (
    WEIGHT_TOLERANCE,
    LossFunction,
    LossHooks,
    Prepare,
    Term,
    Weigh,
    takes_divisor,
    terms_of,
    weigh_of,
)
from megabatch.planning.plan import Plan
from megabatch.wrappers.base import Wrapper

WRAPPERS = ("no wrapper", "DistributedDataParallel")  # whose forward without gradients can meet no other rank
NUM_TRIAL_TOKENS = 24  # on which a new loss is tried
LEAVE_OUT = "or leave InsideSamples out"


class ChunkedSamples(Samples):
    """Samples of which the long ones are cut into chunks. In plans a chunk counts as a sample of its own.

    Args:
        batch: This rank's samples.
        lengths: Tokens of each.
        max_tokens: Tokens of the longest sample that is not cut.
        collate, length, part, pad: As for `Samples`.
    """

    def __init__(
        self, batch: Sequence[Any], lengths: Sequence[int], max_tokens: int, collate: Collate | None,
        length: Length | None, part: Prepare | None, pad: Any,
    ) -> None:  # fmt: skip
        self.chunks: list[Chunk | None] = []
        self.numbers: list[int] = []  # the sample of each chunk, in the batch
        self.is_running = False
        pieces: list[Any] = []
        for number, (sample, num_tokens) in enumerate(zip(batch, lengths, strict=True)):
            if num_tokens <= max_tokens:
                self.chunks.append(None)
                pieces.append(sample)
            else:
                # The last chunk runs first.
                chunks = find_chunks(number, num_tokens, max_tokens)[::-1]
                self.chunks += chunks
                pieces += [cut(sample, chunk) for chunk in chunks]
            self.numbers += [number] * (len(pieces) - len(self.numbers))
        super().__init__(pieces, collate, length, part, pad)
        self.num_samples, self.num_tokens = len(batch), sum(lengths)
        self._batch = batch

    def kinds(self) -> list[Hashable]:
        """Return the kind of each sample. Each chunk is of a kind of its own."""
        kinds = super().kinds() or [None] * len(self.chunks)
        return [(kind, chunk) for kind, chunk in zip(kinds, self.chunks, strict=True)]

    def tokens_with_weight(self, weigh: Weigh, num_tokens: int) -> dict[str, Tensor] | None:
        """Return so many tokens of a long sample, the last ones with a weight. None if none has one."""
        for chunk in self.chunks:
            if chunk is None or not chunk.is_last:
                continue
            for stop in range(chunk.length, 1, -num_tokens // 2):
                window = chunk._replace(start=max(0, stop - num_tokens), stop=stop - OVERLAP)
                piece = cut(self._batch[chunk.sample], window)
                if any(weights_of(weigh, self.collated(piece)).values()):
                    return piece
        return None

    def collated(self, sample: Mapping[str, Tensor]) -> Microbatch:
        """Return one sample as a microbatch, which the loss is given."""
        return Samples([sample], self._collate, self._length, self._part, self._pad).take([0])

    def take(self, indices: Sequence[int]) -> Microbatch:
        """Collate the samples at ``indices``, as `Samples.take`."""
        microbatch = super().take(indices)
        self.expect = self._expect
        return microbatch

    def _expect(self, microbatch: Microbatch) -> None:
        """Note the microbatch that runs next. Raises `PlanError` where nothing runs the chunks before it."""
        if not self.is_running:
            raise PlanError(
                "a sample is longer than max_microbatch_tokens, and InsideSamples cuts samples in forward_backward() "
                "only; raise the limit, or use an accumulator without InsideSamples"
            )
        cast(Any, self._pad).expect(microbatch)


@dataclass(frozen=True)
class ChunkPlanner(MicrobatchPlanner):
    """Splits short samples as its parent does, and each long sample into chunks."""

    fills_up: ClassVar[bool] = False
    tried: ByLoss[bool] = field(default_factory=ByLoss[bool], compare=False)  # losses that add up over chunks

    def samples(self, batch: Batch, prepare: Prepare | None = None) -> Samples:
        """Return the batch as samples, with the long ones in chunks."""
        samples = super().samples(batch, prepare)
        longest, limit = max(samples.lengths, default=0), cast(int, self.max_microbatch_tokens)
        if longest <= limit:
            return samples
        if isinstance(batch, Deferred):
            raise PlanError(
                f"InsideSamples cuts samples of more than {limit} tokens, and those of Deferred are not loaded yet; "
                f"give a list of samples, {LEAVE_OUT}"
            )
        num_positions = cast(Any, self.padding).num_positions
        if num_positions is not None and longest > num_positions:
            raise PlanError(
                f"a sample has {longest} tokens and the model has {num_positions} positions; cut it, or leave it out"
            )
        rows = batch
        if isinstance(batch, Mapping):
            rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(samples))]
        return ChunkedSamples(
            cast(Sequence[Any], rows), samples.lengths, limit, self.collate, self.length, prepare, self.padding
        )

    def plan(self, samples: Samples) -> Plan:
        """Return the plan of `MicrobatchPlanner`, with the chunks of each long sample first and in their order."""
        plan = super().plan(samples)
        if not isinstance(samples, ChunkedSamples):
            return plan
        chunks = [rows for rows in plan.microbatches if samples.chunks[rows[0]] is not None]
        others = [rows for rows in plan.microbatches if samples.chunks[rows[0]] is None]
        return replace(plan, microbatches=(*sorted(chunks), *others), samples=tuple(samples.numbers))

    def fitted(self, plan: Plan, samples: Samples) -> Plan:
        """Return a plan that was made before, for these samples. Raises `PlanError` if it is of others."""
        fitted = super().fitted(plan, samples)
        if not isinstance(samples, ChunkedSamples):
            return fitted
        chunks = tuple((row,) for row, chunk in enumerate(samples.chunks) if chunk is not None)
        if plan.samples != tuple(samples.numbers) or fitted.microbatches[: len(chunks)] != chunks:
            raise PlanError("plan is of samples that are cut into other chunks; give last_plan of the same samples")
        return fitted

    def is_repeatable(self, hooks: LossHooks) -> bool:
        """Return False: chunks are cut in the call."""
        return False

    def prepare(self, batch: Batch, hooks: LossHooks, given: Plan | None = None) -> PreparedBatch:
        """Split, collate and weigh this rank's samples. Raises `LossContractError` for weights that do not add up."""
        prepared = super().prepare(batch, hooks, given)
        if isinstance(prepared.samples, ChunkedSamples) and hooks.weigh is not None:
            self._check_weights(batch, prepared.samples, prepared.weights, hooks)
        return prepared

    def _check_weights(
        self, batch: Batch, samples: ChunkedSamples, weights: Sequence[Mapping[str, float]], hooks: LossHooks
    ) -> None:
        """Raise `LossContractError` where the weights of a long sample's chunks are not that of the sample."""
        weigh, uncut = cast(Weigh, hooks.weigh), super().samples(batch, hooks.prepare)
        start = 0  # chunks are the first microbatches, sample after sample
        for chunk in samples.chunks:
            if chunk is None or not chunk.is_last:
                continue
            stop = start + chunk.number + 1
            for name, weight in weights_of(weigh, uncut.take([chunk.sample])).items():
                added = sum(weights[index][name] for index in range(start, stop))
                if not math.isclose(added, weight, rel_tol=WEIGHT_TOLERANCE):
                    raise LossContractError(
                        f"weigh counts {weight:.10g} in sample {chunk.sample} and {added:.10g} in its chunks, which "
                        "overlap by one token; count next-token targets under InsideSamples, labels[:, 1:] or "
                        f"shift_labels, {LEAVE_OUT}"
                    )
            start = stop

    def check_call(self, wrapper: Wrapper, plan: Plan, loss_fn: object) -> None:
        """Raise `PlanError` for a loss that cannot run in chunks."""
        if hasattr(loss_fn, "run_call") or takes_divisor(cast(LossFunction, loss_fn)):
            raise PlanError(
                "InsideSamples cuts samples, and the loss couples them or runs a backward of its own; give a loss that "
                f"returns (total, weight), {LEAVE_OUT}"
            )
        if weigh_of(cast(LossFunction, loss_fn)) is None:
            raise LossContractError(
                "InsideSamples is given and the loss does not say how its weight is counted, so that a weight of whole "
                f"samples would not be seen; give weigh=, see megabatch.loss, {LEAVE_OUT}"
            )

    def surround_steps(
        self, steps: Generator[MicrobatchStep], prepared: PreparedBatch, loss_fn: LossFunction, wrapper: Wrapper
    ) -> Generator[MicrobatchStep]:
        """Yield the steps. Before the last chunk of a sample, run its other chunks forward."""
        if not isinstance(samples := prepared.samples, ChunkedSamples):
            yield from steps
            return
        runner = _ChunkRunner(samples, loss_fn, wrapper)
        samples.is_running = True
        try:
            if self.tried.get(loss_fn) is None and runner.check_sums():
                self.tried.set(loss_fn, True)
            for step in steps:
                rows = prepared.rows(step.index)
                chunk = None if step.is_dummy else samples.chunks[rows[0]]
                if chunk is None:
                    yield step
                else:
                    yield from runner.run(step, chunk, rows[0])
                del step
        finally:
            samples.is_running = False


class _ChunkRunner:
    """Runs the chunks of one sample after another."""

    def __init__(self, samples: ChunkedSamples, loss_fn: LossFunction, wrapper: Wrapper) -> None:
        self._samples, self._loss_fn, self._wrapper = samples, loss_fn, wrapper
        self._weigh = cast(Weigh, weigh_of(loss_fn))
        # DistributedDataParallel would send buffers in a forward, which other ranks do not run.
        model = wrapper.models[0]
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._sample: LongSample | None = None
        self._random: dict[int, random_state.RandomState] = {}  # before the forward of each chunk
        self._random_after: random_state.RandomState | None = None

    def check_sums(self) -> bool:
        """Compare the totals of a few tokens, and their gradient, with those of their chunks.

        Return False if no long sample has a target. Raises `LossContractError` for a loss that needs all tokens of a
        sample at once.
        """
        sample = self._samples.tokens_with_weight(self._weigh, NUM_TRIAL_TOKENS)
        if sample is None:
            return False
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        counting, self._wrapper.is_counting = self._wrapper.is_counting, False
        trial = _LossTrial(self._model, partial(self._call_loss, self._samples))
        try:
            with random_state.replay(random_state.note(self._wrapper.device)), trial.moved(), torch.enable_grad():
                trial.run(sample)
        finally:
            self._wrapper.is_counting = counting
            for module, mode in modes.items():
                module.training = mode
        return True

    def _call_loss(self, samples: ChunkedSamples, sample: Mapping[str, Tensor]) -> dict[str, Term]:
        microbatch = samples.collated(sample)
        moved = samples.owned(microbatch, to_device(microbatch, self._wrapper.device))
        return terms_of(self._loss_fn(self._model, moved))

    def run(self, step: MicrobatchStep, chunk: Chunk, row: int) -> Generator[MicrobatchStep]:
        """Yield the step of one chunk, whose forward and backward the caller runs."""
        if chunk.is_last:
            self._sample = LongSample(chunk)
            self._keep_earlier(chunk, row)
        assert self._sample is not None
        sample = self._sample
        sample.enter(chunk)
        if not chunk.is_last:
            random_state.put_back(self._random[chunk.number])
        with sample.watched(self._model):
            yield step
        sample.check_forward()
        sample.running.check_backward()
        if chunk.is_last:
            self._random_after = random_state.note(self._wrapper.device)
        if chunk.number == 0:
            random_state.put_back(cast(Any, self._random_after))
            self._sample = None

    @torch.no_grad()
    def _keep_earlier(self, last: Chunk, row: int) -> None:
        """Run the chunks before the last one forward, which keeps their keys and values."""
        sample = cast(LongSample, self._sample)
        counting, self._wrapper.is_counting = self._wrapper.is_counting, False
        with sample.watched(self._model):
            # Row after row lies the chunk before it.
            for earlier_row in range(row + last.number, row, -1):
                chunk = cast(Chunk, self._samples.chunks[earlier_row])
                microbatch = self._samples.take([earlier_row])
                moved = self._samples.owned(microbatch, to_device(microbatch, self._wrapper.device))
                self._random[chunk.number] = random_state.note(self._wrapper.device)
                sample.enter(chunk)
                self._loss_fn(self._model, moved)
                sample.check_forward()
        self._wrapper.is_counting = counting


class _LossTrial:
    """Runs a loss on a few tokens, whole and in chunks.

    A policy loss is linear in its tokens where the policy is the old one. The trial therefore adds noise to the
    embeddings, and compares the gradient of the noise, too.
    """

    def __init__(self, model: nn.Module, call_loss: Callable[[Mapping[str, Tensor]], dict[str, Term]]) -> None:
        self._model, self._call_loss = model, call_loss
        table = with_config(model).get_input_embeddings()
        self._table: nn.Module = table
        weight: Tensor = table.weight.detach()
        drawn = torch.randn(NUM_TRIAL_TOKENS, weight.shape[-1], generator=torch.Generator().manual_seed(0))
        self._noise = (drawn * float(weight.float().std())).to(weight).requires_grad_()  # [T, D]
        self._start = 0  # token with which the forward begins
        self._is_half = any(parameter.dtype in HALF_TYPES for parameter in model.parameters())

    @contextlib.contextmanager
    def moved(self) -> Generator[None]:
        """Add the noise to the embeddings of each forward."""

        def add_noise(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            return output + self._noise[self._start : self._start + output.shape[1]]

        hook = self._table.register_forward_hook(add_noise)
        try:
            yield
        finally:
            hook.remove()

    def run(self, sample: Mapping[str, Tensor]) -> None:
        """Raise `LossContractError` if the chunks have another total, weight or gradient than all tokens at once."""
        length = len(next(iter(sample.values())))
        terms, gradient = self._run(sample)
        chunks = find_chunks(0, length, -(-length // 3) + OVERLAP)
        long_sample = LongSample(chunks[0])
        sums: dict[str, list[Term]] = {name: [] for name in terms}
        chunk_gradient = torch.zeros_like(gradient)
        with long_sample.watched(self._model):
            for chunk in chunks[:-1]:
                self._enter(long_sample, chunk)
                with torch.no_grad():
                    self._call_loss(cut(sample, chunk))
                long_sample.check_forward()
            for chunk in reversed(chunks):
                self._enter(long_sample, chunk)
                chunk_terms, noise_gradient = self._run(cut(sample, chunk))
                chunk_gradient += noise_gradient
                for name, term in chunk_terms.items():
                    sums.setdefault(name, []).append(term)
        self._is_half |= long_sample.running.is_half
        self._compare(terms, sums, length)
        tolerance = 0.2 if self._is_half else 1e-3
        if float((gradient - chunk_gradient).norm()) > tolerance * float(gradient.norm()):
            raise LossContractError(
                f"the gradient of {length} tokens is not that of their chunks: the loss needs all tokens of a sample "
                f"at once; give a loss that is a sum over tokens, {LEAVE_OUT}"
            )

    def _enter(self, long_sample: LongSample, chunk: Chunk) -> None:
        long_sample.enter(chunk)
        self._start = chunk.start

    def _run(self, sample: Mapping[str, Tensor]) -> tuple[dict[str, Term], Tensor]:
        """Return the terms, detached, and the gradient [T, D] of the noise."""
        terms = self._call_loss(sample)
        totals = [term.total for term in terms.values() if term.total.requires_grad]
        detached = {name: Term(term.total.detach(), term.weight) for name, term in terms.items()}
        if not totals:
            return detached, torch.zeros_like(self._noise)
        total = torch.stack([total.float() for total in totals]).sum()
        return detached, torch.autograd.grad(total, self._noise, materialize_grads=True)[0]

    def _compare(self, terms: Mapping[str, Term], sums: Mapping[str, list[Term]], length: int) -> None:
        """Raise `LossContractError` where totals or weights do not add up."""
        tolerance = 2e-2 if self._is_half else 1e-5
        for name, term in terms.items():
            for what, number, parts in (
                ("total", float(term.total), [float(part.total) for part in sums[name]]),
                ("weight", float(term.weight), [float(part.weight) for part in sums[name]]),
            ):
                scale = abs(number) + sum(map(abs, parts))
                if abs(sum(parts) - number) > tolerance * scale:
                    raise LossContractError(
                        f"the {what} {name!r} of {length} tokens is {number:.6g}, and that of their chunks adds up to "
                        f"{sum(parts):.6g}: the loss needs all tokens of a sample at once; give a loss that is a sum "
                        f"over tokens, {LEAVE_OUT}"
                    )


def check_settings(wrapper: Wrapper, max_microbatch_tokens: int | None, others: Mapping[str, object]) -> None:
    """Raise `PlanError` where samples cannot be cut into chunks.

    Args:
        wrapper: The model's wrapper.
        max_microbatch_tokens: The limit, if it is a number.
        others: Options that InsideSamples does not go with, by name. False and None are left out.
    """
    ranks, problem = wrapper.ranks, None
    options = [name for name, value in others.items() if value]
    if max_microbatch_tokens is None:
        problem = 'its limit is not a number; give max_microbatch_tokens=, not micro_batch_size and not "auto"'
    elif wrapper.kind_name not in WRAPPERS or wrapper.is_pipeline or ranks.num_all > ranks.degree:
        axes = " and mesh axes beside data" if ranks.num_all > ranks.degree else ""
        problem = (
            f"the model has {wrapper.kind_name}{axes}, where "
            "ranks wait for each other in forwards; use a plain model or DistributedDataParallel"
        )
    elif max_microbatch_tokens <= OVERLAP:
        problem = f"max_microbatch_tokens is {max_microbatch_tokens}; give at least {OVERLAP + 1}"
    elif options:
        problem = f"so is {options[0]}=; leave one of the two out"
    if problem is not None:
        raise PlanError(f"InsideSamples is given and {problem}, {LEAVE_OUT}")
    check_chunks(wrapper.models, wrapper.device)
