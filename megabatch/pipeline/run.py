"""Runs a call through torch's pipeline schedules: a schedule step runs all its microbatches, padded to one shape.

The user's loss function needs no change. Every rank calls it with a `_Recorder` in place of the model, which records
the model's inputs. The last stage calls it again with an `_Answer`, which returns the output of the stages.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megabatch.core.agreement import first_failure
from megabatch.core.call import CallAgreement, MicrobatchStep, PreparedBatch, iterate_steps
from megabatch.core.contract import (
    CoupledLoss,
    LossFunction,
    Term,
    Weigh,
    accumulation_dtype,
    counted_weights,
    takes_divisor,
    terms_of,
    weigh_of,
)
from megabatch.core.extension import Call
from megabatch.core.mesh import DataRanks
from megabatch.core.samples import Microbatch
from megabatch.core.update import OpenUpdate, add_terms
from megabatch.errors import LossContractError, PlanError
from megabatch.inspection import random_state
from megabatch.inspection.error_kinds import is_out_of_memory
from megabatch.pipeline.pad_to_shape import Inputs, crop_output, fingerprint, in_one_shape
from megabatch.pipeline.schedule_steps import group_microbatches
from megabatch.pipeline.stages import Pipeline, nothing_of
from megabatch.planning.stretches import stretch_alike
from megabatch.torch_private.classes import is_fsdp2
from megabatch.torch_private.operations import pytree

__all__ = ["Pipeline", "evaluate"]

# The terms of a microbatch: name, has a graph, weight if that is on the host.
Named = list[tuple[str, bool, float | None]]


def run_schedule(model: Pipeline, call: Call, reducing: AbstractContextManager[None]) -> dict[str, Term]:
    """Add a call's gradient to the open update. Return its sums, the same on every stage.

    An error of the loss or of a stage is raised on all ranks after the last schedule step. A stage that other ranks
    hold too and wait for (FSDP2, DDP, context parallelism) ends the step when it fails, and the error broadcast tells
    all ranks.
    """
    loss_fn, opened, prepared, agreement = call.loss_fn, call.opened, call.prepared, call.agreement
    wrapper, device = call.wrapper, call.wrapper.device
    if takes_divisor(loss_fn):
        raise PlanError("a loss that takes the divisor cannot run through a Pipeline; give one that returns its sum")
    if isinstance(loss_fn, CoupledLoss):
        raise PlanError("a JointLoss cannot run through a Pipeline; give a loss that sums over samples")
    opened.count_call(agreement)
    if not agreement.num_microbatches:
        return {}
    sizes, weigh = prepared.plan.steps, weigh_of(loss_fn)

    def make() -> list[MicrobatchStep]:
        if weigh is None or not model.ranks.context_groups:
            return list(iterate_steps(prepared, agreement, weigh, wrapper))
        cut = _cut_call_over_context(prepared, agreement, sizes, weigh, model.ranks)
        return list(iterate_steps(*cut, weigh, wrapper))

    last = _LastStage(
        model, *_recorded_by_all(make, loss_fn, model, device, wrapper.loss_factor, sizes), loss_fn, opened
    )
    with reducing:
        last.run(sizes, device, backward=True)
    sums: dict[str, Term] = {}
    # Every stage adds the same sums, so that each can close the update without asking the last one.
    for terms, step in zip(last.share_terms(device), last.steps, strict=True):
        # This records the differentiable terms, as on the last stage.
        if not model.has_last_stage:
            opened.objective(terms, step)
        add_terms(sums, opened.add(terms, step))
    return sums


def evaluate(model: Pipeline, microbatches: Sequence[Microbatch], loss_fn: LossFunction) -> list[dict[str, Term]]:
    """Run the forward only and return the terms of each microbatch, the same on every stage.

    Collective over all ranks of the mesh. The microbatches must be on the model's device. Every rank needs the same
    number of them. Ranks along pp, tp and cp need the same microbatches, and ranks along cp get the terms of their own
    part of each. With gradients enabled, ``requires_grad`` of the totals shows which terms are differentiable, but no
    gradient is computed. Gathered parameters are resharded afterwards. Dropout follows ``model.eval()`` and
    ``model.train()``.
    """
    device = next(model.parameters()).device
    shapes = _shapes_of_all(microbatches, model.ranks)
    if not shapes:
        return []
    groups = group_microbatches(shapes, model.runnable, model.bubble)
    order, sizes = list(chain.from_iterable(groups)), list(map(len, groups))

    def make() -> list[MicrobatchStep]:
        ordered = [microbatches[index] for index in order]
        if model.ranks.context_groups:
            ordered = _cut_over_context(ordered, sizes, model.ranks)
        return [MicrobatchStep(microbatch, index, {}, False) for index, microbatch in enumerate(ordered)]

    last = _LastStage(model, *_recorded_by_all(make, loss_fn, model, device, None, sizes), loss_fn, None)
    try:
        with torch.no_grad():
            last.run(sizes, device, backward=False)
        terms = dict(zip(order, last.share_terms(device), strict=True))
        return [terms[index] for index in range(len(microbatches))]
    except Exception:
        model.forget()
        raise
    finally:
        for module in filter(is_fsdp2, model.modules()):
            module.reshard()


def _shapes_of_all(microbatches: Sequence[Microbatch], ranks: DataRanks) -> list[tuple[int, int]]:
    """Return the largest rows and columns of each microbatch over all ranks. Raises if their numbers differ."""
    inputs = [Inputs((microbatch,), {}) for microbatch in microbatches]
    shapes: list[list[tuple[int, int]]] = ranks.exchange_objects([(call.num_rows, call.num_columns) for call in inputs])
    if len(numbers := set(map(len, shapes))) > 1:
        raise PlanError(f"ranks were given {min(numbers)} and {max(numbers)} microbatches; give every rank as many")
    return list(map(tuple, np.array(shapes).max(axis=0).tolist()))


def _ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each of some neighbors of these sizes."""
    return pairwise(accumulate(sizes, initial=0))


