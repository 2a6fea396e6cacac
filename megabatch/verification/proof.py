"""verify: does GradientAccumulator give the uncut gradient, of this model, with this loss, on this batch?

The accumulator itself runs on a float64 copy of the model in the wrapper it has, at several cuts and policies. Plain
torch runs the whole batch, on the copy without the wrapper. Where the answers differ, the cause is looked for.
"""

import contextlib
import inspect
import math
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from megabatch import losses
from megabatch.accumulator import GradientAccumulator
from megabatch.batching import attention_mask
from megabatch.batching.samples import IGNORED_LABEL, Batch, Deferred, Microbatch, Samples
from megabatch.batching.tree import clone
from megabatch.engine import random_state
from megabatch.engine.update import add_terms
from megabatch.errors import MegabatchError, PlanError, in_one_line
from megabatch.losses.contract import (
    JointLoss,
    LossFunction,
    Term,
    counted_weights,
    differentiable,
    loss_hooks,
    takes_divisor,
    terms_of,
)
from megabatch.planning.plan import check_bounds
from megabatch.torch_private import param_groups
from megabatch.verification.finite_difference import follows_its_loss
from megabatch.verification.float64_copy import (
    Float64WithoutDropout,
    float64_copy,
    in_float64,
    stay_in_float64,
    unwrapped,
    wrapped_alike,
)
from megabatch.verification.mixing import failing_module, mixing_module, padding_that_counts, terms_of_routers
from megabatch.wrappers.base import local
from megabatch.wrappers.detect import POLICIES, Models, choose_policy
from megabatch.wrappers.gradients import graph_leaves

# Below this share of the whole gradient a parameter's is nothing but rounding, and its error is measured by the whole.
NEGLIGIBLE = 1e-6
Bound = dict[str, Any]  # of a microbatch, as GradientAccumulator is told it
PRECISION = ("accumulate_dtype", "memory_bytes")  # options that the float64 copy does without
# Losses whose mean a model of transformers computes by itself, and the condition on the model.
OWN_LOSS: dict[LossFunction, Callable[[Any], bool]] = {
    losses.next_token: lambda model: type(attention_mask.with_config(model)).__name__.endswith(
        ("CausalLM", "LMHeadModel")
    ),
    losses.classification: lambda _: True,
}
OF_FSDP2 = ("gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_scatter_unused_params")  # set by it
OF_THE_LOSS = (
    "the backward of the loss does not give the gradient of what it returns (it ignores grad_output, or runs its own "
    "backward); compute the total by differentiable operations"
)


@dataclass(frozen=True)
class Verification:
    """What `verify` found."""

    ok: bool
    worst: float  # largest relative error of a parameter's gradient
    errors: dict[str, float]  # parameter -> ||cut - uncut|| / ||uncut||, the largest of all cuts
    causes: tuple[str, ...]  # in words; empty where nothing is wrong

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT exact"
        measured = f"worst relative error of a gradient {self.worst:.1e}"
        return "\n".join(
            [f"{verdict}: {'no gradient was compared' if math.isnan(self.worst) else measured}", *self.causes]
        )


