"""Hardware check: the gradient of every n-th update is made twice, on other ranks and in another cut.

A gradient is a sum over samples, so neither the cut nor the rank of a sample matters. Two gradients that differ by more
than rounding have met a fault: of a device, its memory or a link. Four comparisons find it, before the step:

1. Weights that each rank holds whole have the same bits on all. The rank that differs from most is named.
2. Each rank's own gradient of some samples, before ranks add theirs, has the same sum of elements as on the rank before
   it. Where it has not, a third rank makes it too, and the one of three that differs is named.
3. The gradient of the update has the same bits on all ranks that hold it whole, as the weights have.
4. The gradient that is about to be stepped is the one that was made on the other ranks. This finds what is left. The
   rank is named if the gradients differ on some ranks, or in the shards of some, and not on all.
"""

import math
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from megabatch import JointLoss, MegabatchError, Plan
from megabatch.autotune import ModuleSnapshot
from megabatch.train.context import Callback, ForwardBackward, RunContext, check_whole
from megabatch.train.runtime.exit import CrashedError

# Of rounding, relative to the norm.
TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}
# A parameter's norm counts as this share of the gradient's at least: that of a bias may be all rounding.
LEAST_SHARE = 0.1
# By bytes of an element, the integer type with the same bits.
WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Sums of the elements of this rank's gradient of each parameter, and of their squares.
Sums = list[list[float]]
EVERYWHERE = "the gradient is not the one that other ranks make of its samples"