class _Called(BaseException):
    """Raised when the loss calls the model. Not an `Exception`, so that ``except Exception`` in a loss lets it pass."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.inputs = inputs


class _Recorder:
    """A substitute for the model that raises `_Called` with its inputs."""

    def __init__(self, device: torch.device, trains: bool) -> None:
        self._device, self._trains = device, trains
        self._autocast = self._dtype()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs)
        if (self._trains and not torch.is_grad_enabled()) or self._dtype() != self._autocast:
            raise PlanError(
                "the loss calls the model under torch.autocast or torch.no_grad, which does not reach the stages of a "
                "Pipeline; enter it in the stages' own forward"
            )
        if any(tensor.requires_grad for tensor in inputs.tensors):
            raise PlanError(
                "the loss gives the model an input that carries a gradient, which would end at the first stage of the "
                "Pipeline; compute that input in the first stage"
            )
        raise _Called(inputs)

    def _dtype(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _recorded(loss_fn: LossFunction, step: MicrobatchStep, device: torch.device, trains: bool) -> Inputs:
    """Return the inputs that the loss gives the model for a microbatch."""
    before = random_state.note(device)
    try:
        loss_fn(_Recorder(device, trains), step.microbatch)
    except _Called as called:
        inputs = called.inputs
    else:
        raise PlanError(
            "the loss returned without calling the model that it is given, or caught what the call raised; under a "
            "Pipeline call it once, and let what it raises pass"
        )
    if not random_state.note(device).same_as(before):
        raise PlanError(
            "the loss draws random numbers before it calls the model, and the stages of a Pipeline would draw "
            "different ones; draw them in the first stage"
        )
    return inputs


def _recorded_by_all(
    make: Callable[[], list[MicrobatchStep]], loss_fn: LossFunction, model: Pipeline, device: torch.device,
    loss_factor: float | None, sizes: Sequence[int],
) -> tuple[list[MicrobatchStep], list[Inputs]]:  # fmt: skip
    """Return the microbatch steps and the model's inputs in each, after a check on all ranks.

    An error on one rank is raised on all ranks. Without a ``loss_factor`` nothing is differentiated. ``sizes`` are the
    numbers of microbatches that are to have one shape.
    """
    steps, calls, digest, failure, ranks, trains = [], [], 0, None, model.ranks, loss_factor is not None
    try:
        steps = make()
        # Each stage computes from its own copy of the inputs.
        digest = fingerprint([step.microbatch for step in steps])
        calls = [_recorded(loss_fn, step, device, trains) for step in steps]
        for start, end in _ranges(sizes):
            in_one_shape(calls[start:end])
    except Exception as error:
        # The user's loss may raise anything, and the other ranks must know.
        failure = error
    facts = [digest, zlib.crc32(repr(tuple(sizes)).encode()), loss_factor or 0.0, model.num_stages]
    rows = ranks.exchange_numbers([float(failure is not None), *map(float, facts)])
    failed, digests, cuts, *settings = zip(*rows, strict=True)
    if any(failed):
        raise first_failure(ranks, failure)
    if any(len(set(setting)) > 1 for setting in settings):
        raise PlanError("ranks differ in the number or the wrapper of their stages; give all ranks the same")
    if trains and len(set(cuts)) > 1:
        raise PlanError(
            "ranks were given plans with other schedule steps; give all ranks the last_plan of one call, or leave plan "
            "out"
        )
    # Ranks along pp and tp have the same microbatches.
    for rank in range(ranks.num_weighing):
        if len(set(digests[rank :: ranks.num_weighing])) > 1:
            raise PlanError(
                f"the stages of data rank {rank % ranks.degree} were given microbatches that differ; let collate draw "
                "no random numbers, or the same on all ranks along pp and tp"
            )
    return steps, calls


def _cut_call_over_context(
    prepared: PreparedBatch, agreement: CallAgreement, sizes: Sequence[int], weigh: Weigh, ranks: DataRanks
) -> tuple[PreparedBatch, CallAgreement]:
    """Replace the whole microbatches of a call, and its dummy microbatches, by this rank's parts and their weights."""
    num_real = len(prepared.plan.microbatches)
    wholes = list(prepared.microbatches())
    for _ in range(num_real, agreement.num_microbatches):
        assert agreement.dummy is not None
        wholes.append(agreement.dummy())
    parts = _cut_over_context(wholes, sizes, ranks)
    weights = tuple(counted_weights(weigh(part)) for part in parts[:num_real])
    prepared = replace(prepared, collated=tuple(parts[:num_real]), weights=weights)
    return prepared, replace(agreement, dummy=iter(parts[num_real:]).__next__)


