"""Runs to compare: one update by the accumulator and one by plain torch, on float64 copies of a model."""

import contextlib
import math
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

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
        models = [model] if isinstance(model, nn.Module) else list(model)
        copies = [float64_copy(original) for original in models]
        alike = [wrap_like(copied, original) for copied, original in zip(copies, models, strict=True)]
        for module_tree in {*copies, *alike}:
            stay_in_float64(module_tree)
        single = isinstance(model, nn.Module)
        self.given: Any = copies[0] if single else copies
        self.wrapped: Any = alike[0] if single else alike
        self.root = copies[0] if single else nn.ModuleList(copies)
        self.device = next(self.root.parameters()).device
        self.takes_divisor = takes_divisor(loss_fn)
        self._hooked = [pair for original in models for pair in original.named_parameters()]
        self._outside: dict[int, Tensor] | None = None  # trainable tensors of neither the model nor the batch
        self._drawn = random_state.note(self.device)
        modules = [module for module_tree in {*copies, *alike} for module in module_tree.modules()]
        named = [(module, name, buffer) for module in modules for name, buffer in module.named_buffers(recurse=False)]
        self._buffers = [(module, name, buffer, buffer.detach().clone()) for module, name, buffer in named]
        self._others: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}  # leaves and their gradients
        self._planner = gradient.planner
        self._given_batch = batch
        self._batch = batch if isinstance(batch, Deferred) else in_float64(batch, torch.device("cpu"))
        shares = ranks.exchange_objects(list(batch) if isinstance(batch, Deferred) else self._batch)[: ranks.degree]
        with catch_causes():
            self.sizes = [len(self._samples(share)) for share in shares]
            self.shares = _join([share for share, size in zip(shares, self.sizes, strict=True) if size])
        if sum(self.sizes) < 2:
            raise PlanError(f"verify was given {sum(self.sizes)} samples; cutting needs at least 2")

    def close(self) -> None:
        """Restore gradients of tensors outside of the model."""
        for leaf, gradient, copied in self._others.values():
            leaf.grad = gradient
            if gradient is not None and copied is not None:
                gradient.copy_(copied)

    def list_runs(self) -> list[tuple[Limit, str]]:
        """Return limits and policies: every limit with the first policy, and one limit with each other policy."""
        largest = max(self.sizes)
        ragged = 3 if largest > 3 and largest % 2 == 0 else 2
        sizes: dict[int, Limit] = {size: Rows(size) for size in (1, ragged, largest)}
        if isinstance(self._planner_choice, Shapes) and isinstance(self.options.get("batching"), OneRow):
            # A packed row of few shapes is limited by tokens alone.
            longest = max(max(self._samples(share).lengths) for share in self.shares)
            sizes = {size: Tokens(size * longest) for size in (1, ragged, largest)}
        limits = [self.first, *(limit for limit in sizes.values() if limit != self.first)]
        sync = self.options.get("sync", "auto")
        with catch_causes():
            wrapper = self._make_accumulator(self.first, sync).wrapper
            policies = {choose_policy(wrapper, sync)[0]: sync}
        for policy in POLICIES if sync == "auto" else ():
            with contextlib.suppress(PlanError):
                policies.setdefault(choose_policy(wrapper, policy)[0], policy)
        first, *other_policies = policies.values()
        return [(limit, first) for limit in limits] + [(sizes[1], policy) for policy in other_policies]

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
        values = [*uncut.gradients.values(), *(total for total, _ in uncut.sums.values())]
        if not all(bool(torch.isfinite(value).all()) for value in values):
            raise CauseError(
                "the loss or its gradient is not finite on this batch; look at its samples and at the loss"
            )
        if not any(bool(value.any()) for value in uncut.gradients.values()):
            raise CauseError(NOTHING)
        drawn, state = random_state.note(self.device), self._state()
        doubled = 1.0 if self.takes_divisor else 2.0
        again = self.run_whole(doubled)
        is_drawing, moved = not random_state.note(self.device).same_as(drawn), self._describe_moved(state)
        if not largest_error(relative_errors(again.gradients, uncut.gradients)):
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
                local_sums = gradient.forward_backward(self._batch, self.loss_fn)
            except MegabatchError:
                raise
            except Exception as error:  # for example a batch norm of one value
                raise CauseError(self._describe_failure(gradient, error)) from error
            gradient.finalize()
            names, parameters = [name for name, _ in self._named], self._trained
            gradients = dict(zip(names, map(_whole_gradient, parameters), strict=True))
            for parameter in parameters:
                parameter.grad = None
        reported_sums = {name: (float(total), float(weight)) for name, (total, weight) in local_sums.items()}
        rows = [row for row in self.ranks.exchange_objects(reported_sums)[: self.ranks.num_weighing] if row]
        sums = {name: [sum(column) for column in zip(*(row[name] for row in rows), strict=True)] for name in rows[0]}
        assert gradient.last_plan is not None  # of the call
        number = len([microbatch for microbatch in gradient.last_plan.microbatches if microbatch])
        number = sum(self.ranks.exchange_objects(number)[: self.ranks.degree])
        return UpdateRun(
            gradients, {name: Term(torch.tensor(a, dtype=torch.float64), b) for name, (a, b) in sums.items()}, number
        )

    def compute_loss(self) -> tuple[Tensor, dict[str, Term]]:
        """Return the loss of the update, and its sums."""
        sums = self.compute_sums()
        parts: list[Tensor] = []
        detached_sums: dict[str, Term] = {}
        for name in differentiable(sums):
            total, weight = sums[name].total, float(sums[name].weight)
            detached_sums[name] = Term(total.detach(), weight)
            if not weight and float(total.detach()):
                raise CauseError(
                    f"term {name!r} of the loss has the weight 0 and the total {float(total.detach()):.6g}, so that "
                    "there is nothing to divide it by; return what it counts"
                )
            parts.append(total / max(weight, 1e-300))
        return torch.stack(parts).sum() if parts else torch.zeros(()), detached_sums

    def compute_sums(self) -> dict[str, Term]:
        """Return the terms of the whole batch."""
        divisors: Counter[str] = Counter()
        for microbatch in self.microbatches() if self.takes_divisor else ():
            divisors.update(self._count_weights(microbatch))
        sums: dict[str, Term] = {}
        for microbatch in self.microbatches():
            add_terms(sums, self.compute_terms(microbatch, divisors))
        return sums

    def run_microbatch(self, microbatch: Microbatch) -> Any:
        """Run what the accumulator runs on each microbatch by itself."""
        return self.compute_terms(microbatch)

    def compute_terms(self, microbatch: Microbatch, divisors: Mapping[str, float] | None = None) -> dict[str, Term]:
        """Return the terms of a microbatch, from the copy without a wrapper; divided totals become sums again."""
        named: dict[str, Any] = {}
        known_divisors: Mapping[str, float] = {}
        if self.takes_divisor:
            known_divisors = divisors or dict.fromkeys(self._count_weights(microbatch), 1.0)
            named["divisor"] = known_divisors if len(known_divisors) > 1 else next(iter(known_divisors.values()), 1.0)
        with catch_causes():
            returned = cast(Any, self.loss_fn)(self.given, clone(microbatch), **named)
        terms = terms_of(returned)
        for name in terms if known_divisors else ():
            divided = known_divisors.get(name, next(iter(known_divisors.values())))
            terms[name] = Term(terms[name].total * divided, terms[name].weight)
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
    def _models(self) -> list[nn.Module]:
        return list(self.given) if isinstance(self.given, list) else [self.given]

    @property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.root.named_parameters() if parameter.requires_grad]

    @property
    def _trained(self) -> list[nn.Parameter]:
        models = self.wrapped if isinstance(self.wrapped, list) else [self.wrapped]
        return [parameter for model in models for parameter in unwrapped(model).parameters() if parameter.requires_grad]

    def _samples(self, batch: Batch) -> Samples:
        return self._planner.samples(batch, loss_hooks(self.loss_fn).prepare)

    def _take(self, samples: Samples, rows: Sequence[int]) -> Microbatch:
        with catch_causes():  # a model whose samples may not be padded
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
        for rows in gradient.plan(self._batch).microbatches if len(samples) else ():
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
            except CauseError:  # the accumulator raises it on all ranks
                pass
            except Exception as error:  # the user's model may raise anything
                failure = self._describe_failure(gradient, error)
        failures = [reported for reported in self.ranks.exchange_objects(failure) if reported is not None]
        if failures:
            raise CauseError(failures[0])

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
        return not largest_error(relative_errors(self.run_whole(scale).gradients, uncut.gradients))

    def _state(self) -> dict[str, Tensor]:
        return {name: buffer.detach().clone() for name, buffer in self.root.named_buffers()}

    def _describe_moved(self, state: dict[str, Tensor]) -> str:
        """Describe the first module with changed buffers; modules with batch statistics come last."""
        now = self._state()
        names = [name for name, buffer in state.items() if name not in now or not torch.equal(now[name], buffer)]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        modules.sort(key=lambda name: hasattr(self.root.get_submodule(name), "track_running_stats"))
        if not modules:
            return "what the model or the loss keeps"
        buffers = ", ".join(repr(name.rpartition(".")[2]) for name in names if name.rpartition(".")[0] == modules[0])
        return f"the state of module {modules[0]!r} ({self._kind(modules[0])}: {buffers})"

    def _note_outside(self, quotient: Tensor) -> None:
        """Note trainable leaves that every run reaches; inputs that the loss lets carry a gradient differ per run."""
        known = set(map(id, self.root.parameters()))
        leaves = {id(leaf): leaf for leaf in graph_leaves([quotient]) if id(leaf) not in known}
        for key, leaf in leaves.items():
            self._others.setdefault(key, (leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()))
        before = leaves if self._outside is None else self._outside
        inputs = set(map(id, pytree.tree_leaves(self._given_batch)))
        self._outside = {key: leaf for key, leaf in before.items() if key in leaves and key not in inputs}


