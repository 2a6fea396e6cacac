"""Memory ran out in a microbatch: what it has added is taken back, and it runs again in parts, its gradient exact.

A backward that fails half-way has given some parameters their gradient and others none. A gradient that was not there
before is dropped. One that was cannot be told from the sum any more, so the parts are differentiated for the others
alone. Where nothing fails, nothing is done to a gradient.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megabatch.batching.tree import to_device
from megabatch.engine.call import MicrobatchStep
from megabatch.engine.oom_broadcast import is_of_backend, is_out_of_memory, rank_of_process, whoever_runs
from megabatch.engine.prepare import PreparedBatch
from megabatch.engine.update import OpenUpdate
from megabatch.errors import MegabatchError, Shortage, in_one_line
from megabatch.losses.contract import WEIGHT_TOLERANCE, LossFunction, Term, differentiable, takes_divisor, weigh_of
from megabatch.planning.plan import split_in_halves
from megabatch.wrappers.base import Wrapper, local
from megabatch.wrappers.gradients import find_functions_beside, graph_leaves
from megabatch.wrappers.mesh import num_collectives

AGAIN = "so that it cannot run again in parts"
Rows = tuple[int, ...]  # samples of the batch
Work = Callable[[MicrobatchStep], dict[str, Term]]  # forward and backward of a microbatch


class GradientState(NamedTuple):
    """How things stood before a microbatch was tried."""

    gradients: list[tuple[nn.Parameter, Tensor, int]]  # those that were there, with the number of writes to each
    num_collectives: int | None  # that this process has begun


class PartError(Exception):
    """A part has done what it was not to do; told as the reason for which a microbatch cannot run in parts."""


class OOMRetry:
    """Runs the microbatches of a call, and those that do not fit in memory in parts. Notes the parts in the share."""

    def __init__(self, share: PreparedBatch, loss_fn: LossFunction, wrapper: Wrapper, opened: OpenUpdate) -> None:
        self._share, self._weigh, self._wrapper, self._opened = share, weigh_of(loss_fn), wrapper, opened
        self._is_divided = takes_divisor(loss_fn)

    def run(self, step: MicrobatchStep, work: Work) -> list[dict[str, Term]]:
        """The sums of a microbatch, or of its parts. Raises `MegabatchError` where it can run in no way."""
        return self._run(step, self._share.rows(step.index), work)

    def check_reach(self, terms: dict[str, Term], step: MicrobatchStep) -> None:
        """Raise where a part would differentiate for what is not of the model: what was added to that is not known.

        And where a backward inside of the whole's may have given a parameter only a part of its gradient, while that
        of the part does not come there.
        """
        known = set(map(id, self._wrapper.parameters))
        totals = [terms[name].total for name in differentiable(terms)]
        for leaf in graph_leaves(totals):
            if id(leaf) not in known:
                raise PartError(
                    f"the loss reaches a trainable tensor of shape {tuple(leaf.shape)} that is not the model's"
                )
        if step.wanted is not None and (beside := find_functions_beside(totals, step.wanted)):
            raise PartError(f"{beside[0]} is beside the way to the gradients that are still missing")

    def _run(self, step: MicrobatchStep, rows: Rows, work: Work) -> list[dict[str, Term]]:
        before = self._before()
        self._opened.taking_back.clear()
        try:
            sums = work(step)
            if step.is_part:
                self._check_part(step, before)
        except Exception as error:
            if is_out_of_memory(error):
                self._check(step, rows, before, error)
            elif step.is_part:
                whole = self._share.rows(step.index)
                raise self._failure(step, whole, "and failed when it ran again in parts", error) from error
            else:
                raise
        else:
            if step.is_part:
                self._share.parts.setdefault(step.index, []).append(() if step.is_dummy else rows)
            return [sums]
        # Out of the handler, which keeps the failed graph in memory.
        if self._wrapper.device.type != "cpu":
            torch.get_device_module(self._wrapper.device).empty_cache()
        wanted = self._take_back(before, step)
        step = replace(step, is_part=True, wanted=wanted, retold=self._added_elsewhere() | Counter(step.retold))
        return [each for half in split_in_halves(rows) for each in self._run(self._part(step, half), half, work)]

    def _added_elsewhere(self) -> Counter[str]:
        return Counter(what for what, _ in self._opened.taking_back)

    def _before(self) -> GradientState:
        # With an optimizer that steps in backward nothing runs again, and a gradient is to be freed where it steps.
        parameters = [] if self._opened.steps_in_backward else self._wrapper.parameters
        existing = [(each, found, found._version) for each in parameters if (found := each.grad) is not None]
        return GradientState(existing, self._num_collectives())

    def _num_collectives(self) -> int | None:
        return num_collectives() if self._wrapper.ranks.num_all > 1 else 0

    def _take_back(self, before: GradientState, step: MicrobatchStep) -> Sequence[nn.Parameter] | None:
        """Drop the gradients that are new; the parameters that still lack theirs, None for all."""
        was_there = {id(parameter) for parameter, _, _ in before.gradients}
        for parameter in self._wrapper.parameters:
            if id(parameter) not in was_there:
                parameter.grad = None
        received = _received(before)
        return self._lacking(step, received) if received else step.wanted

    def _lacking(self, step: MicrobatchStep, received: set[int]) -> list[nn.Parameter]:
        wanted = self._wrapper.parameters if step.wanted is None else step.wanted
        return [each for each in wanted if id(each) not in received]

    def _part(self, step: MicrobatchStep, rows: Rows) -> MicrobatchStep:
        try:
            microbatch, counted, weighed = self._share.part(rows, self._weigh)
            microbatch = self._share.samples.owned(microbatch, to_device(microbatch, self._wrapper.device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._failure(step, rows, "and again before its part was run", error) from error
        return replace(step, microbatch=microbatch, counted=counted, weighed=weighed)

    def _check(self, step: MicrobatchStep, rows: Rows, before: GradientState, error: Exception) -> None:
        """Raise where a microbatch that did not fit cannot run in parts."""
        ranks, why = self._wrapper.ranks, None
        now = self._num_collectives()
        sent = now is None or now != before.num_collectives or is_of_backend(error)
        if ranks.num_all > 1 and (sent or not self._wrapper.runs_alone):
            why = f"in which ranks wait for each other, {AGAIN}"
        elif not self._wrapper.runs_alone:
            why = f"in which {self._wrapper.kind_name} reduces, {AGAIN}"
        elif self._opened.steps_in_backward:
            why = f"and an optimizer steps in backward, {AGAIN}"
        elif len({each.device for each in self._wrapper.parameters}) > 1:
            why = f"whose parameters are on several devices, {AGAIN}"
        elif _share_writes([found for _, found, _ in before.gradients]):
            why = f"whose gradients are views of one tensor, {AGAIN}"
        elif self._is_divided:
            why = f"whose loss may run a backward of its own, {AGAIN}"
        elif not self._lacking(step, _received(before)):  # a backward inside of it may have begun all of them
            why = f"in which every parameter had some gradient, {AGAIN}"
        elif len(rows) > 1 and not self._adds_up(step, rows):
            why = f"whose weight is not the sum of its samples', {AGAIN}"
        if why is not None or len(rows) < 2:
            raise self._failure(step, rows, why or "", error) from error

    def _adds_up(self, step: MicrobatchStep, rows: Rows) -> bool:
        """Whether the weights of the halves are together that of the whole, which the ranks were told."""
        weights = [self._share.part(half, self._weigh)[1] for half in split_in_halves(rows)]
        if any(each.keys() != step.counted.keys() for each in weights):
            return False
        sums = {name: sum(each[name] for each in weights) for name in step.counted}
        return all(abs(sums[name] - whole) <= WEIGHT_TOLERANCE * whole for name, whole in step.counted.items())

    def _check_part(self, step: MicrobatchStep, before: GradientState) -> None:
        """Raise where a part has done what it was not to do."""
        if self._num_collectives() != before.num_collectives:
            raise PartError("it has messages between ranks, and another rank sends fewer")
        received, wanted = _received(before), step.wanted
        if wanted is not None and not received <= set(map(id, wanted)):
            raise PartError("a backward inside of its backward gives a parameter its gradient twice")
        if wanted is not None and (missing := Counter(step.retold) - self._added_elsewhere()):
            raise PartError(f"{min(missing)} is beside the way to the gradients that are still missing")

    def _failure(self, step: MicrobatchStep, rows: Rows, why: str, error: Exception) -> MegabatchError:
        """The error of a microbatch that can run in no way, and what to start again with."""
        plan, who = self._share.plan, whoever_runs(self._wrapper.ranks.num_all)
        bound = plan.bound_of(split_in_halves(rows)) if len(rows) > 1 else None
        if bound is not None:
            tokens = f"{plan.tokens_of(rows)} tokens{' with padding' if plan.padded else ''}"
            what = f"microbatch {step.index} ({len(rows)} samples, {tokens}), {why}"
            change = f"start again with micro_batch_size={bound.samples}"
            if (most := max(bound.tokens, *plan.lengths)) < plan.tokens_of(rows):  # a cap holds the longest sample
                change += f" or max_microbatch_tokens={most}"
        else:
            what = (
                f"sample {rows[0]} of its batch alone ({plan.tokens_of(rows)} tokens)" if rows else "a dummy microbatch"
            )
            change = "shorten the sample, checkpoint activations, or shard the model over more ranks"
        failure = MegabatchError(f"{who} ran out of memory in {what}; {change} ({in_one_line(error)})")
        failure.shortage = Shortage(rank_of_process(), rows, bound)
        return failure


def _share_writes(tensors: Sequence[Tensor]) -> bool:
    """Whether writes to one count for another, as in DDP's buckets."""
    dense = [local(tensor) for tensor in tensors if tensor.layout == torch.strided]
    return len({tensor.untyped_storage().data_ptr() for tensor in dense}) < len(dense)


def _received(before: GradientState) -> set[int]:
    """Ids of the parameters to whose gradient something was added."""
    return {
        id(parameter)
        for parameter, found, version in before.gradients
        if parameter.grad is not found or found._version != version
    }