def _cut_over_context(wholes: Sequence[Microbatch], sizes: Sequence[int], ranks: DataRanks) -> list[Microbatch]:
    """Return this rank's part of each microbatch. Those of a schedule step have one length."""
    parts: list[Microbatch] = []
    for start, end in _ranges(sizes):
        parts += stretch_alike(wholes[start:end], ranks.context_rank, ranks.context_degree)
    return parts


def _raise_first_failure(ranks: DataRanks, failure: tuple[int, Exception] | None) -> None:
    """Raise the error of the first failed stage on all ranks. It may have caused the failures of later stages."""
    # A later stage's error is often caused by zeros from this one.
    stage, error = failure or (math.inf, None)
    (first,) = min(ranks.exchange_numbers([float(stage)]))
    if first < math.inf:
        raise first_failure(ranks, error if stage == first else None)


class _Answer:
    """A substitute for the model that returns its known output."""

    def __init__(self, output: Any) -> None:
        self._output, self.num_calls = output, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.num_calls += 1
        return self._output


class _LastStage:
    """Computes the losses on the last stage.

    An error is kept until the last schedule step ends, since the other ranks wait for that. Without an ``opened``
    update nothing is differentiated.
    """

    def __init__(
        self,
        model: Pipeline, steps: Sequence[MicrobatchStep], calls: Sequence[Inputs], loss_fn: LossFunction,
        opened: OpenUpdate | None,
    ) -> None:  # fmt: skip
        self._model, self.steps, self._calls, self._loss_fn, self._opened = model, steps, calls, loss_fn, opened
        # The inputs of the running schedule step, in one shape, and the index of its first microbatch.
        self._inputs, self._start = list[Inputs](), 0
        # Schedules change it later.
        self._with_graph = torch.is_grad_enabled()
        # By index of each microbatch without an error.
        self._terms: dict[int, dict[str, Term]] = {}
        # The first error, whose number is larger than that of any stage.
        self._failure: tuple[int, Exception] | None = None

    def run(self, sizes: Sequence[int], device: torch.device, *, backward: bool) -> None:
        """Run the microbatches in schedule steps of these sizes. Gradients are reduced in the last."""
        self._model.failure = None
        for start, end in _ranges(sizes):
            self._start, self._inputs = start, in_one_shape(self._calls[start:end])
            is_last = end == len(self.steps)
            self._model.step(self._inputs, self._loss, device, backward=backward, reduces=is_last)

    def _loss(self, output: Sequence[Any], place: int) -> Tensor:
        """Return the scalar to differentiate for one microbatch of the running schedule step."""
        index = self._start + place
        try:
            terms = self._terms_of(output, index)
            objective = nothing_of(output)
            if self._opened is not None:
                objective = self._opened.objective(terms, self.steps[index])
        except Exception as error:
            # The user's loss may raise anything. The error broadcast reports that memory ran out.
            if is_out_of_memory(error):
                raise
            # A stage's error comes first, since its number is smaller.
            self._failure = self._failure or (self._model.num_stages, error)
            return nothing_of(output)
        self._terms[index] = {name: _detached(term) for name, term in terms.items()}
        return objective

    def share_terms(self, device: torch.device) -> list[dict[str, Term]]:
        """Return the terms of all microbatches, on every stage. An error on one rank is raised on all ranks."""
        _raise_first_failure(self._model.ranks, self._model.failure or self._failure)
        return _broadcast_terms([self._terms[index] for index in sorted(self._terms)], self._model, device)

    def _terms_of(self, output: Sequence[Any], index: int) -> dict[str, Term]:
        model = self._model
        assert model.structure is not None
        leaves = crop_output(output, model.output, self._inputs[index - self._start], self._calls[index])
        # An evaluation with a graph asks which totals are differentiable.
        if self._opened is None and self._with_graph:
            leaves = [leaf.detach().requires_grad_(leaf.is_floating_point()) for leaf in leaves]
        answer = _Answer(pytree.tree_unflatten(leaves, model.structure))
        with torch.set_grad_enabled(self._with_graph):
            terms = terms_of(self._loss_fn(answer, self.steps[index].microbatch))
        if answer.num_calls != 1:
            raise LossContractError(
                f"the loss called the model {answer.num_calls} times for one microbatch; under a Pipeline call it once"
            )
        return terms


