"""Plan and run the chunks of samples that are longer than a microbatch: `batching.inside_samples` in a call."""

import contextlib
import math
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.batching.inside_samples import (
    OVERLAP,
    Chunk,
    ChunkTrial,
    LongSample,
    are_close,
    check_chunks,
    cut,
    find_chunks,
)
from megabatch.core.call import MicrobatchPlanner, MicrobatchStep, PreparedBatch, weights_of
from megabatch.core.contract import (
    WEIGHT_TOLERANCE,
    ByLoss,
    LossFunction,
    LossHooks,
    Prepare,
    Term,
    Weigh,
    loss_hooks,
    takes_divisor,
    terms_of,
    weigh_of,
)
from megabatch.core.samples import Batch, Batching, Length, Samples
from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError, PlanError
from megabatch.inspection import random_state
from megabatch.inspection.tree import clone, each_leaf, to_device
from megabatch.planning.plan import Plan
from megabatch.torch_private.operations import pytree

WRAPPERS = ("no wrapper", "DistributedDataParallel", "FSDP2 without replicas", "replicate")
NUM_TRIAL_TOKENS = 24  # on which a new loss is tried
LEAVE_OUT = "or leave InsideSamples out"


class ChunkedSamples(Samples):
    """Samples of which the long ones are cut into chunks. In plans a chunk counts as a sample of its own.

    Args:
        batch: This rank's samples.
        lengths: Tokens of each.
        max_tokens: Tokens of the longest sample that is not cut.
        batching, length, part: As for `Samples`.
    """

    def __init__(
        self, batch: Sequence[Any], lengths: Sequence[int], max_tokens: int, batching: Batching,
        length: Length | None, part: Prepare | None,
    ) -> None:  # fmt: skip
        self.chunks: list[Chunk | None] = []
        self.numbers: list[int] = []  # the sample of each chunk, in the batch
        pieces: list[Any] = []
        for number, (sample, num_tokens) in enumerate(zip(batch, lengths, strict=True)):
            if num_tokens <= max_tokens:
                self.chunks.append(None)
                pieces.append(sample)
            else:
                # The last chunk runs first where a backward follows.
                chunks = find_chunks(number, num_tokens, max_tokens)[::-1]
                self.chunks += chunks
                pieces += [cut(sample, chunk) for chunk in chunks]
            self.numbers += [number] * (len(pieces) - len(self.numbers))
        super().__init__(pieces, batching, length, part)
        self.num_samples, self.num_tokens = len(batch), sum(lengths)
        self._uncut = batch

    def kinds(self) -> list[Hashable]:
        """Return the kind of each sample. Each chunk is of a kind of its own."""
        kinds = super().kinds() or [None] * len(self.chunks)
        return [(kind, chunk) for kind, chunk in zip(kinds, self.chunks, strict=True)]

    def pieces_to_try(self, num_tokens: int) -> Iterator[dict[str, Tensor]]:
        """Yield stretches of so many tokens of long samples, those of the longest sample and the last ones first."""
        last_chunks = [chunk for chunk in self.chunks if chunk is not None and chunk.is_last]
        for chunk in sorted(last_chunks, key=lambda last: -last.length):
            for stop in range(chunk.length, 1, -num_tokens // 2):
                window = chunk._replace(start=max(0, stop - num_tokens), stop=stop - OVERLAP)
                yield cut(self._uncut[chunk.sample], window)

    def join_outputs(self, outputs: list[Any], *, trim: bool) -> list[Any]:
        """Return the output of each sample. Raises `PlanError` for one of a long sample without a column per token."""
        joined: list[Any] = [None] * self.num_samples
        for row, chunk in enumerate(self.chunks):
            if chunk is None:
                joined[self.numbers[row]] = outputs[row]
            elif chunk.is_last:
                rows = range(row + chunk.number, row - 1, -1)
                chunks = [cast(Chunk, self.chunks[chunk_row]) for chunk_row in rows]
                joined[chunk.sample] = join_chunks(chunks, [outputs[chunk_row] for chunk_row in rows], trim=trim)
        return joined


def chunks_of(samples: Samples) -> list[Chunk | None]:
    """Return the chunk that each row of a plan is, None for a short sample. Empty if no sample is cut."""
    return samples.chunks if isinstance(samples, ChunkedSamples) else []


def join_chunks(chunks: Sequence[Chunk], outputs: Sequence[Any], *, trim: bool) -> Any:
    """Return the outputs of a sample's chunks as that of the sample. Two chunks hold the token where they meet.

    Raises `PlanError` for outputs without a column per token, or per next token.
    """
    leaves = [pytree.tree_leaves(output) for output in outputs]
    joined: list[Tensor] = []
    for columns in zip(*leaves, strict=True):
        parts: list[Tensor] = []
        for chunk, column in zip(chunks, columns, strict=True):
            num_own = chunk.stop - chunk.start  # and one more token, but in the last chunk
            num_columns = len(column) if trim and column.ndim else -1
            if num_columns not in (num_own, num_own + (-1 if chunk.is_last else OVERLAP)):
                raise PlanError(
                    f"sample {chunk.sample} is cut into chunks and the function of forward() returned the shape "
                    f"{tuple(column.shape)} for one of {num_own + OVERLAP - chunk.is_last} tokens; return a column for "
                    "each token, or for each next token, and leave trim=False out"
                )
            parts.append(column[:num_own])
        joined.append(torch.cat(parts))
    return pytree.tree_unflatten(joined, pytree.tree_structure(outputs[0]))


@dataclass(frozen=True)
class ChunkPlanner(MicrobatchPlanner):
    """Splits short samples as its parent does, and each long sample into chunks."""

    cuts_samples: ClassVar[bool] = True
    verb: str = "forward_backward"  # or "forward", "evaluate": the method whose calls are planned
    # Losses and functions that add up over chunks.
    tried: ByLoss[bool] = field(default_factory=ByLoss[bool], compare=False)

    @property
    def trains(self) -> bool:
        """True if a backward follows each forward."""
        return self.verb == "forward_backward"

    def of_forwards(self, verb: str, fn: object) -> "ChunkPlanner":
        """Return the planner of a call that has no backward: chunks run in their order, each once."""
        return replace(self, verb=verb)

    def check_goes_with(self, feature: str) -> None:
        raise PlanError(f"InsideSamples and {feature}; leave one of the two out")

    def samples(self, batch: Batch, prepare: Prepare | None = None) -> Samples:
        """Return the batch as samples, with the long ones in chunks."""
        samples = super().samples(batch, prepare)
        longest, limit = max(samples.lengths, default=0), cast(int, self.max_microbatch_tokens)
        if self.learned is not None:
            limit = max(min(limit, self.learned.tokens), OVERLAP + 1)
        if longest <= limit:
            return samples
        if not samples.is_in_memory:
            raise PlanError(
                f"InsideSamples cuts samples of more than {limit} tokens, and those of Deferred are not loaded yet; "
                f"give a list of samples, {LEAVE_OUT}"
            )
        num_positions = cast(Any, self.batching.pad).facts.num_positions
        if num_positions is not None and longest > num_positions:
            raise PlanError(
                f"a sample has {longest} tokens and the model has {num_positions} positions; cut it, or leave it out"
            )
        rows = batch
        if isinstance(batch, Mapping):
            rows = [{name: tensor[row] for name, tensor in batch.items()} for row in range(len(samples))]
        return ChunkedSamples(cast(Sequence[Any], rows), samples.lengths, limit, self.batching, self.length, prepare)

    def plan(self, samples: Samples) -> Plan:
        """Return the plan of `MicrobatchPlanner`, with the chunks of each long sample first and in their order."""
        plan = super().plan(samples)
        if not isinstance(samples, ChunkedSamples):
            return plan
        microbatches = self._in_order(plan.microbatches, samples.chunks)
        return replace(plan, microbatches=microbatches, samples=tuple(samples.numbers))

    def _in_order(
        self, microbatches: Sequence[tuple[int, ...]], chunks: Sequence[Chunk | None]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the microbatches with chunks first, those of the longest sample before others."""

        def place(rows: tuple[int, ...]) -> tuple[int, ...]:
            chunk = chunks[rows[0]]
            # Lengths are positive, so that the short samples come last and keep their order.
            return (0,) if chunk is None else (-chunk.length, chunk.sample, chunk.number * (-1 if self.trains else 1))

        return tuple(sorted(microbatches, key=place))

    def fitted(self, plan: Plan, samples: Samples) -> Plan:
        """Return a plan that was made before, for these samples. Raises `PlanError` if it is of others."""
        fitted, chunks = super().fitted(plan, samples), chunks_of(samples)
        if not isinstance(samples, ChunkedSamples):
            return fitted
        alone = {rows[0] for rows in fitted.microbatches if len(rows) == 1}
        chunk_rows = {row for row, chunk in enumerate(chunks) if chunk is not None}
        if plan.samples != tuple(samples.numbers) or not chunk_rows <= alone:
            raise PlanError("plan is of samples that are cut into other chunks; give last_plan of the same samples")
        return replace(fitted, microbatches=self._in_order(fitted.microbatches, chunks))

    def is_repeatable(self, hooks: LossHooks) -> bool:
        """Return False: chunks are cut in the call."""
        return False

    def prepare(self, batch: Batch, hooks: LossHooks, user_plan: Plan | None = None) -> PreparedBatch:
        """Split, collate and weigh this rank's samples. Raises `LossContractError` for weights that do not add up."""
        prepared = super().prepare(batch, hooks, user_plan)
        if chunks_of(prepared.samples) and hooks.weigh is not None:
            self._check_weights(batch, prepared, hooks)
        return prepared

    def _check_weights(self, batch: Batch, prepared: PreparedBatch, hooks: LossHooks) -> None:
        """Raise `LossContractError` where the weights of a long sample's chunks are not that of the sample."""
        weigh, uncut = cast(Weigh, hooks.weigh), super().samples(batch, hooks.prepare)
        weights: dict[int, list[Mapping[str, float]]] = {}  # of the chunks of each long sample
        for rows, chunk_weights in zip(prepared.plan.microbatches, prepared.weights, strict=True):
            chunk = chunks_of(prepared.samples)[rows[0]]
            if chunk is not None:
                weights.setdefault(chunk.sample, []).append(chunk_weights)
        for sample, of_chunks in weights.items():
            for name, weight in weights_of(weigh, uncut.take([sample])).items():
                added = sum(chunk_weights[name] for chunk_weights in of_chunks)
                if not math.isclose(added, weight, rel_tol=WEIGHT_TOLERANCE):
                    raise LossContractError(
                        f"weigh counts {weight:.10g} in sample {sample} and {added:.10g} in its chunks, which "
                        "overlap by one token; count next-token targets under InsideSamples, labels[:, 1:] or "
                        f"shift_labels, {LEAVE_OUT}"
                    )

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
        chunks = chunks_of(prepared.samples)
        # Where ranks wait for each other in forwards, those without long samples run as many as the others.
        if not chunks and not wrapper.forwards_meet:
            yield from steps
            return
        runner = _ChunkRunner(prepared, loss_fn, wrapper, trains=self.trains)
        self._try(runner, loss_fn, wrapper, self._piece_to_try(prepared.samples, loss_fn))
        for step in steps:
            yield from runner.run(step)
            del step

    def _piece_to_try(self, samples: Samples, loss_fn: LossFunction) -> dict[str, Tensor] | None:
        """Return a few tokens of a long sample on which to try a new loss, with a weight. None if there is none."""
        if not isinstance(samples, ChunkedSamples) or self.tried.get(loss_fn):
            return None
        weigh = weigh_of(loss_fn) if self.verb != "forward" else None
        for piece in samples.pieces_to_try(NUM_TRIAL_TOKENS):
            if weigh is None or any(weights_of(weigh, self._collated(piece, loss_fn)).values()):
                return piece
        return None

    def _collated(self, piece: Mapping[str, Tensor], loss_fn: LossFunction) -> Any:
        return super().samples([piece], loss_hooks(loss_fn).prepare).take([0])

    def _try(
        self, runner: "_ChunkRunner", loss_fn: LossFunction, wrapper: Wrapper, piece: dict[str, Tensor] | None
    ) -> None:
        """Try a new loss or function on a few tokens of a long sample. Agree with the other ranks on forwards."""
        if wrapper.forwards_meet:
            pieces = runner.agree_on_forwards(piece)
            piece = next((offered for offered in pieces if offered is not None), None)
        if piece is None:
            return
        runner.check_sums(piece, partial(self._collated, loss_fn=loss_fn), gives_terms=self.verb != "forward")
        self.tried.set(loss_fn, True)


class _ChunkRunner:
    """Runs the chunks of one sample after another."""

    def __init__(self, prepared: PreparedBatch, loss_fn: LossFunction, wrapper: Wrapper, *, trains: bool) -> None:
        self._prepared, self._loss_fn, self._wrapper, self._trains = prepared, loss_fn, wrapper, trains
        self._chunks = chunks_of(prepared.samples)
        # DistributedDataParallel would send buffers in a forward, which other ranks do not run.
        model = wrapper.models[0]
        self._model = model.module if isinstance(model, DistributedDataParallel) else model
        self._sample: LongSample | None = None
        self._num_forwards: dict[int, int] = {}  # by step: forwards that a rank runs before it, on which ranks agreed
        self._random: dict[int, random_state.RandomState] = {}  # before the forward of each chunk
        self._random_after: random_state.RandomState | None = None

    def agree_on_forwards(self, piece: dict[str, Tensor] | None) -> list[dict[str, Tensor] | None]:
        """Agree with the other ranks on the forwards before each step. Return the pieces that ranks want to try.

        Without it a rank would gather parameters more often than another. Where parameters are gathered once per call,
        a forward more gathers nothing, and ranks need not agree.
        """
        forwards_of_chunks: dict[int, int] = {}
        gathers = self._trains and self._prepared.plan.sync != "gather_once"
        for index, rows in enumerate(self._prepared.plan.microbatches if gathers else ()):
            chunk = self._chunks[rows[0]] if self._chunks else None
            if chunk is not None and chunk.is_last:
                forwards_of_chunks[index] = chunk.number
        offers: list[tuple[dict[int, int], dict[str, Tensor] | None]]
        offers = self._wrapper.ranks.exchange_objects((forwards_of_chunks, piece))
        for forwards, _ in offers:
            for index, number in forwards.items():
                self._num_forwards[index] = max(number, self._num_forwards.get(index, 0))
        return [offered for _, offered in offers]

    def check_sums(
        self, piece: Mapping[str, Tensor], collate: Callable[[Mapping[str, Tensor]], Any], *, gives_terms: bool
    ) -> None:
        """Compare the totals of a few tokens, and their gradient, with those of their chunks.

        Raises `LossContractError` for a loss, or a function of `forward`, that needs all tokens of a sample at once.
        """
        length = len(next(iter(piece.values())))

        def call(chunk: Chunk) -> tuple[Tensor | None, Any]:
            microbatch = to_device(collate(cut(piece, chunk)), self._wrapper.device)
            returned: Any = self._loss_fn(self._model, microbatch)
            if not gives_terms:
                return None, each_leaf(returned, _detached)
            terms = terms_of(returned)
            totals = [term.total.float() for term in terms.values() if term.total.requires_grad]
            detached = {name: Term(term.total.detach(), term.weight) for name, term in terms.items()}
            return torch.stack(totals).sum() if totals else None, detached

        trial, chunk_tokens = ChunkTrial(self._model), -(-length // 3) + OVERLAP
        random = random_state.note(self._wrapper.device)
        try:
            with self._not_counting(), random_state.replay(random), self._wrapper.without_reduction():
                uncut, chunked = trial.run(call, length, chunk_tokens)
        finally:
            if self._wrapper.forwards_meet:
                self._wrapper.reshard()
        if gives_terms:
            _compare_terms(uncut.outputs[0], chunked.outputs, length, is_half=trial.is_half)
        else:
            _compare_outputs(uncut.outputs[0], chunked.outputs, find_chunks(0, length, chunk_tokens))
        tolerance = 0.2 if trial.is_half else 1e-3
        if float((uncut.gradient - chunked.gradient).norm()) > tolerance * float(uncut.gradient.norm()):
            raise LossContractError(
                f"the gradient of {length} tokens is not that of their chunks: the loss needs all tokens of a sample "
                f"at once; give a loss that is a sum over tokens, {LEAVE_OUT}"
            )

    def run(self, step: MicrobatchStep) -> Generator[MicrobatchStep]:
        """Yield a step, whose forward and backward the caller runs."""
        chunk = None
        if self._chunks and not step.is_dummy:
            chunk = self._chunks[self._prepared.rows(step.index)[0]]
        num_kept = 0
        if chunk is not None and (chunk.is_last if self._trains else chunk.number == 0):
            self._sample = LongSample(chunk, self._model)
            num_kept = self._keep_earlier(step, chunk) if self._trains else 0
        self._run_without_sample(step, self._num_forwards.get(step.index, 0) - num_kept)
        if chunk is None:
            yield step
        else:
            yield from self._run_chunk(step, chunk)

    def _run_chunk(self, step: MicrobatchStep, chunk: Chunk) -> Generator[MicrobatchStep]:
        sample = cast(LongSample, self._sample)
        self._enter(chunk, self._prepared.collated[step.index] if self._prepared.collated else None, step.microbatch)
        replays = self._trains and not chunk.is_last
        if replays:
            random_state.put_back(self._random[chunk.number])
        with sample.watched():
            yield step
        sample.running.check_forward()
        if not self._trains:
            return
        sample.running.check_backward()
        if chunk.is_last:
            self._random_after = random_state.note(self._wrapper.device)
        if chunk.number == 0:
            random_state.put_back(cast(Any, self._random_after))
            self._sample = None

    def _enter(self, chunk: Chunk, on_host: Any, moved: Any) -> None:
        running = cast(LongSample, self._sample).running
        running.enter(chunk)
        if isinstance(on_host, Mapping) and isinstance(moved, Mapping):
            running.trust(cast(Mapping[str, Any], on_host), cast(Mapping[str, Any], moved))

    @torch.no_grad()
    def _keep_earlier(self, step: MicrobatchStep, last: Chunk) -> int:
        """Run the chunks before the last one forward, which keeps their keys and values. Return their number."""
        sample = cast(LongSample, self._sample)
        with self._not_counting(), sample.watched():
            # Step after step runs the chunk before it.
            for index in range(step.index + last.number, step.index, -1):
                chunk = cast(Chunk, self._chunks[self._prepared.rows(index)[0]])
                on_host = self._prepared.collated[index]
                moved = self._copied(on_host)
                self._random[chunk.number] = random_state.note(self._wrapper.device)
                self._enter(chunk, on_host, moved)
                self._loss_fn(self._model, moved)
                sample.running.check_forward()
        return last.number

    @torch.no_grad()
    def _run_without_sample(self, step: MicrobatchStep, num_forwards: int) -> None:
        """Run so many forwards, in which other ranks run chunks of theirs. Nothing is kept of them."""
        if not num_forwards:
            return
        with self._not_counting(), random_state.replay(random_state.note(self._wrapper.device)):
            for _ in range(num_forwards):
                self._loss_fn(self._model, clone(step.microbatch))

    def _copied(self, microbatch: Any) -> Any:
        """Return the microbatch on the device, on memory of its own: a loss may write to it, and runs again on it."""
        on_device = to_device(microbatch, self._wrapper.device)
        return clone(on_device) if self._wrapper.device.type == "cpu" else on_device

    @contextlib.contextmanager
    def _not_counting(self) -> Generator[None]:
        counting, self._wrapper.is_counting = self._wrapper.is_counting, False
        try:
            yield
        finally:
            self._wrapper.is_counting = counting


def _compare_terms(
    terms: Mapping[str, Term], parts: Sequence[Mapping[str, Term]], length: int, *, is_half: bool
) -> None:
    """Raise `LossContractError` where totals or weights of chunks do not add up to those of all tokens."""
    tolerance = 2e-2 if is_half else 1e-5
    for name, term in terms.items():
        of_chunks = [part[name] for part in parts if name in part]
        for part_name, number, numbers in (
            ("total", float(term.total), [float(part.total) for part in of_chunks]),
            ("weight", float(term.weight), [float(part.weight) for part in of_chunks]),
        ):
            scale = abs(number) + sum(map(abs, numbers))
            if abs(sum(numbers) - number) > tolerance * scale:
                raise LossContractError(
                    f"the {part_name} {name!r} of {length} tokens is {number:.6g}, and that of their chunks adds up to "
                    f"{sum(numbers):.6g}: the loss needs all tokens of a sample at once; give a loss that is a sum "
                    f"over tokens, {LEAVE_OUT}"
                )


def _compare_outputs(uncut: Any, outputs: Sequence[Any], chunks: Sequence[Chunk]) -> None:
    """Raise `LossContractError` where a function of `forward` returns other outputs for chunks than for all tokens."""
    whole_leaves: list[Any] = pytree.tree_leaves(uncut)
    if not all(isinstance(leaf, Tensor) and leaf.ndim for leaf in whole_leaves):
        return  # no output of samples, which `split_outputs` says
    joined = join_chunks(chunks, [each_leaf(output, _first_row) for output in outputs], trim=True)
    for expected, actual in zip(whole_leaves, pytree.tree_leaves(joined), strict=True):
        if expected[0].shape != actual.shape or not are_close(expected[0], actual):
            raise LossContractError(
                f"the function of forward() returns other outputs for {chunks[-1].length} tokens than for their "
                "chunks: it needs all tokens of a sample at once; return what each token has by itself, "
                f"{LEAVE_OUT}"
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _first_row(leaf: Tensor) -> Tensor:
    return leaf[0]


def check_settings(wrapper: Wrapper, max_microbatch_tokens: int | None) -> None:
    """Raise `PlanError` where samples cannot be cut into chunks.

    Args:
        wrapper: The model's wrapper.
        max_microbatch_tokens: The limit, if it is a number.
    """
    ranks, problem = wrapper.ranks, None
    if max_microbatch_tokens is None:
        problem = 'its limit is not a number; give max_microbatch_tokens=, not micro_batch_size and not "auto"'
    elif wrapper.kind_name not in WRAPPERS or wrapper.is_pipeline or ranks.num_all > ranks.degree:
        axes = " and mesh axes beside data" if ranks.num_all > ranks.degree else ""
        problem = (
            f"the model has {wrapper.kind_name}{axes}; use a plain model, DistributedDataParallel or FSDP2 over data "
            "axes alone"
        )
    elif max_microbatch_tokens <= OVERLAP:
        problem = f"max_microbatch_tokens is {max_microbatch_tokens}; give at least {OVERLAP + 1}"
    if problem is not None:
        raise PlanError(f"InsideSamples is given and {problem}, {LEAVE_OUT}")
    try:
        with wrapper.without_reduction():
            check_chunks(wrapper.models, wrapper.device)
    finally:
        wrapper.reshard()
