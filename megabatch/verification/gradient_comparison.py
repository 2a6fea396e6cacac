"""Runs to compare: one update by the accumulator and one by plain torch, on float64 copies of a model."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megabatch.batching.deferred import Deferred
from megabatch.batching.packed_row import OneRow
from megabatch.core.contract import (
    LossFunction,
    Term,
    counted_weights,
    differentiable,
    loss_hooks,
    takes_divisor,
    terms_of,
)
from megabatch.core.samples import Batch, Microbatch, Samples
from megabatch.core.update import add_terms
from megabatch.errors import MegabatchError, PlanError, in_one_line
from megabatch.gradient_accumulator import GradientAccumulator
from megabatch.inspection import random_state
from megabatch.inspection.loss_graph import graph_leaves
from megabatch.inspection.tree import clone
from megabatch.planners.beyond_limits import Shapes
from megabatch.planners.built_in import BuiltIn, Rows, Tokens
from megabatch.torch_private.operations import pytree
from megabatch.verification.float64_copy import (
    float64_copy,
    in_float64,
    stay_in_float64,
    unwrapped,
    wrap_like,
)
from megabatch.verification.mixing import find_failing_module
from megabatch.wrappers.detect import POLICIES, Models, choose_policy

# A parameter's gradient below this fraction of the whole one is rounding; its error is relative to the whole one.
NEGLIGIBLE = 1e-6
Limit = Rows | Tokens
WRONG_BACKWARD = (
    "the backward of the loss does not give the gradient of what it returns (it ignores grad_output, or runs its own "
    "backward); compute the total by differentiable operations"
)
NOTHING = "there is nothing to compare: every gradient is zero; give a batch with targets and an unfrozen model"


class CauseError(Exception):
    """A reason in words that leaves nothing to compare."""


@dataclass(frozen=True)
class UpdateRun:
    """Gradients and sums of one update."""

    gradients: dict[str, Tensor]
    sums: dict[str, Term]
    num_microbatches: int


class GradientComparison:
    """A model, a loss and a batch, with the runs whose gradients are compared."""

    def __init__(
        self, model: Models, loss_fn: LossFunction, batch: Batch, planner: BuiltIn, first: Limit,
        options: Mapping[str, Any], gradient: GradientAccumulator,
    ) -> None:  # fmt: skip
        self.loss_fn, self.first, self._planner_choice = loss_fn, first, planner
        # A float64 copy adds its gradients in float64.
        self.options = {name: value for name, value in options.items() if name != "accumulate_dtype"}
        self.ranks = ranks = gradient.ranks
        if ranks.context_degree > 1:
            raise PlanError(
                "verify was given a mesh with a cp axis, whose ranks see stretches of samples; leave it out"
            )
        self.originals = [model] if isinstance(model, nn.Module) else list(model)
        self.copies = list(map(float64_copy, self.originals))
        self.wrapped_copies = list(map(wrap_like, self.copies, self.originals))
        self.given: Any = self.copies
        self.wrapped: Any = self.wrapped_copies
        self.root: nn.Module = nn.ModuleList(self.copies)
        if isinstance(model, nn.Module):
            self.given, self.wrapped, self.root = self.copies[0], self.wrapped_copies[0], self.copies[0]
        self.device = next(self.root.parameters()).device
        self.takes_divisor = takes_divisor(loss_fn)
        # Trainable tensors of neither the model nor the batch, and all other leaves with their gradients.
        self._outside: set[Tensor] | None = None
        self._others: dict[Tensor, tuple[Tensor | None, Tensor | None]] = {}
        self._drawn = random_state.note(self.device)
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module_tree in {*self.copies, *self.wrapped_copies}:
            stay_in_float64(module_tree)
            for module in module_tree.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    self._buffers.append((module, name, buffer, buffer.detach().clone()))
        self._planner = gradient.planner
        self._given_batch = batch
        self._batch = batch if isinstance(batch, Deferred) else in_float64(batch, torch.device("cpu"))
        shares = ranks.exchange_objects(list(batch) if isinstance(batch, Deferred) else self._batch)[: ranks.degree]
        with catch_causes():
            self.sizes = [len(self._samples(share)) for share in shares]
        if sum(self.sizes) < 2:
            raise PlanError(f"verify was given {sum(self.sizes)} samples; cutting needs at least 2")
        self.shares = _join(list(itertools.compress(shares, self.sizes)))

    def close(self) -> None:
        """Restore gradients of tensors outside of the model."""
        for leaf, (gradient, copied) in self._others.items():
            leaf.grad = gradient
            if gradient is not None and copied is not None:
                gradient.copy_(copied)

    def list_runs(self) -> list[tuple[Limit, str]]:
        """Return limits and policies: every limit with the first policy, and one limit with each other policy."""
        largest = max(self.sizes)
        ragged = 3 if largest > 3 and largest % 2 == 0 else 2
        kind, unit = Rows, 1
        # A packed row of few shapes is limited by tokens alone.
        if isinstance(self._planner_choice, Shapes) and isinstance(self.options.get("batching"), OneRow):
            kind, unit = Tokens, max(max(self._samples(share).lengths) for share in self.shares)
        limits: list[Limit] = [kind(size * unit) for size in (1, ragged, largest)]
        sync = self.options.get("sync", "auto")
        with catch_causes():
            wrapper = self._make_accumulator(self.first, sync).wrapper
            policies = {choose_policy(wrapper, sync)[0]: sync}
        for policy in POLICIES if sync == "auto" else ():
            with contextlib.suppress(PlanError):
                policies.setdefault(choose_policy(wrapper, policy)[0], policy)
        first, *other_policies = policies.values()
        runs = [(limit, first) for limit in dict.fromkeys([self.first, *limits])]
        return runs + [(limits[0], policy) for policy in other_policies]

    def run_whole(self, scale: float = 1.0) -> UpdateRun:
        """Run the backward of ``scale`` times the loss of the whole batch in plain torch."""
        self.root.zero_grad(set_to_none=True)
        quotient, sums = self.compute_loss()
        if any(parameter.grad is not None for parameter in self.root.parameters()) and not self.takes_divisor:
            raise CauseError(WRONG_BACKWARD)
        if not quotient.requires_grad:
            raise CauseError(NOTHING)
        self._note_outside(quotient)
        (quotient * scale).backward()
        gradients = {name: _whole_gradient(parameter) / scale for name, parameter in self._named}
        return UpdateRun(gradients, sums, len(self.shares))

    def check_comparable(self, uncut: UpdateRun) -> None:
        """Raise `CauseError` if equal gradients would prove nothing."""
        totals = [total for total, _ in uncut.sums.values()]
        if not all(value.isfinite().all() for value in [*uncut.gradients.values(), *totals]):
            raise CauseError(
                "the loss or its gradient is not finite on this batch; look at its samples and at the loss"
            )
        if not any(map(torch.any, uncut.gradients.values())):
            raise CauseError(NOTHING)
        drawn, state = random_state.note(self.device), self._state()
        doubled = 1.0 if self.takes_divisor else 2.0
        again = self.run_whole(doubled)
        is_drawing, moved = not random_state.note(self.device).same_as(drawn), self._describe_moved(state)
        if not largest_error(relative_errors(again.gradients, uncut.gradients).values()):
            return
        if not self._repeats(uncut, 1.0) or (is_drawing and self._repeats(uncut, doubled)):
            raise CauseError(
                "the same batch gives another gradient the second time: the model or the loss draws random numbers"
            )
        if not self._repeats(uncut, doubled):
            raise CauseError(WRONG_BACKWARD)
        raise CauseError(
            f"the same batch gives another gradient the second time: {moved} moves in every forward, so that the "
            "number of microbatches changes the gradient; freeze it with eval(), or take a module without such a state"
        )

    def run_accumulated(self, limit: Limit, sync: str) -> UpdateRun:
        """Run an update with the accumulator, on the wrapped copy."""
        with self._restoring_buffers(), catch_causes():
            gradient = self._make_accumulator(limit, sync)
            self._check_runs(gradient)
            try:
                terms = gradient.forward_backward(self._batch, self.loss_fn)
            except MegabatchError:
                raise
            except Exception as error:
                raise CauseError(self._describe_failure(gradient, error)) from error
            gradient.finalize()
            gradients: dict[str, Tensor] = {}
            for (name, _), parameter in zip(self._named, self._trained, strict=True):
                gradients[name] = _whole_gradient(parameter)
                parameter.grad = None
        local_sums: dict[str, Term] = {}
        for name, (total, weight) in terms.items():
            local_sums[name] = Term(total.detach().cpu().double(), float(weight))
        sums: dict[str, Term] = {}
        for rank_sums in self.ranks.exchange_objects(local_sums)[: self.ranks.num_weighing]:
            add_terms(sums, rank_sums)
        assert gradient.last_plan is not None
        number = sum(map(bool, gradient.last_plan.microbatches))
        number = sum(self.ranks.exchange_objects(number)[: self.ranks.degree])
        return UpdateRun(gradients, sums, number)

    def compute_loss(self) -> tuple[Tensor, dict[str, Term]]:
        """Return the loss of the update, and its sums."""
        sums = self.compute_sums()
        parts: list[Tensor] = []
        detached_sums: dict[str, Term] = {}
        for name in differentiable(sums):
            total, weight = sums[name].total, float(sums[name].weight)
            detached_sums[name] = Term(total.detach(), weight)
            if not weight and detached_sums[name].total:
                raise CauseError(
                    f"term {name!r} of the loss has the weight 0 and the total {float(detached_sums[name].total):.6g}, "
                    "so that there is nothing to divide it by; return what it counts"
                )
            parts.append(total / max(weight, 1e-300))
        return torch.stack(parts).sum() if parts else torch.zeros(()), detached_sums

    def compute_sums(self) -> dict[str, Term]:
        """Return the terms of the whole batch."""
        divisors: Counter[str] = Counter()
        sums: dict[str, Term] = {}
        if self.takes_divisor:
            for microbatch in self.microbatches():
                divisors.update(self._count_weights(microbatch))
        for microbatch in self.microbatches():
            add_terms(sums, self.compute_terms(microbatch, divisors))
        return sums

    def run_microbatch(self, microbatch: Microbatch) -> Any:
        """Run what the accumulator runs on each microbatch by itself."""
        return self.compute_terms(microbatch)

    def compute_terms(self, microbatch: Microbatch, divisors: Mapping[str, float] | None = None) -> dict[str, Term]:
        """Return the terms of a microbatch, from the copy without a wrapper; divided totals become sums again."""
        named: dict[str, Any] = {}
        if self.takes_divisor:
            divisors = divisors or dict.fromkeys(self._count_weights(microbatch), 1.0)
            named["divisor"] = divisors if len(divisors) > 1 else next(iter(divisors.values()), 1.0)
        with catch_causes():
            returned = cast(Any, self.loss_fn)(self.given, clone(microbatch), **named)
        # A loss that returns no terms is an error of the caller.
        terms = terms_of(returned)
        if self.takes_divisor and divisors:
            only_divisor = next(iter(divisors.values()))
            for name, (total, weight) in terms.items():
                terms[name] = Term(total * divisors.get(name, only_divisor), weight)
        return terms

    def microbatches(self) -> Iterator[Microbatch]:
        """Yield the samples of all ranks, as one microbatch if they fit together."""
        for share in self.shares:
            samples = self._samples(share)
            yield self._take(samples, range(len(samples)))

    @cached_property
    def everything(self) -> Microbatch:
        """The first microbatch of the whole batch."""
        return next(self.microbatches())

    def _count_weights(self, microbatch: Microbatch) -> dict[str, float]:
        weigh = loss_hooks(self.loss_fn).weigh
        return {} if weigh is None else counted_weights(weigh(microbatch))

    def _make_accumulator(self, limit: Limit, sync: str) -> GradientAccumulator:
        options: dict[str, Any] = {**self.options, "sync": sync}
        return GradientAccumulator(self.wrapped, planner=self._planner_choice.limited(limit), **options)

    @property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.root.named_parameters() if parameter.requires_grad]

    @property
    def _trained(self) -> list[nn.Parameter]:
        modules = nn.ModuleList(map(unwrapped, self.wrapped_copies))
        return [parameter for parameter in modules.parameters() if parameter.requires_grad]

    def _samples(self, batch: Batch) -> Samples:
        return self._planner.samples(batch, loss_hooks(self.loss_fn).prepare)

    def _take(self, samples: Samples, rows: Sequence[int]) -> Microbatch:
        with catch_causes():
            taken = samples.take(rows)
        return in_float64(clone(taken), self.device)

    @contextlib.contextmanager
    def _restoring_buffers(self) -> Generator[None]:
        try:
            yield
        finally:
            self._put_back_buffers()

    @torch.no_grad()
    def _put_back_buffers(self) -> None:
        """Restore every buffer and its contents."""
        for module, name, buffer, before in self._buffers:
            setattr(module, name, buffer.copy_(before))

    def _split(self, gradient: GradientAccumulator) -> Iterator[Microbatch]:
        """Yield this rank's microbatches, as the accumulator makes them."""
        samples = self._samples(self._batch)
        if len(samples):
            for rows in gradient.plan(self._batch).microbatches:
                yield self._take(samples, rows)

    def _check_runs(self, gradient: GradientAccumulator) -> None:
        """Raise on all ranks an error that one would raise in the middle of a call, where the others would wait."""
        failure = None
        if self.ranks.num_all == 1:
            return
        with self._restoring_buffers():
            try:
                for microbatch in self._split(gradient):
                    self.run_microbatch(microbatch)
            # The accumulator raises a cause on all ranks. The user's model may raise anything.
            except CauseError:
                pass
            except Exception as error:
                failure = self._describe_failure(gradient, error)
        for reported in filter(None, self.ranks.exchange_objects(failure)):
            raise CauseError(reported)

    def _describe_failure(self, gradient: GradientAccumulator, error: Exception) -> str:
        """Describe why the batch runs whole and not in microbatches."""
        name = find_failing_module(self.root, self.run_microbatch, list(self._split(gradient)))
        where = "the loss" if name is None else f"module {name!r} ({self._kind(name)})"
        return f"{where} runs on the batch whole and fails on a microbatch of it: {in_one_line(error)}"

    def _kind(self, name: str) -> str:
        return type(self.root.get_submodule(name)).__name__

    def _repeats(self, uncut: UpdateRun, scale: float) -> bool:
        """Return true if a run from the initial state gives the same gradient."""
        self._put_back_buffers()
        random_state.put_back(self._drawn)
        return not largest_error(relative_errors(self.run_whole(scale).gradients, uncut.gradients).values())

    def _state(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.root.named_buffers()}

    def _describe_moved(self, state: dict[str, Tensor]) -> str:
        """Describe the first module with changed buffers; modules with batch statistics come last."""
        now = self._state()
        names = [name for name, buffer in state.items() if name not in now or not torch.equal(now[name], buffer)]
        buffers_of: dict[str, list[str]] = {}
        for name in names:
            module, _, buffer = name.rpartition(".")
            buffers_of.setdefault(module, []).append(repr(buffer))
        if not buffers_of:
            return "what the model or the loss keeps"
        first = min(buffers_of, key=lambda name: hasattr(self.root.get_submodule(name), "track_running_stats"))
        return f"the state of module {first!r} ({self._kind(first)}: {', '.join(buffers_of[first])})"

    def _note_outside(self, quotient: Tensor) -> None:
        """Note trainable leaves that every run reaches; inputs that the loss lets carry a gradient differ per run."""
        leaves = set(graph_leaves([quotient])) - set(self.root.parameters())
        for leaf in leaves:
            self._others.setdefault(leaf, (leaf.grad, None if leaf.grad is None else leaf.grad.clone()))
        reached = leaves if self._outside is None else self._outside & leaves
        inputs = set(map(id, pytree.tree_leaves(self._given_batch)))
        self._outside = {leaf for leaf in reached if id(leaf) not in inputs}


