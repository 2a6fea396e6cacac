"""The way through torch's pipeline schedules: one step runs all microbatches of a call.

The loss stays what it is. On every rank it is called with something that only notes what the model is given, and on the
last stage once more, with something that returns what the stages computed from that.
"""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from megabatch import rng
from megabatch.alarm import is_out_of_memory
from megabatch.contract import LossFunction, Term, Weigh, accumulation_dtype, terms_of
from megabatch.errors import LossContractError, PlanError
from megabatch.mesh import DataRanks
from megabatch.run import Agreement, Turn, told_failure, turns
from megabatch.shapes import Inputs, cut_back, in_one_shape
from megabatch.share import Share
from megabatch.stages import Pipeline, PipelineReducer, nothing_of
from megabatch.update import OpenUpdate, add_terms

__all__ = ["Pipeline"]

SEEN_BYTES = 1 << 16  # of each tensor, in the number by which stages compare their microbatches
Named = list[tuple[str, bool, float | None]]  # of a microbatch: terms, whether differentiable, weights of the host


def filled(reducer: PipelineReducer, share: Share, agreement: Agreement) -> Agreement:
    """The agreement, with as many stand-ins more as the schedule needs; the same on all ranks."""
    num_microbatches = reducer.pipeline.filled(agreement.num_microbatches)
    stand_in = agreement.stand_in or share.samples.stand_in  # without the former this rank has samples
    return replace(agreement, num_microbatches=num_microbatches, stand_in=stand_in)


def run(
    share: Share,
    agreement: Agreement,
    weigh: Weigh | None,
    loss_fn: LossFunction,
    reducer: PipelineReducer,
    opened: OpenUpdate,
) -> dict[str, Term]:
    """Add a call's gradient to the open update; returns its sums, the same on every stage.

    What the loss or a stage raises is raised on all ranks, when the step has come to its end. A stage that leaves its
    wrapper's collectives half-way keeps its data ranks waiting, as it does without a pipeline.
    """
    opened.open_call(agreement)
    if not agreement.num_microbatches:
        return {}
    made, calls = _recorded_by_all(
        lambda: list(turns(share, agreement, weigh, reducer, reducer.device)), loss_fn, reducer
    )
    last = _LastStage(reducer.pipeline, made, calls, loss_fn, opened)
    with reducer.call():
        reducer.pipeline.step(last.inputs, last.loss, reducer.device)
    _raise_told(reducer.ranks, reducer.pipeline.failure or last.failure)
    sums: dict[str, Term] = {}
    for terms, turn in zip(
        _told_terms([last.terms[index] for index in sorted(last.terms)], reducer), made, strict=True
    ):
        if not reducer.pipeline.has_last_stage:
            opened.objective(terms, turn)  # to note what it has noted on the last stage
        add_terms(sums, opened.add(terms, turn))
    return sums


class _Called(BaseException):
    """The model was called. Not an Exception, so that a loss that handles those lets it pass."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.inputs = inputs


class _Recorder:
    """Stands for the model until it is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._autocast = self._dtype()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = Inputs(args, kwargs)
        if not torch.is_grad_enabled() or self._dtype() != self._autocast:
            raise PlanError(
                "the loss calls the model under torch.autocast or torch.no_grad, which does not reach the stages of a "
                "Pipeline; enter it in the stages' own forward"
            )
        if any(each.requires_grad for each in inputs.tensors):
            raise PlanError(
                "the loss gives the model an input that carries a gradient, which would end at the first stage of the "
                "Pipeline; compute that input in the first stage"
            )
        raise _Called(inputs)

    def _dtype(self) -> torch.dtype | None:
        kind = self._device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _recorded(loss_fn: LossFunction, turn: Turn, device: torch.device) -> Inputs:
    """What the loss gives the model for a microbatch."""
    before = rng.note(device)
    try:
        loss_fn(_Recorder(device), turn.microbatch)
    except _Called as called:
        inputs = called.inputs
    else:
        raise PlanError(
            "the loss returned without calling the model that it is given, or caught what the call raised; under a "
            "Pipeline call it once, and let what it raises pass"
        )
    if not rng.note(device).same_as(before):
        raise PlanError(
            "the loss draws random numbers before it calls the model, and the stages of a Pipeline would draw "
            "different ones; draw them in the first stage"
        )
    return inputs