class HardwareCheck(Callback):
    """Compare two gradients of every n-th update (``run.check_hardware_every``). Collective.

    Raises:
        MegabatchError: A loss over coupled samples, or a model that draws random numbers by rank.
        CrashedError: Two gradients differ, or the weights of ranks that hold them whole. No step is made.
    """

    def __init__(self, context: RunContext) -> None:
        config = context.config
        if isinstance(context.loss_fn, JointLoss):
            raise MegabatchError(
                "run.check_hardware_every is set and the loss couples the samples of all ranks; leave the key out"
            )
        self._context, self._ranks, self._every = context, context.ranks, config.run.check_hardware_every or 1
        self._tolerance = TOLERANCES[config.model.compute_dtype or config.model.dtype]
        self._weights = dict(context.model.base.named_parameters())
        self._trained = {name: weight for name, weight in self._weights.items() if weight.requires_grad}
        self._are_whole = not any(isinstance(weight, DTensor) for weight in self._weights.values())
        self._shows_sum = context.model.wrapper.name == "ddp" and config.update.accumulate_dtype is None
        # Gradient of the open update, from the other ranks.
        self._second: list[Tensor] = []
        context.learner.optimizer.register_step_pre_hook(self._compare_gradients)

    def around_backward(self, context: RunContext, batch: Sequence[Any], forward_backward: ForwardBackward) -> None:
        """Make the gradient on other ranks first, in an update that is checked."""
        self._second = []
        if (context.step + 1) % self._every:
            return forward_backward(batch)
        check_whole(context)
        if self._are_whole:
            self._compare_bits("weights", self._weights.items())
        shares = self._ranks.gather(list(batch))
        self._second, neighbor_sums = self._gradient_of(shares, 1)
        with self._added_up() as sums:
            forward_backward(batch)
        shifts = [sums.tolist(), neighbor_sums]
        if self._odd_ranks(shifts):
            self._context.learner.gradient.discard()
            shifts.append(self._gradient_of(shares, 2)[1])
            self._fail(self._odd_ranks(shifts) if self._ranks.size > 1 else {0}, EVERYWHERE)
        if self._shows_sum and self._ranks.size > 2:
            self._compare_bits("gradient", zip(self._trained, self._gradient(), strict=True))
        return None

    def _gradient_of(self, shares: list[list[Any]], shift: int) -> tuple[list[Tensor], Sums]:
        """Return the gradient of the update if each rank has the samples of the ``shift``-th after it, and its sums."""
        learner, device = self._context.learner, self._ranks.device
        samples = shares[(self._ranks.rank + shift) % self._ranks.size]
        snapshots, drawn = [ModuleSnapshot(module) for module in self._context.model.base.modules()], generators(device)
        with self._context.model.losses(), self._added_up() as sums:
            plan = halved(learner.gradient.plan(samples))
            learner.gradient.forward_backward(samples, self._context.loss_fn, plan=plan)
        learner.gradient.finalize(max_norm=learner.max_norm)
        if any(self._ranks.gather(not all(map(torch.equal, drawn, generators(device))))):
            raise MegabatchError(
                "run.check_hardware_every is set and the model draws random numbers by rank (dropout), so no other "
                "rank can make its gradient; set the model's dropout to 0, or leave the key out"
            )
        for snapshot in snapshots:
            snapshot.put_back()
        return [part.clone() for part in self._gradient()], sums.tolist()

    @contextmanager
    def _added_up(self) -> Generator[Tensor]:
        """Add up the elements of this rank's own gradient of each parameter, and their squares: [2, parameters].

        The own gradient of a shard is that of the whole parameter, which a module has once its forward begins.
        """
        numbers = {name: number for number, name in enumerate(self._trained)}
        sums = torch.zeros(2, len(numbers), dtype=torch.float64, device=self._ranks.device)
        hooks: dict[Any, RemovableHandle] = {}

        def add(gradient: Tensor, number: int) -> None:
            sums[0, number] += gradient.sum(dtype=torch.float64)
            sums[1, number] += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()

        def watch(module: nn.Module, _: Any, *, prefix: str) -> None:
            for name, parameter in module.named_parameters(prefix, recurse=False):
                if name in numbers and name not in hooks and not isinstance(parameter, DTensor):
                    hooks[name] = parameter.register_hook(partial(add, number=numbers[name]))

        for prefix, module in self._context.model.base.named_modules():
            if self._are_whole:
                watch(module, None, prefix=prefix)
            else:
                hooks[module] = module.register_forward_pre_hook(partial(watch, prefix=prefix))
        try:
            yield sums
        finally:
            for hook in hooks.values():
                hook.remove()

    def _gradient(self) -> list[Tensor]:
        """Return this rank's part of the gradient of the update."""
        gradients = (torch.zeros_like(part) if part.grad is None else part.grad for part in self._trained.values())
        return [(gradient.to_local() if isinstance(gradient, DTensor) else gradient).detach() for gradient in gradients]

    def _compare_bits(self, title: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Raise where a tensor that each rank holds whole has other bits on some rank."""
        named = {name: tensor.detach().view(WHOLE[tensor.element_size()]) for name, tensor in tensors}
        # One bit changes a sum.
        sums = torch.stack([total.sum(dtype=torch.int64) for total in named.values()]).tolist()
        for name, *rank_sums in zip(named, *self._ranks.gather(sums), strict=True):
            common, number = Counter(rank_sums).most_common(1)[0]
            if number < len(rank_sums):
                odd = {rank for rank, value in enumerate(rank_sums) if value != common or 2 * number <= len(rank_sums)}
                self._fail(odd, f"{title} of {name} with other bits than elsewhere")

    def _odd_ranks(self, shifts: list[Sums]) -> set[int]:
        """Return the ranks whose own gradient of a rank's samples is not what others made. ``shifts``: their sums."""
        rank_sums, size, odd = self._ranks.gather(shifts), self._ranks.size, set[int]()
        for owner in range(size):
            makers = [(owner - shift) % size for shift in range(len(shifts))]
            of_makers = [rank_sums[maker][shift] for shift, maker in enumerate(makers)]
            norms = norms_of([min(copies) for copies in zip(*(squares for _, squares in of_makers), strict=True)])
            for norm, *values in zip(norms, *(sums for sums, _ in of_makers), strict=True):
                for maker, value in zip(makers, values, strict=True):
                    near = sorted(abs(value - peer) for peer in values)[1]
                    odd |= set() if near <= self._tolerance * norm else {maker}
        return odd

    def _compare_gradients(self, *_: object) -> None:
        """Raise where the gradient that is about to be stepped is not the one that other ranks have made."""
        second, self._second = self._second, []
        if not second:
            return
        references = [reference.double() for reference in second]
        differences = [part.double() - reference for part, reference in zip(self._gradient(), references, strict=True)]
        local_squares, squares = ([float(part.square().sum()) for part in parts] for parts in (differences, references))
        full_squares = local_squares if self._are_whole else self._ranks.sum(local_squares)
        norms = norms_of(squares if self._are_whole else self._ranks.sum(squares))
        faults = self._ranks.gather(self._is_beyond(local_squares, norms))
        wrong = {rank for rank, is_wrong in enumerate(faults) if is_wrong}
        if wrong or self._is_beyond(full_squares, norms):
            self._fail(wrong if len(wrong) < self._ranks.size else set(), EVERYWHERE)

    def _is_beyond(self, squares: Sequence[float], norms: Sequence[float]) -> bool:
        """Return True if the difference of some parameter is larger than rounding."""
        return any(not math.sqrt(square) <= self._tolerance * norm for square, norm in zip(squares, norms, strict=True))

    def _fail(self, odd: set[int], reason: str) -> None:
        """Raise the error on all ranks, with the ranks at fault where they are known."""
        name = " or ".join(f"rank {rank} of {self._ranks.size}" for rank in sorted(odd)) or "a rank that is not known"
        raise CrashedError(
            f"a fault of the hardware at {name}, found in update {self._context.step + 1}: {reason}; no step was "
            "made: look at its device, and resume from the last checkpoint"
        )


def norms_of(squares: Sequence[float]) -> list[float]:
    """Return the norm by which the difference of each parameter is judged, of squared norms."""
    floor = LEAST_SHARE * math.sqrt(sum(squares))
    return [max(math.sqrt(square), floor) for square in squares]


def halved(plan: Plan) -> Plan:
    """Return the plan with each microbatch in two, the last one first."""
    halves = [half for rows in reversed(plan.microbatches) for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :])]
    return replace(plan, microbatches=tuple(half for half in halves if half))


def generators(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a forward may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