@contextlib.contextmanager
def catch_causes() -> Generator[None]:
    """Turn an error of the library into a cause."""
    try:
        yield
    except MegabatchError as error:
        raise CauseError(str(error)) from error


def relative_errors(cut: dict[str, Tensor], uncut: dict[str, Tensor]) -> dict[str, float]:
    size = float(torch.stack([value.norm() for value in uncut.values()]).norm())
    floor = max(NEGLIGIBLE * size, 1e-300)
    return {name: float((cut[name] - value).norm()) / max(float(value.norm()), floor) for name, value in uncut.items()}


def largest_error(errors: Iterable[float]) -> float:
    """Return the largest error, 0 without one, and NaN if one is."""
    return float(np.max([0.0, *errors]))


def _join(shares: list[Batch]) -> list[Batch]:
    """Join the ranks' samples to one batch if they have the same keys and shapes."""
    if len(set(map(_kind_of, shares))) > 1:
        return shares
    first = shares[0]
    if isinstance(first, Mapping):
        return [{name: torch.cat([cast(Any, share)[name] for share in shares]) for name in first}]
    return [list(itertools.chain.from_iterable(cast(Any, shares)))]


def _kind_of(share: Batch) -> frozenset[Any]:
    rows = share if isinstance(share, Mapping) else {}
    return frozenset((name, value.shape[1:], value.dtype) for name, value in rows.items())


def _whole_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()