def _recorded_by_all(
    make: Callable[[], list[Turn]], loss_fn: LossFunction, reducer: PipelineReducer
) -> tuple[list[Turn], list[Inputs]]:
    """The turns, and what the loss gives the model in each; every rank knows that they are well on all the others."""
    made, calls, failure, ranks = [], [], None, reducer.ranks
    try:
        made = make()
        calls = [_recorded(loss_fn, turn, reducer.device) for turn in made]
        in_one_shape(calls)
    except Exception as error:  # whatever the user's loss raises, the other ranks must hear of it
        failure = error
    seen = _fingerprint(made)
    rows = ranks.exchange([float(failure is not None), seen, reducer.loss_factor, reducer.pipeline.num_stages])
    if any(failed for failed, *_ in rows):
        raise told_failure(ranks, failure)
    if len({tuple(rest) for _, _, *rest in rows}) > 1:
        raise PlanError("ranks differ in the number or the wrapper of their stages; give all ranks the same")
    for data_rank in range(ranks.degree):
        if len({seen for _, seen, *_ in rows[data_rank :: ranks.degree]}) > 1:
            raise PlanError(
                f"the stages of data rank {data_rank} were given microbatches that differ; let collate draw no random "
                "numbers, or the same on all ranks along pp and tp"
            )
    return made, calls


def _fingerprint(turns: Sequence[Turn]) -> int:
    """A number that differs where microbatches do: of their shapes, and of what the host can see of them."""
    found = 0
    for leaf in pytree.tree_leaves([turn.microbatch for turn in turns]):
        if isinstance(leaf, Tensor):
            found = zlib.crc32(repr((leaf.shape, leaf.dtype)).encode(), found)
            if leaf.device.type == "cpu":  # reading others would wait
                start = leaf.detach().reshape(-1)[: SEEN_BYTES // leaf.element_size()]
                found = zlib.crc32(start.contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def _raise_told(ranks: DataRanks, failure: tuple[int, Exception] | None) -> None:
    """Raise on all ranks what the first stage met that met anything: others may have failed for its sake."""
    stage, error = failure or (math.inf, None)
    first = min(told for (told,) in ranks.exchange([float(stage)]))
    if first < math.inf:
        raise told_failure(ranks, error if stage == first else None)


class _Answer:
    """Stands for the model where its output is known."""

    def __init__(self, output: Any) -> None:
        self._output, self.num_calls = output, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.num_calls += 1
        return self._output


class _LastStage:
    """Computes losses where the last stage is; what one raises is kept, since the others wait for the step's end."""

    def __init__(
        self,
        model: Pipeline,
        turns: Sequence[Turn],
        calls: Sequence[Inputs],
        loss_fn: LossFunction,
        opened: OpenUpdate,
    ) -> None:
        self._model, self._turns, self._calls, self._loss_fn, self._opened = model, turns, calls, loss_fn, opened
        self.inputs = in_one_shape(calls)
        self.terms: dict[int, dict[str, Term]] = {}  # of each microbatch that was well
        self.failure: tuple[int, Exception] | None = None  # the first, and a number that comes after the stages

    def loss(self, output: Sequence[Any], index: int) -> Tensor:
        """What is differentiated of one microbatch."""
        try:
            terms = self._terms_of(output, index)
            objective = self._opened.objective(terms, self._turns[index])
        except Exception as error:  # of any kind: the user's loss is called in there
            if is_out_of_memory(error):  # of which the others hear otherwise
                raise
            self.failure = self.failure or (self._model.num_stages, error)
            return nothing_of(output)
        self.terms[index] = terms
        return objective

    def _terms_of(self, output: Sequence[Any], index: int) -> dict[str, Term]:
        model = self._model
        assert model.structure is not None  # the stage has just returned it
        leaves = cut_back(output, model.output, self.inputs[index], self._calls[index])
        answer = _Answer(pytree.tree_unflatten(leaves, model.structure))
        terms = terms_of(self._loss_fn(answer, self._turns[index].microbatch))
        if answer.num_calls != 1:
            raise LossContractError(
                f"the loss called the model {answer.num_calls} times for one microbatch; under a Pipeline call it once"
            )
        return terms


def _told_terms(terms: Sequence[dict[str, Term]], reducer: PipelineReducer) -> list[dict[str, Term]]:
    """The terms of all microbatches, detached, as the last stage tells them.

    Names and the host's weights go by a message between hosts, the rest by one between devices.
    """
    model = reducer.pipeline
    named: list[Named] = [
        [(name, each.total.requires_grad, None if isinstance(each.weight, Tensor) else each.weight)
         for name, each in one.items()]
        for one in terms
    ]  # fmt: skip
    named = reducer.stage_ranks.exchange_objects(named)[model.last_rank]
    length = sum(1 + (weight is None) for one in named for _, _, weight in one)
    values = [value for one in terms for each in one.values() for value in each if isinstance(value, Tensor)]
    dtype = accumulation_dtype(reducer.device)
    if model.has_last_stage:
        numbers = torch.stack([value.detach().to(reducer.device, dtype) for value in values])
    else:
        numbers = torch.empty(length, dtype=dtype, device=reducer.device)
    dist.broadcast(numbers, group=model.group, group_src=model.last_rank)
    told = iter(numbers.unbind())
    return [
        {name: Term(next(told).requires_grad_(grad), next(told) if weight is None else weight)
         for name, grad, weight in one}
        for one in named
    ]  # fmt: skip