def _detached(term: Term) -> Term:
    """Return a term without its graph. ``requires_grad`` of its total shows whether it had one."""
    return Term(term.total.detach().requires_grad_(term.total.requires_grad), term.weight)


def _broadcast_terms(terms: Sequence[dict[str, Term]], model: Pipeline, device: torch.device) -> list[dict[str, Term]]:
    """Send the detached terms of all microbatches from the last stage to every stage, and return them.

    One message between hosts carries names and weights that are on the host. One message between devices carries the
    remaining numbers.
    """
    microbatches: list[Named] = model.stage_ranks.exchange_objects(list(map(_describe_terms, terms)))[model.last_rank]
    dtype = accumulation_dtype(device)
    if model.has_last_stage:
        values = chain.from_iterable(chain.from_iterable(named.values() for named in terms))
        numbers = torch.stack([value.detach().to(device, dtype) for value in values if isinstance(value, Tensor)])
    else:
        weights = [weight for _, _, weight in chain.from_iterable(microbatches)]
        numbers = torch.empty(len(weights) + weights.count(None), dtype=dtype, device=device)
    dist.broadcast(numbers, group=model.group, group_src=model.last_rank)
    remaining = iter(numbers.unbind())
    shared: list[dict[str, Term]] = []
    for entries in microbatches:
        shared.append({})
        for name, has_graph, weight in entries:
            total = next(remaining).requires_grad_(has_graph)
            shared[-1][name] = Term(total, next(remaining) if weight is None else weight)
    return shared


def _describe_terms(terms: Mapping[str, Term]) -> Named:
    return [
        (name, term.total.requires_grad, None if isinstance(term.weight, Tensor) else term.weight)
        for name, term in terms.items()
    ]