@contextlib.contextmanager
def catch_causes() -> Generator[None]:
    """Turn an error of the library into a cause."""
    try:
        yield
    except MegabatchError as error:
        raise CauseError(str(error)) from error


def relative_errors(cut: dict[str, Tensor], uncut: dict[str, Tensor]) -> dict[str, float]:
    size = float(torch.stack([value.norm() for value in uncut.values()]).norm()) if uncut else 0.0
    floor = max(NEGLIGIBLE * size, 1e-300)
    return {name: _distance(cut[name], value) / max(float(value.norm()), floor) for name, value in uncut.items()}


def largest_error(errors: Mapping[Any, float]) -> float:
    values = list(errors.values())
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _join(shares: list[Batch]) -> list[Batch]:
    """Join the ranks' samples to one batch if they have the same keys and shapes."""
    if all(not isinstance(share, Mapping) for share in shares):
        return [[sample for share in shares for sample in cast(Sequence[Any], share)]]
    rows = [share for share in shares if isinstance(share, Mapping)]
    shapes = [{name: (value.shape[1:], value.dtype) for name, value in row.items()} for row in rows]
    if len(rows) < len(shares) or any(shape != shapes[0] for shape in shapes):
        return shares
    return [{name: torch.cat([row[name] for row in rows]) for name in rows[0]}]


def _whole_gradient(parameter: nn.Parameter) -> Tensor:
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()


def _distance(gradient: Tensor, reference: Tensor) -> float:
    return float(cast(Tensor, (gradient - reference).norm()))
