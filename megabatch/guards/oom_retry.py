"""Retry after out of memory: a microbatch is undone and runs again in parts, with the same exact gradient.

A backward that fails half-way has reached some parameters and not others. If a parameter had no gradient before, its
new gradient is dropped. If it had one, the new part cannot be separated from the sum. The parts then skip this
parameter. Without a failure, gradients are not touched.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megabatch.core.call import MicrobatchStep, weights_of
from megabatch.core.contract import WEIGHT_TOLERANCE, Term, Weigh, counted_weights
from megabatch.core.extension import Call
from megabatch.core.mesh import num_collectives
from megabatch.core.samples import Microbatch, Samples
from megabatch.core.wrapper import local
from megabatch.errors import MegabatchError, MicrobatchLimit, Shortage, in_one_line
from megabatch.guards.receipts import Receipt
from megabatch.inspection.error_kinds import is_of_backend, is_out_of_memory, rank_of_process, whoever_runs
from megabatch.inspection.loss_graph import find_functions_beside, graph_leaves
from megabatch.inspection.tree import to_device
from megabatch.planning.plan_numbers import split_in_halves
from megabatch.torch_private.autograd import count_writes

AGAIN = "so that it cannot run again in parts"
Rows = tuple[int, ...]  # samples of the batch
Run = Callable[[MicrobatchStep], dict[str, Term]]  # forward and backward of a microbatch


class PartError(Exception):
    """A part has broken a rule, which is the reason why its microbatch cannot run in parts."""


@dataclass(frozen=True)
class PartStep(MicrobatchStep):
    """Some samples of a microbatch that did not fit in memory."""

    parameters: Sequence[nn.Parameter] = ()  # of the model
    wanted: Sequence[nn.Parameter] | None = None  # those that still lack its gradient; None: all
    retold: Mapping[str, int] = field(default_factory=dict[str, int])  # what else was taken back, and how often

    def differentiate(self, objective: Tensor) -> None:
        """Run the backward for the parameters that still lack their gradient.

        Raises `PartError` in two cases. The loss reaches a trainable tensor outside of the model: nobody knows what the
        failed backward has added to its gradient. Or this backward leaves out a Python autograd function: one that runs
        a backward of its own may have given a parameter a part of its gradient, and the rest would be missing.
        """
        known = set(map(id, self.parameters))
        for leaf in graph_leaves([objective]):
            if id(leaf) not in known:
                raise PartError(
                    f"the loss reaches a trainable tensor of shape {tuple(leaf.shape)} that is not the model's"
                )
        if self.wanted is not None and (beside := find_functions_beside([objective], self.wanted)):
            raise PartError(f"{beside[0]} is beside the way to the gradients that are still missing")
        objective.backward(inputs=None if self.wanted is None else list(self.wanted))


class OOMRetry:
    """Runs a microbatch that did not fit in memory again, in parts. Notes the parts in the prepared batch."""

    def __init__(self, call: Call) -> None:
        self._prepared, self._weigh = call.prepared, call.hooks.weigh
        self._wrapper, self._opened, self._takes_divisor = call.wrapper, call.opened, call.takes_divisor

    def prepare_parts(
        self, step: MicrobatchStep, error: Exception, before: Receipt, num_sent: int | None, run: Run
    ) -> Callable[[], list[dict[str, Term]]]:
        """Return a function that runs ``step`` in parts.

        Call it after the ``except`` block of ``error``, which until then keeps the failed graph in memory.

        Args:
            step: The microbatch that ran out of memory.
            error: The error that it raised.
            before: The gradients before the microbatch.
            num_sent: Collectives that the process had begun before the microbatch.
            run: Runs the forward and backward of one part.

        Raises:
            MegabatchError: The microbatch cannot run in parts.
        """
        rows = self._prepared.rows(step.index)
        self._check(step, rows, before, num_sent, error)
        return functools.partial(self._run_parts, step, rows, before, run)

    def _run_parts(self, step: MicrobatchStep, rows: Rows, before: Receipt, run: Run) -> list[dict[str, Term]]:
        # The failed graph left fragments that the halves cannot use.
        if self._wrapper.device.type != "cpu":
            torch.get_device_module(self._wrapper.device).empty_cache()
        # Counts of experts and the like were added in the failed forward, and are added again.
        wanted, retold = self._take_back(before, step), self._added_elsewhere()
        if isinstance(step, PartStep):
            retold |= Counter(step.retold)
        # Halves, so that a few retries find a size that fits.
        sums: list[dict[str, Term]] = []
        for half in split_in_halves(rows):
            sums += self._run_part(self._part(step, half, wanted, retold), half, run)
        return sums

    def _run_part(self, step: PartStep, rows: Rows, run: Run) -> list[dict[str, Term]]:
        before, num_sent = Receipt.of(self._wrapper.parameters), self._num_collectives()
        self._opened.taking_back.clear()
        try:
            sums = run(step)
            self._check_part(step, before, num_sent)
        except Exception as error:
            if not is_out_of_memory(error):
                rows_of_step = self._prepared.rows(step.index)
                raise self._failure(step, rows_of_step, "and failed when it ran again in parts", error) from error
            self._check(step, rows, before, num_sent, error)
        else:
            self._prepared.parts.setdefault(step.index, []).append(() if step.is_dummy else rows)
            return [sums]
        return self._run_parts(step, rows, before, run)

    def _added_elsewhere(self) -> Counter[str]:
        return Counter(term for term, _ in self._opened.taking_back)

    def _num_collectives(self) -> int | None:
        return 0 if self._wrapper.ranks.is_alone else num_collectives()

    def _take_back(self, before: Receipt, step: MicrobatchStep) -> Sequence[nn.Parameter] | None:
        """Drop the gradients that are new. Return the parameters that still lack theirs. None means all of them."""
        for parameter, was in zip(before.parameters, before.gradients, strict=True):
            # All that such a gradient holds is from the failed backward.
            if was is None:
                parameter.grad = None
        received = _received(before)
        return self._lacking(step, received) if received else _wanted(step)

    def _lacking(self, step: MicrobatchStep, received: set[int]) -> list[nn.Parameter]:
        wanted = _wanted(step)
        wanted = self._wrapper.parameters if wanted is None else wanted
        return [parameter for parameter in wanted if id(parameter) not in received]

    def _part(
        self, step: MicrobatchStep, rows: Rows, wanted: Sequence[nn.Parameter] | None, retold: Mapping[str, int]
    ) -> PartStep:
        try:
            microbatch, announced = _take_part(self._prepared.samples, rows, self._weigh)
            microbatch = self._prepared.samples.owned(microbatch, to_device(microbatch, self._wrapper.device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._failure(step, rows, "and again before its part was run", error) from error
        parameters = self._wrapper.parameters
        return PartStep(microbatch, step.index, announced, step.is_dummy, parameters, wanted, retold)

    def _check(self, step: MicrobatchStep, rows: Rows, before: Receipt, num_sent: int | None, error: Exception) -> None:
        """Raise `MegabatchError` if a microbatch that did not fit cannot run in parts."""
        is_alone, is_local = self._wrapper.ranks.is_alone, self._wrapper.is_microbatch_local
        now = self._num_collectives()
        # After a collective, other ranks wait for the rest of the backward: a second try would not match theirs.
        sent = now is None or now != num_sent or is_of_backend(error)
        devices = {parameter.device for parameter in self._wrapper.parameters}
        obstacles = [
            (not is_alone and (sent or not is_local), f"in which ranks wait for each other, {AGAIN}"),
            (not is_local, f"in which {self._wrapper.kind_name} reduces, {AGAIN}"),
            (self._opened.keeps_cut is not None, f"and {self._opened.keeps_cut}"),
            (self._prepared.plan.shapes, "and Shapes leaves it no other shape"),
            (len(devices) > 1, f"whose parameters are on several devices, {AGAIN}"),
            (_share_writes(before.gradients), f"whose gradients are views of one tensor, {AGAIN}"),
            (self._takes_divisor, f"whose loss may run a backward of its own, {AGAIN}"),
            # A backward inside of the loss may have begun all parameters.
            (not self._lacking(step, _received(before)), f"in which every parameter had some gradient, {AGAIN}"),
        ]
        why = next((reason for holds, reason in obstacles if holds), None)
        if why is None and len(rows) > 1 and not self._adds_up(step, rows):
            why = f"whose weight is not the sum of its samples', {AGAIN}"
        if why is not None or len(rows) < 2:
            raise self._failure(step, rows, why or "", error) from error

    def _adds_up(self, step: MicrobatchStep, rows: Rows) -> bool:
        """Return True if the weights of the halves add up to the weight that was announced to the ranks."""
        sums: Counter[str] = Counter()
        for half in split_in_halves(rows):
            _, weights = _take_part(self._prepared.samples, half, self._weigh)
            if weights.keys() != step.announced.keys():
                return False
            sums.update(weights)
        return all(abs(sums[name] - weight) <= WEIGHT_TOLERANCE * weight for name, weight in step.announced.items())

    def _check_part(self, step: PartStep, before: Receipt, num_sent: int | None) -> None:
        """Raise `PartError` if a part sent a message between ranks, or added a gradient twice or not at all."""
        if self._num_collectives() != num_sent:
            raise PartError("it has messages between ranks, and another rank sends fewer")
        if step.wanted is None:
            return
        if not _received(before) <= set(map(id, step.wanted)):
            raise PartError("a backward inside of its backward gives a parameter its gradient twice")
        if missing := Counter(step.retold) - self._added_elsewhere():
            raise PartError(f"{min(missing)} is beside the way to the gradients that are still missing")

    def _failure(self, step: MicrobatchStep, rows: Rows, why: str, error: Exception) -> MegabatchError:
        """Return the error for a microbatch that cannot run at all. It names the settings to start again with."""
        plan, process = self._prepared.plan, whoever_runs(self._wrapper.ranks.num_all)
        # Half of what did not fit is the next setting to try.
        bound = plan.halved(rows)
        if bound is not None:
            tokens = f"{plan.tokens_of(rows)} tokens{' with padding' if plan.padded else ''}"
            piece = f"microbatch {step.index} ({len(rows)} samples, {tokens}), {why}"
            change = f"start again with micro_batch_size={bound.samples}"
            # The limit must still hold the longest sample.
            min_tokens = max(bound.tokens, *plan.lengths)
            if min_tokens < plan.tokens_of(rows):
                change += f" or max_microbatch_tokens={min_tokens}"
        elif rows and plan.samples.count(sample := plan.samples[rows[0]]) > 1:
            num_tokens = plan.tokens_of(rows)
            bound = MicrobatchLimit(1, num_tokens // 2)
            piece = f"a chunk of {num_tokens} tokens of sample {sample}"
            change = f"start again with max_microbatch_tokens={num_tokens // 2}"
        else:
            piece = (
                f"sample {rows[0]} of its batch alone ({plan.tokens_of(rows)} tokens)" if rows else "a dummy microbatch"
            )
            change = "shorten the sample, checkpoint activations, or shard the model over more ranks"
        failure = MegabatchError(f"{process} ran out of memory in {piece}; {change} ({in_one_line(error)})")
        failure.shortage = Shortage(rank_of_process(), rows, bound)
        return failure


def _share_writes(gradients: Sequence[Tensor | None]) -> bool:
    """Return True if gradients share memory, so that a write to one counts for another, as in DDP's buckets."""
    # Sparse gradients have no storage of their own, and a write to one never reaches another.
    dense = [local(gradient) for gradient in gradients if gradient is not None and gradient.layout == torch.strided]
    return len({gradient.untyped_storage().data_ptr() for gradient in dense}) < len(dense)


def _wanted(step: MicrobatchStep) -> Sequence[nn.Parameter] | None:
    return step.wanted if isinstance(step, PartStep) else None


def _received(before: Receipt) -> set[int]:
    """Return the ids of the parameters to whose gradient something was added."""
    pairs = zip(before.parameters, before.gradients, strict=True)
    had = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
    return {
        id(parameter)
        for (parameter, gradient), writes in zip(had, before.writes, strict=True)
        if parameter.grad is not gradient or count_writes(gradient) != writes
    }


def _take_part(samples: Samples, rows: tuple[int, ...], weigh: Weigh | None) -> tuple[Microbatch, dict[str, float]]:
    """Return samples as a microbatch on the CPU, and its announced weights."""
    microbatch = samples.take(rows)
    if weigh is None:
        return microbatch, {}
    stated_weight = samples.given_weight(rows)
    return microbatch, weights_of(weigh, microbatch) if stated_weight is None else counted_weights(stated_weight)