def verify(
    model: Models,
    loss_fn: LossFunction,
    batch: Batch,
    *,
    micro_batch_size: int = 1,
    tolerance: float = 1e-9,
    **options: Any,
) -> Verification:
    """Compare the gradient that `GradientAccumulator` leaves in ``p.grad`` with that of the whole batch in plain torch.

    The accumulator runs on a float64 copy of the model in the same wrapper (none, DistributedDataParallel, FSDP2), in
    training mode with dropout off: one sample at a time, ``micro_batch_size``, a ragged cut and the batch whole, and
    under every ``sync`` that the wrapper has. Casts to a lower precision are undone, and policies and dtypes that only
    change precision are left out. The model, its gradients and torch's generators are left as they were.

    Args:
        model: As `GradientAccumulator` takes it. With several ranks all of them call `verify`.
        loss_fn: As ``forward_backward`` takes it.
        batch: This rank's samples.
        micro_batch_size: Samples per forward of the first cut; ``max_microbatch_tokens=`` takes its place.
        tolerance: Relative error up to which a parameter's gradient is called exact.
        options: What else `GradientAccumulator` takes.

    ``ok`` means that every relative error is within ``tolerance``, that totals and weights add up, that the gradient
    is that of the loss, and that there was something to compare. What the accumulator refuses is a cause. Raises
    `PlanError` for a `JointLoss`, a `Pipeline`, a model of FSDP1, a cp axis and fewer than two samples, and
    `LossContractError` for a loss that returns no terms.
    """
    if isinstance(loss_fn, JointLoss):
        raise PlanError(
            "verify was given a JointLoss, which sees all samples at once however they are cut; compare it with the "
            "loss of all representations yourself"
        )
    tokens = options.pop("max_microbatch_tokens", None)
    tokens = tokens if tokens is None or isinstance(tokens, int) else getattr(tokens, "max_microbatch_tokens", None)
    first: Bound = {"micro_batch_size": micro_batch_size} if tokens is None else {"max_microbatch_tokens": tokens}
    check_bounds(first.get("micro_batch_size"), first.get("max_microbatch_tokens"))
    models = [model] if isinstance(model, nn.Module) else list(model)
    with _as_before(models), torch.compiler.set_stance("force_eager"):
        try:
            with _caused():  # the user's own model may be refused, and the copy not
                gradient = GradientAccumulator(model, **first, **options)
            proof = _Proof(model, loss_fn, batch, first, options, gradient)
            with Float64WithoutDropout(), contextlib.closing(proof):
                return proof.verification(tolerance)
        except _CauseError as cause:
            return Verification(False, math.nan, {}, (str(cause),))


class _CauseError(Exception):
    """Why there is nothing to compare, in words."""


@dataclass(frozen=True)
class _MeasuredError:
    gradients: dict[str, Tensor]
    sums: dict[str, Term]
    num_microbatches: int


class _Proof:
    """A model, a loss and a batch, and every question that is put to them."""

    def __init__(
        self, model: Models, loss_fn: LossFunction, batch: Batch, first: Bound,
        options: Mapping[str, Any], gradient: GradientAccumulator,
    ) -> None:  # fmt: skip
        self.loss_fn, self.first = loss_fn, first
        self.options = {name: value for name, value in options.items() if name not in PRECISION}
        self.ranks = ranks = gradient.ranks
        if ranks.context_degree > 1:
            raise PlanError(
                "verify was given a mesh with a cp axis, whose ranks see stretches of samples; leave it out"
            )
        models = [model] if isinstance(model, nn.Module) else list(model)
        copies = [float64_copy(each) for each in models]
        alike = [wrapped_alike(one, each) for one, each in zip(copies, models, strict=True)]
        for each in {*copies, *alike}:
            stay_in_float64(each)
        single = isinstance(model, nn.Module)
        self.given: Any = copies[0] if single else copies
        self.wrapped: Any = alike[0] if single else alike
        self.root = copies[0] if single else nn.ModuleList(copies)
        self.device = next(self.root.parameters()).device
        self.takes_divisor = takes_divisor(loss_fn)
        self._hooked = [pair for each in models for pair in each.named_parameters()]
        self._outside: dict[int, Tensor] | None = None  # what is trained and neither the model's nor the batch's
        self._drawn = random_state.note(self.device)
        modules = [module for each in {*copies, *alike} for module in each.modules()]
        named = [(module, name, each) for module in modules for name, each in module.named_buffers(recurse=False)]
        self._buffers = [(module, name, each, each.detach().clone()) for module, name, each in named]
        self._others: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}  # leaves, and gradients they had
        self._planner = gradient._planner  # pyright: ignore[reportPrivateUsage]
        self._given_batch = batch
        self._batch = batch if isinstance(batch, Deferred) else in_float64(batch, torch.device("cpu"))
        shares = ranks.exchange_objects(list(batch) if isinstance(batch, Deferred) else self._batch)[: ranks.degree]
        with _caused():
            self.sizes = [len(self._samples(each)) for each in shares]
            self.shares = _joined([each for each, size in zip(shares, self.sizes, strict=True) if size])
        if sum(self.sizes) < 2:
            raise PlanError(f"verify was given {sum(self.sizes)} samples; cutting needs at least 2")

    def close(self) -> None:
        """Put back the gradients of what is not the model's."""
        for leaf, found, copied in self._others.values():
            leaf.grad = found
            if found is not None and copied is not None:
                found.copy_(copied)

    def verification(self, tolerance: float) -> Verification:
        """The answer, the same on every rank."""
        whole, unfit = None, []
        try:
            whole = self.whole()
            self._refuse_unfit(whole)
        except _CauseError as cause:
            unfit.append(str(cause))
        unfit = _flat(self.ranks.exchange_objects(unfit))
        if whole is None or unfit:
            return Verification(False, math.nan, {}, tuple(unfit))
        runs: list[_MeasuredError] = []
        refused: list[tuple[bool, str]] = []  # whether it was the first cut, and why
        for number, (bound, sync) in enumerate(self._ways()):
            try:
                runs.append(self.accumulated(bound, sync))
            except _CauseError as cause:
                refused.append((number > 0, str(cause)))
        errors: dict[str, float] = {}
        for each in runs:
            for name, error in _relative_errors(each.gradients, whole.gradients).items():
                errors[name] = error if math.isnan(error) else max(error, errors.get(name, 0.0))
        worst = _worst(errors) if runs else math.nan
        wrong = bool(runs) and not worst <= tolerance
        found = [(False, each) for each in self.causes(whole, runs, wrong=wrong, refused=bool(refused))]
        causes = [each for _, each in sorted([*refused, *found], key=lambda pair: pair[0])]
        if wrong and not causes:
            causes = ["the gradients differ, and neither the modules nor the sums of the loss show why"]
        causes = _flat(self.ranks.exchange_objects(causes))
        worst = _worst(dict(enumerate(self.ranks.exchange_objects(worst))))
        return Verification(not causes, worst, errors, tuple(causes))

    def terms(self, microbatch: Microbatch, divisors: Mapping[str, float] | None = None) -> dict[str, Term]:
        """What the loss says of a microbatch, by the copy without a wrapper; what it divides is made a sum again."""
        named: dict[str, Any] = {}
        own: Mapping[str, float] = {}
        if self.takes_divisor:
            own = divisors or dict.fromkeys(self._weighed(microbatch), 1.0)
            named["divisor"] = own if len(own) > 1 else next(iter(own.values()), 1.0)
        with _caused():
            returned = cast(Any, self.loss_fn)(self.given, clone(microbatch), **named)
        terms = terms_of(returned)
        for name in terms if own else ():
            divided = own.get(name, next(iter(own.values())))
            terms[name] = Term(terms[name].total * divided, terms[name].weight)
        return terms

    def whole(self, scale: float = 1.0) -> _MeasuredError:
        """Plain torch: the backward of ``scale`` times the quotient, of the batch whole."""
        self.root.zero_grad(set_to_none=True)
        quotient, sums = self.quotient()
        if any(parameter.grad is not None for parameter in self.root.parameters()) and not self.takes_divisor:
            raise _CauseError(OF_THE_LOSS)
        if not quotient.requires_grad:
            raise _CauseError(NOTHING)
        self._note_outside(quotient)
        (quotient * scale).backward()
        gradients = {name: _whole_gradient(each) / scale for name, each in self._named}
        return _MeasuredError(gradients, sums, len(self.shares))

    def quotient(self) -> tuple[Tensor, dict[str, Term]]:
        """The loss of the update, and its sums."""
        divisors: Counter[str] = Counter()
        for microbatch in self.microbatches() if self.takes_divisor else ():
            divisors.update(self._weighed(microbatch))
        sums: dict[str, Term] = {}
        for microbatch in self.microbatches():
            add_terms(sums, self.terms(microbatch, divisors))
        parts: list[Tensor] = []
        found: dict[str, Term] = {}
        for name in differentiable(sums):
            total, weight = sums[name].total, float(sums[name].weight)
            found[name] = Term(total.detach(), weight)
            if not weight and float(total.detach()):
                raise _CauseError(
                    f"term {name!r} of the loss has the weight 0 and the total {float(total.detach()):.6g}, so that "
                    "there is nothing to divide it by; return what it counts"
                )
            parts.append(total / max(weight, 1e-300))
        return torch.stack(parts).sum() if parts else torch.zeros(()), found

    def accumulated(self, bound: Bound, sync: str) -> _MeasuredError:
        """The accumulator's own update, on the copy that is wrapped."""
        with self._state_put_back(), _caused():
            gradient = self._accumulator(bound, sync)
            self._check_runs(gradient)
            try:
                own = gradient.forward_backward(self._batch, self.loss_fn)
            except MegabatchError:
                raise
            except Exception as error:  # a batch norm of one value, say
                raise _CauseError(self._failure(gradient, error)) from error
            gradient.finalize()
            names, parameters = [name for name, _ in self._named], self._trained
            gradients = dict(zip(names, map(_whole_gradient, parameters), strict=True))
            for parameter in parameters:
                parameter.grad = None
        told = {name: (float(total), float(weight)) for name, (total, weight) in own.items()}
        rows = [each for each in self.ranks.exchange_objects(told)[: self.ranks.num_weighing] if each]
        sums = {name: [sum(column) for column in zip(*(row[name] for row in rows), strict=True)] for name in rows[0]}
        assert gradient.last_plan is not None  # of the call
        number = len([each for each in gradient.last_plan.microbatches if each])
        number = sum(self.ranks.exchange_objects(number)[: self.ranks.degree])
        return _MeasuredError(
            gradients, {name: Term(torch.tensor(a, dtype=torch.float64), b) for name, (a, b) in sums.items()}, number
        )

    def causes(self, whole: _MeasuredError, runs: list[_MeasuredError], *, wrong: bool, refused: bool) -> Iterator[str]:
        """Why an answer differs, or proves nothing, in words."""
        if not refused:
            yield from self._foreign_tensors()
        yield from self._hooks()
        if not follows_its_loss(self._models, lambda: self.quotient()[0]):
            yield OF_THE_LOSS
        found = list(self._sums_that_differ(whole, runs[0])) if runs else []
        if wrong or found:
            named = [cause for look in (self._mixer, self._padding, self._shared_memory) if (cause := look())]
            # A cause explains totals that differ, not a weight that counts something else.
            found = [*named[:1], *(each for each in found if not named or "is no count" in each)]
        found += self._unused_targets()
        yield from found or self._other_loss(whole)

    def microbatches(self) -> Iterator[Microbatch]:
        """The samples of all ranks, as one microbatch where they go into one."""
        for share in self.shares:
            samples = self._samples(share)
            yield self._take(samples, range(len(samples)))

    @cached_property
    def everything(self) -> Microbatch:
        """The samples of one, to be looked at."""
        return next(self.microbatches())

    def _weighed(self, microbatch: Microbatch) -> dict[str, float]:
        weigh = loss_hooks(self.loss_fn).weigh
        return {} if weigh is None else counted_weights(weigh(microbatch))

    def _accumulator(self, bound: Bound, sync: str) -> GradientAccumulator:
        options: dict[str, Any] = {**self.options, **bound, "sync": sync}
        return GradientAccumulator(self.wrapped, **options)

    @property
    def _models(self) -> list[nn.Module]:
        return list(self.given) if isinstance(self.given, list) else [self.given]

    @property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self.root.named_parameters() if each.requires_grad]

    @property
    def _trained(self) -> list[nn.Parameter]:
        models = self.wrapped if isinstance(self.wrapped, list) else [self.wrapped]
        return [each for model in models for each in unwrapped(model).parameters() if each.requires_grad]

    def _samples(self, batch: Batch) -> Samples:
        return self._planner.samples(batch, loss_hooks(self.loss_fn).prepare)

    def _take(self, samples: Samples, rows: Sequence[int]) -> Microbatch:
        return in_float64(clone(samples.take(rows)), self.device)

    def _ways(self) -> list[tuple[Bound, str]]:
        """Bounds and policies: every cut under the first policy, and a cut under each other."""
        most = max(self.sizes)
        ragged = 3 if most > 3 and most % 2 == 0 else 2
        sizes = {size: {"micro_batch_size": size} for size in (1, ragged, most)}
        bounds = [self.first, *(bound for bound in sizes.values() if bound != self.first)]
        asked = self.options.get("sync", "auto")
        with _caused():
            wrapper = self._accumulator(self.first, asked)._wrapper  # pyright: ignore[reportPrivateUsage]
            policies = {choose_policy(wrapper, asked)[0]: asked}
        for each in POLICIES if asked == "auto" else ():
            with contextlib.suppress(PlanError):
                policies.setdefault(choose_policy(wrapper, each)[0], each)
        first, *others = policies.values()
        return [(bound, first) for bound in bounds] + [(sizes[1], each) for each in others]

    @contextlib.contextmanager
    def _state_put_back(self) -> Generator[None]:
        try:
            yield
        finally:
            self._put_back()

    @torch.no_grad()
    def _put_back(self) -> None:
        """Let every buffer be the one it was, and hold what it held."""
        for module, name, each, before in self._buffers:
            setattr(module, name, each.copy_(before))

    def _cut(self, gradient: GradientAccumulator) -> Iterator[Microbatch]:
        """This rank's microbatches, as the accumulator cuts them."""
        samples = self._samples(self._batch)
        for rows in gradient.plan(self._batch).microbatches if len(samples) else ():
            yield self._take(samples, rows)

    def _check_runs(self, gradient: GradientAccumulator) -> None:
        """Raise on all ranks what one of them would raise in the middle of a call, where the others would wait."""
        failure = None
        if self.ranks.num_all == 1:
            return
        with self._state_put_back(), torch.no_grad():
            try:
                for microbatch in self._cut(gradient):
                    self.terms(microbatch)
            except _CauseError:  # which the accumulator tells to all
                pass
            except Exception as error:  # whatever the user's model raises
                failure = self._failure(gradient, error)
        failures = [each for each in self.ranks.exchange_objects(failure) if each is not None]
        if failures:
            raise _CauseError(failures[0])

    def _failure(self, gradient: GradientAccumulator, error: Exception) -> str:
        """Why the batch runs whole and not cut."""
        name = failing_module(self.root, self.terms, list(self._cut(gradient)))
        where = "the loss" if name is None else f"module {name!r} ({self._kind(name)})"
        return f"{where} runs on the batch whole and fails on a microbatch of it: {in_one_line(error)}"

    def _kind(self, name: str) -> str:
        return type(self.root.get_submodule(name)).__name__

    def _refuse_unfit(self, whole: _MeasuredError) -> None:
        """Raise where two gradients would prove nothing."""
        values = [*whole.gradients.values(), *(total for total, _ in whole.sums.values())]
        if not all(bool(torch.isfinite(value).all()) for value in values):
            raise _CauseError(
                "the loss or its gradient is not finite on this batch; look at its samples and at the loss"
            )
        if not any(bool(value.any()) for value in whole.gradients.values()):
            raise _CauseError(NOTHING)
        drawn, state = random_state.note(self.device), self._state()
        doubled = 1.0 if self.takes_divisor else 2.0
        again = self.whole(doubled)
        is_drawing, moved = not random_state.note(self.device).same_as(drawn), self._moved(state)
        if not _worst(_relative_errors(again.gradients, whole.gradients)):
            return
        if not self._is_same(whole, 1.0) or (is_drawing and self._is_same(whole, doubled)):
            raise _CauseError(
                "the same batch gives another gradient the second time: the model or the loss draws random numbers"
            )
        if not self._is_same(whole, doubled):
            raise _CauseError(OF_THE_LOSS)
        raise _CauseError(
            f"the same batch gives another gradient the second time: {moved} moves in every forward, so that the "
            "number of microbatches changes the gradient; freeze it with eval(), or take a module without such a state"
        )

    def _is_same(self, whole: _MeasuredError, scale: float) -> bool:
        """Whether the gradient is the first one again, from where everything stood then."""
        self._put_back()
        random_state.put_back(self._drawn)
        return not _worst(_relative_errors(self.whole(scale).gradients, whole.gradients))

    def _state(self) -> dict[str, Tensor]:
        return {name: each.detach().clone() for name, each in self.root.named_buffers()}

    def _moved(self, state: dict[str, Tensor]) -> str:
        """The module whose buffers are others than they were; one that gives statistics of batches last."""
        now = self._state()
        names = [name for name, each in state.items() if name not in now or not torch.equal(now[name], each)]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        modules.sort(key=lambda name: hasattr(self.root.get_submodule(name), "track_running_stats"))
        if not modules:
            return "what the model or the loss keeps"
        own = ", ".join(repr(name.rpartition(".")[2]) for name in names if name.rpartition(".")[0] == modules[0])
        return f"the state of module {modules[0]!r} ({self._kind(modules[0])}: {own})"

    def _note_outside(self, quotient: Tensor) -> None:
        """Leaves that the loss reaches time and again; inputs that it lets carry a gradient are new every time."""
        known = set(map(id, self.root.parameters()))
        found = {id(each): each for each in graph_leaves([quotient]) if id(each) not in known}
        for key, leaf in found.items():
            self._others.setdefault(key, (leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()))
        before = found if self._outside is None else self._outside
        inputs = set(map(id, pytree.tree_leaves(self._given_batch)))
        self._outside = {key: each for key, each in before.items() if key in found and key not in inputs}

    def _foreign_tensors(self) -> Iterator[str]:
        if self._outside:
            shapes = ", ".join(str(tuple(each.shape)) for each in self._outside.values())
            yield (
                f"the loss reaches trainable tensors that are not the model's (of shape {shapes}); call the model that "
                "the loss is given, and give what else is trained as a model too: [model, head]"
            )

    def _hooks(self) -> Iterator[str]:
        """Hooks of others on the user's own parameters, which the copy does not have."""
        for name, parameter in self._hooked:
            hooks = [*(cast(Any, parameter)._backward_hooks or {}).values()]
            hooks += [*(cast(Any, parameter)._post_accumulate_grad_hooks or {}).values()]
            if any(not str(getattr(each, "__module__", "")).startswith(("torch.", "megabatch.")) for each in hooks):
                yield (
                    f"parameter {name!r} has a hook, which sees the gradient of each microbatch and not that of the "
                    "update; remove it, and change p.grad after finalize()"
                )

    def _mixer(self) -> str | None:
        if not isinstance(self.everything, Mapping):
            return None
        rows = dict(cast(Mapping[str, Any], self.everything))
        name = mixing_module(self.root, self.terms, rows, len(self._samples(self.shares[0])))
        if name is None:
            return None
        return (
            f"module {name!r} ({self._kind(name)}) mixes the samples of a microbatch: "
            "what it gives for one sample depends on the others, so cutting must change the answer"
        )

    def _padding(self) -> str | None:
        """Whether a sample is another one beside a longer one."""
        samples = self._samples(self.shares[0])
        order = sorted(range(len(samples)), key=samples.lengths.__getitem__)
        alone, both = (self._take(samples, rows) for rows in ([order[0]], [order[0], order[-1]]))
        if samples.lengths[order[0]] == samples.lengths[order[-1]] or not _has_rows(alone, 1) or not _has_rows(both, 2):
            return None
        padded = {name: each[:1] if isinstance(each, Tensor) else each for name, each in both.items()}
        config = getattr(attention_mask.with_config(self._models[0]), "config", None)
        with torch.no_grad():
            return padding_that_counts(self.terms, alone, padded, getattr(config, "pad_token_id", None)) or None

    def _shared_memory(self) -> str | None:
        self.whole()
        seen: dict[int, str] = {}
        for name, parameter in self._named:
            if parameter.grad is not None:
                first = seen.setdefault(local(parameter.grad).untyped_storage().data_ptr(), name)
                if first != name:
                    return (
                        f"the gradients of {first!r} and {name!r} share memory, so that what is added to one is added "
                        "to both; use each of the parameters in an operation of its own"
                    )
        return None

    def _sums_that_differ(self, whole: _MeasuredError, cut: _MeasuredError) -> Iterator[str]:
        for name in whole.sums:
            (total, weight), (cut_total, cut_weight) = whole.sums[name], cut.sums.get(name, Term(torch.zeros(()), 0.0))
            no_sum = _apart(float(total), float(cut_total))
            of_routers = no_sum and name in terms_of_routers(self.root, self.terms, self.everything)
            if of_routers:
                yield (
                    f"the total of {name!r} has in it a router loss over the batch: a product of means over tokens, "
                    "which every cut changes; give it as a named term with its own weight, and to be exact under every "
                    "cut as experts.sequence_balance"
                )
            if _apart(float(weight), float(cut_weight)):
                yield (
                    f"the weight of {name!r} is no count: {float(weight):.6g} for the batch whole, "
                    f"{float(cut_weight):.6g} added over its {cut.num_microbatches} microbatches; it counts "
                    "microbatches, or padding (only labels are padded with -100), and not what is summed: return the "
                    "number of targets"
                )
            if no_sum and not of_routers:
                yield (
                    f"the total of {name!r} is no sum: {float(total):.6g} for the batch whole, "
                    f"{float(cut_total):.6g} added over its {cut.num_microbatches} microbatches; it is divided, "
                    "perhaps to a mean, or couples samples: return the sum"
                )

    def _unused_targets(self) -> Iterator[str]:
        """A label at position 0 that is counted but never summed, as after a causal shift."""
        labels = self.everything.get("labels") if isinstance(self.everything, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point() or labels.shape[1] < 2:
            return
        with_first, without = dict(self.everything), dict(self.everything)
        with_first["labels"], without["labels"] = labels.clone(), labels.clone()
        with_first["labels"][:, 0] = labels.clamp(min=0)[:, 0]
        without["labels"][:, 0] = IGNORED_LABEL
        try:
            with torch.no_grad():
                counted, ignored = (self.terms(each) for each in (with_first, without))
        except Exception:  # a loss of one's own need not know labels that are ignored
            return
        for name in counted:
            if counted[name].total == ignored[name].total and counted[name].weight != ignored[name].weight:
                yield (
                    f"the weight of {name!r} counts the labels at position 0, which its total never uses; "
                    "count labels[:, 1:]"
                )

    def _other_loss(self, whole: _MeasuredError) -> Iterator[str]:
        """The mean that the model itself computes from the labels, held against the quotient."""
        own = self._own_loss() if len(whole.sums) == len(self.shares) == 1 else None
        if own is None:
            return
        ((name, (total, weight)),) = whole.sums.items()
        quotient = float(total) / float(weight) if weight else 0.0
        share = own / quotient if quotient else 0.0
        if share > 1.5 and not _apart(share, round(share)):
            yield (
                f"the total of {name!r} over its weight is exactly 1/{round(share)} of the model's own mean loss: "
                "it is divided, perhaps by a number of steps; return the sum, undivided"
            )
            return
        compares = OWN_LOSS.get(inspect.unwrap(self.loss_fn))
        if _apart(own, quotient) and compares is not None and compares(self._models[0]):
            yield (
                f"the loss is {quotient:.6g} and the model's own, of the same batch with its labels, is {own:.6g}: "
                "they see other inputs or other targets (a mask that is left out where masked positions have labels, "
                "tokens that the model adds, a loss of its routers, another kind of loss)"
            )

    def _own_loss(self) -> float | None:
        """What a model of transformers says its loss is; None where it says none, or another kind of loss."""
        model, batch = self._models[0], self._planner.samples(self.shares[0])
        if len(self._models) > 1 or "labels" not in _names(model.forward):
            return None
        microbatch = self._take(batch, range(len(batch)))
        if not isinstance(microbatch, Mapping) or "labels" not in microbatch:
            return None
        with self._state_put_back(), torch.no_grad():
            try:
                own = getattr(model(**microbatch), "loss", None)
            except Exception:  # it is not the loss that is verified
                return None
        return float(own) if isinstance(own, Tensor) and own.numel() == 1 else None


NOTHING = "there is nothing to compare: every gradient is zero; give a batch with targets and an unfrozen model"


@contextlib.contextmanager
def _caused() -> Generator[None]:
    """What the library refuses inside is a cause."""
    try:
        yield
    except MegabatchError as error:
        raise _CauseError(str(error)) from error


@contextlib.contextmanager
def _as_before(models: Sequence[nn.Module]) -> Generator[None]:
    """Surrounds what an accumulator that is made of the user's own model leaves there, and what is drawn."""
    modules = [module for model in models for module in model.modules()]
    hooks = [each for module in modules for name, each in vars(module).items() if "hooks" in name and each is not None]
    kept = [(each, each.copy()) for each in hooks if isinstance(each, dict)]
    groups = param_groups([module for module in modules if isinstance(module, FSDPModule)])
    told = [(group, name, vars(group)[name]) for group in groups for name in OF_FSDP2 if name in vars(group)]
    device = next((each.device for model in models for each in model.parameters()), torch.device("cpu"))
    drawn, others = random_state.note(device), (random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        for each, before in kept:
            each.clear()
            each.update(before)
        for group, name, value in told:
            setattr(group, name, value)
        random_state.put_back(drawn)
        random.setstate(others[0])
        np.random.set_state(others[1])


def _joined(shares: list[Batch]) -> list[Batch]:
    """One batch of all samples, where they go together."""
    if all(not isinstance(each, Mapping) for each in shares):
        return [[sample for each in shares for sample in cast(Sequence[Any], each)]]
    rows = [each for each in shares if isinstance(each, Mapping)]
    shapes = [{name: (value.shape[1:], value.dtype) for name, value in each.items()} for each in rows]
    if len(rows) < len(shares) or any(each != shapes[0] for each in shapes):
        return shares
    return [{name: torch.cat([each[name] for each in rows]) for name in rows[0]}]


def _has_rows(microbatch: Any, number: int) -> bool:
    """Whether it is a mapping with so many samples in dim 0 of each tensor."""
    if not isinstance(microbatch, Mapping):
        return False
    tensors = [each for each in microbatch.values() if isinstance(each, Tensor)]
    return bool(tensors) and all(each.ndim and len(each) == number for each in tensors)


def _names(function: Callable[..., Any]) -> list[str]:
    """The names of its arguments, where it tells."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _whole_gradient(parameter: nn.Parameter) -> Tensor:
    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return (found.full_tensor() if isinstance(found, DTensor) else found).detach().clone()


def _flat(told: Sequence[list[str]]) -> list[str]:
    """What the ranks say, each once."""
    return list(dict.fromkeys(each for found in told for each in found))


def _worst(errors: Mapping[Any, float]) -> float:
    values = list(errors.values())
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _relative_errors(cut: dict[str, Tensor], whole: dict[str, Tensor]) -> dict[str, float]:
    size = float(torch.stack([value.norm() for value in whole.values()]).norm()) if whole else 0.0
    floor = max(NEGLIGIBLE * size, 1e-300)
    return {name: _distance(cut[name], value) / max(float(value.norm()), floor) for name, value in whole.items()}


def _distance(one: Tensor, other: Tensor) -> float:
    return float(cast(Tensor, (one - other).norm()))


def _apart(one: float, other: float) -> bool:
    return abs(one - other) > 1e-9 * max(abs(one), abs(other))
