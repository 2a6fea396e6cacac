"""`verify`: compare the accumulated gradient with the gradient of the whole batch, on the user's model and loss.

The accumulator runs on a float64 copy of the model in the same wrapper, with several microbatch sizes and policies.
Plain torch runs the whole batch on a copy without the wrapper. If the gradients differ, `verify` searches the cause.
"""

import contextlib
import inspect
import math
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from megabatch import losses
from megabatch.core.contract import REFUSES_MEANS, LossFunction, Term, terms_of
from megabatch.core.samples import Batch, Microbatch
from megabatch.core.wrapper import foreign_hooks, local
from megabatch.errors import LossContractError, PlanError, in_one_line
from megabatch.gradient_accumulator import GradientAccumulator
from megabatch.inspection import random_state
from megabatch.inspection.model_facts import with_config
from megabatch.inspection.tree import clone
from megabatch.losses.coupled_loss import Encoded, JointLoss, describe_fault
from megabatch.planners.built_in import MOVED, BuiltIn, Rows, Tokens, choose_planner, refuse_moved
from megabatch.planning.planner import Planner
from megabatch.torch_private.classes import is_fsdp2
from megabatch.torch_private.fsdp2_groups import param_groups
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.operations import pytree
from megabatch.verification.finite_difference import check_backward
from megabatch.verification.float64_copy import Float64WithoutDropout
from megabatch.verification.gradient_comparison import (
    WRONG_BACKWARD,
    CauseError,
    GradientComparison,
    Limit,
    UpdateRun,
    catch_causes,
    largest_error,
    relative_errors,
)
from megabatch.verification.mixing import explain_padding, find_mixing_module, find_router_terms, take_rows
from megabatch.wrappers.detect import Models

# Losses whose mean a transformers model computes itself, and the condition on the model.
OWN_LOSS: dict[LossFunction, Callable[[Any], bool]] = {
    losses.next_token: lambda model: type(with_config(model)).__name__.endswith(("CausalLM", "LMHeadModel")),
    losses.classification: lambda _: True,
}
# Attributes that the accumulator sets on FSDP2's groups.
FSDP2_SETTINGS = {"gradient_divide_factor", "force_sum_reduction_for_comms", "reduce_scatter_unused_params"}


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        ok: True if nothing is wrong.
        worst: Largest relative error of a parameter's gradient.
        errors: ||accumulated - whole|| / ||whole|| of each parameter, the largest of all runs.
        causes: Sentences that say what is wrong.
    """

    ok: bool
    worst: float
    errors: dict[str, float]
    causes: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "exact" if self.ok else "NOT exact"
        measured = f"worst relative error of a gradient {self.worst:.1e}"
        if math.isnan(self.worst):
            measured = "no gradient was compared"
        return "\n".join([f"{verdict}: {measured}", *self.causes])


def verify(
    model: Models,
    loss_fn: LossFunction | JointLoss,
    batch: Batch,
    *,
    micro_batch_size: int = 1,
    tolerance: float = 1e-9,
    **options: Any,
) -> Verification:
    """Compare the gradient that `GradientAccumulator` leaves in ``p.grad`` with that of the whole batch in plain torch.

    The accumulator runs on a float64 copy of the model in the same wrapper (none, DistributedDataParallel, FSDP2), in
    training mode with dropout off. It runs one sample at a time, ``micro_batch_size`` samples, 2 or 3 samples and the
    batch whole, and every ``sync`` that the wrapper supports. Casts to a lower precision are undone; policies and
    dtypes that only change precision are left out. Your model, its gradients and torch's generators stay unchanged.

    A `JointLoss` sees all representations under every cut. `verify` finds out if the representations themselves depend
    on the cut, by batch norm or by padding without a mask, and if their gradient does.

    Args:
        model: As for `GradientAccumulator`. With several ranks all of them call `verify`.
        loss_fn: As for ``forward_backward``.
        batch: This rank's samples.
        micro_batch_size: Samples per forward in the first run; ``max_microbatch_tokens=`` replaces it.
        tolerance: Largest relative error of a parameter's gradient that counts as exact.
        options: Other arguments of `GradientAccumulator`. A ``planner`` is one of ``megabatch.planners``.

    Returns:
        ``ok`` is true if every relative error is within ``tolerance``, totals and weights add up, the gradient is that
        of the loss, and there was something to compare. A refusal by the accumulator is a cause.

    Raises:
        PlanError: For a `Pipeline`, a model of FSDP1, a cp axis or fewer than two samples.
        LossContractError: For a loss that returns no terms.
    """
    planner, first = _limits_of(options, micro_batch_size)
    models = [model] if isinstance(model, nn.Module) else list(model)
    # Losses that take derivatives need a graph in every run.
    with _restoring(models), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        try:
            # The accumulator may refuse the user's model but not the copy.
            with catch_causes():
                gradient = GradientAccumulator(model, planner=planner.limited(first), **options)
            kind = _JointProof if isinstance(loss_fn, JointLoss) else _Proof
            proof = kind(model, cast(Any, loss_fn), batch, planner, first, options, gradient)
            with Float64WithoutDropout(), contextlib.closing(proof):
                return proof.compare(tolerance)
        except CauseError as cause:
            return Verification(False, math.nan, {}, (str(cause),))


def _limits_of(options: dict[str, Any], micro_batch_size: int) -> tuple[BuiltIn, Limit]:
    """Take the planner out of the options. Return it, and the limit of the first run."""
    refuse_moved({name: value for name, value in options.items() if name in MOVED})
    planner_option, tokens = options.pop("planner", None), options.pop("max_microbatch_tokens", None)
    if isinstance(planner_option, Planner):
        raise PlanError("verify() compares cuts of its own, and planner= is a rule of yours; leave it out")
    if not isinstance(tokens, int):
        tokens = getattr(tokens, "max_microbatch_tokens", None)
    first = Rows(micro_batch_size) if tokens is None else Tokens(tokens)
    if planner_option is None:
        return first, first
    planner = choose_planner(planner_option, None, tokens)
    limit = getattr(planner, "limit", planner)
    return planner, limit if isinstance(limit, Rows | Tokens) else first


@contextlib.contextmanager
def _restoring(models: Sequence[nn.Module]) -> Generator[None]:
    """Restore the hooks and FSDP2 attributes that an accumulator sets on the user's model, and all generators.

    Inside, a loss that returns a mean is not refused, so that its gradient can be compared.
    """
    trees = nn.ModuleList(models)
    saved_hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for module in trees.modules():
        for name, value in vars(module).items():
            if "hooks" in name and isinstance(value, dict):
                saved_hooks.append((value, value.copy()))
    saved_settings: list[tuple[Any, dict[str, Any]]] = []
    for group in param_groups(filter(is_fsdp2, trees.modules())):
        saved_settings.append((group, {name: vars(group)[name] for name in vars(group).keys() & FSDP2_SETTINGS}))
    device = next(trees.parameters(), torch.empty(0, device="cpu")).device
    drawn, other_generators = random_state.note(device), (random.getstate(), np.random.get_state())
    refusing = REFUSES_MEANS.set(False)
    try:
        yield
    finally:
        REFUSES_MEANS.reset(refusing)
        for module_hooks, before in saved_hooks:
            module_hooks.clear()
            module_hooks.update(before)
        for group, settings in saved_settings:
            vars(group).update(settings)
        random_state.put_back(drawn)
        random.setstate(other_generators[0])
        np.random.set_state(other_generators[1])


class _Proof(GradientComparison):
    """The verdict of a comparison, and the search for causes."""

    result = "loss"
    unexplained = (
        "the gradients differ, and neither the modules nor the sums of the loss show why; perhaps the loss itself "
        "couples the samples of a microbatch by a number that it detaches, such as a mean, a maximum or a ratio of "
        "gradients"
    )

    def compare(self, tolerance: float) -> Verification:
        """Run all comparisons; return the same result on every rank."""
        uncut, unfit = None, []
        try:
            uncut = self.run_whole()
            self.check_comparable(uncut)
        except CauseError as cause:
            unfit.append(str(cause))
        unfit = _unique(self.ranks.exchange_objects(unfit))
        if uncut is None or unfit:
            return Verification(False, math.nan, {}, tuple(unfit))
        runs: list[UpdateRun] = []
        refused: dict[int, str] = {}
        for number, (limit, sync) in enumerate(self.list_runs()):
            try:
                runs.append(self.run_accumulated(limit, sync))
            except CauseError as cause:
                refused[number] = str(cause)
        errors = dict.fromkeys(uncut.gradients, 0.0) if runs else {}
        for run in runs:
            for name, error in relative_errors(run.gradients, uncut.gradients).items():
                errors[name] = largest_error([error, errors[name]])
        worst = largest_error(errors.values()) if runs else math.nan
        wrong = bool(runs) and not worst <= tolerance
        causes = list(self.find_causes(uncut, runs, wrong=wrong, refused=bool(refused)))
        # The refusal of the first run says the most, and those of the others the least.
        if 0 in refused:
            causes.insert(0, refused.pop(0))
        causes += refused.values()
        if wrong and not causes:
            causes = [self.unexplained]
        causes = _unique(self.ranks.exchange_objects(causes))
        worst = largest_error(self.ranks.exchange_objects(worst))
        return Verification(not causes, worst, errors, tuple(causes))

    def find_causes(self, uncut: UpdateRun, runs: list[UpdateRun], *, wrong: bool, refused: bool) -> Iterator[str]:
        """Yield the causes of a difference, or of a comparison that proves nothing."""
        if not refused:
            yield from self._find_foreign_tensors()
        yield from self._find_hooks()
        if not check_backward(self.copies, lambda: self.compute_loss()[0]):
            yield WRONG_BACKWARD
        causes = list(self._find_different_sums(uncut, runs[0])) if runs else []
        if wrong or causes:
            explanation = self._find_mixing() or self._find_padding() or self._find_shared_memory()
            # A cause explains totals that differ, not a weight that counts something else.
            if explanation is not None:
                causes = [explanation, *(cause for cause in causes if "is no count" in cause)]
        causes += self._find_unused_targets()
        yield from causes or self._find_other_loss(uncut)

    def _find_foreign_tensors(self) -> Iterator[str]:
        if self._outside:
            shapes = ", ".join(sorted(str(tuple(tensor.shape)) for tensor in self._outside))
            yield (
                f"the loss reaches trainable tensors that are not the model's (of shape {shapes}); call the model that "
                "the loss is given, and give what else is trained as a model too: [model, head]"
            )

    def _find_hooks(self) -> Iterator[str]:
        """Find hooks on the user's parameters, which the copy does not have."""
        for model in self.originals:
            for name, parameter in model.named_parameters():
                if foreign_hooks(parameter):
                    yield (
                        f"parameter {name!r} has a hook, which sees the gradient of each microbatch and not that of "
                        "the update; remove it, and change p.grad after finalize()"
                    )

    def _find_mixing(self) -> str | None:
        if not isinstance(self.everything, Mapping):
            return None
        rows = dict(cast(Mapping[str, Any], self.everything))
        name = find_mixing_module(self.root, self.run_microbatch, rows, len(self._samples(self.shares[0])))
        if name is None:
            return None
        return (
            f"module {name!r} ({self._kind(name)}) mixes the samples of a microbatch: "
            "what it gives for one sample depends on the others, so cutting must change the answer"
        )

    def _find_padding(self) -> str | None:
        """Find out if a sample has another loss beside a longer one."""
        samples = self._samples(self.shares[0])
        order = sorted(range(len(samples)), key=samples.lengths.__getitem__)
        shortest, longest = order[0], order[-1]
        if samples.lengths[shortest] == samples.lengths[longest]:
            return None
        alone, both = self._take(samples, [shortest]), self._take(samples, [shortest, longest])
        if not _has_rows(alone, 1) or not _has_rows(both, 2):
            return None
        config = getattr(with_config(self.copies[0]), "config", None)
        pad_token = getattr(config, "pad_token_id", None)
        padded = take_rows(both, slice(1))
        return explain_padding(self.run_microbatch, self.result, alone, padded, pad_token) or None

    def _find_shared_memory(self) -> str | None:
        self.run_whole()
        owners: dict[int, str] = {}
        for name, parameter in self._named:
            if parameter.grad is not None:
                first = owners.setdefault(local(parameter.grad).untyped_storage().data_ptr(), name)
                if first != name:
                    return (
                        f"the gradients of {first!r} and {name!r} share memory, so that what is added to one is added "
                        "to both; use each of the parameters in an operation of its own"
                    )
        return None

    def _find_different_sums(self, uncut: UpdateRun, cut: UpdateRun) -> Iterator[str]:
        number, missing = cut.num_microbatches, Term(torch.zeros(()), 0.0)
        for name in uncut.sums:
            total, weight = map(float, uncut.sums[name])
            cut_total, cut_weight = map(float, cut.sums.get(name, missing))
            no_sum = _differ(total, cut_total)
            of_routers = no_sum and name in find_router_terms(self.root, self.compute_terms, self.everything)
            if of_routers:
                yield (
                    f"the total of {name!r} has in it a router loss over the batch: a product of means over tokens, "
                    "which every cut changes; give it as a named term with its own weight, and to be exact under every "
                    "cut as experts.sequence_balance"
                )
            if _differ(weight, cut_weight):
                yield (
                    f"the weight of {name!r} is no count: {weight:.6g} for the batch whole, {cut_weight:.6g} added "
                    f"over its {number} microbatches; it counts microbatches, or padding (only labels are padded with "
                    "-100), and not what is summed: return the number of targets"
                )
            if no_sum and not of_routers:
                yield (
                    f"the total of {name!r} is no sum: {total:.6g} for the batch whole, {cut_total:.6g} added over its "
                    f"{number} microbatches; it is divided, perhaps to a mean, or couples samples: return the sum"
                )

    def _find_unused_targets(self) -> Iterator[str]:
        """Find labels at position 0 that the weight counts and the total never sums, as after a causal shift."""
        labels = self.everything.get("labels") if isinstance(self.everything, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point() or labels.shape[1] < 2:
            return
        with_first, without = labels.clone(), labels.clone()
        with_first[:, 0] = labels.clamp(min=0)[:, 0]
        without[:, 0] = IGNORED_LABEL
        # A user's loss need not support ignored labels.
        try:
            counted = self.compute_terms({**self.everything, "labels": with_first})
            ignored = self.compute_terms({**self.everything, "labels": without})
        except Exception:
            return
        for name in counted:
            if counted[name].total == ignored[name].total and counted[name].weight != ignored[name].weight:
                yield (
                    f"the weight of {name!r} counts the labels at position 0, which its total never uses; "
                    "count labels[:, 1:]"
                )

    def _find_other_loss(self, uncut: UpdateRun) -> Iterator[str]:
        """Compare the loss with the mean that the model itself computes from the labels."""
        model_loss = self._compute_own_loss()
        if model_loss is None or len(uncut.sums) > 1 or len(self.shares) > 1:
            return
        ((name, (total, weight)),) = uncut.sums.items()
        quotient = float(total) / (float(weight) or math.inf)
        share = model_loss / (quotient or math.inf)
        if share > 1.5 and not _differ(share, round(share)):
            yield (
                f"the total of {name!r} over its weight is exactly 1/{round(share)} of the model's own mean loss: "
                "it is divided, perhaps by a number of steps; return the sum, undivided"
            )
            return
        is_comparable = OWN_LOSS.get(inspect.unwrap(self.loss_fn), lambda _: False)
        if _differ(model_loss, quotient) and is_comparable(self.copies[0]):
            yield (
                f"the loss is {quotient:.6g} and the model's own, of the same batch with its labels, is "
                f"{model_loss:.6g}: they see other inputs or other targets (a mask that is left out where masked "
                "positions have labels, tokens that the model adds, a loss of its routers, another kind of loss)"
            )

    def _compute_own_loss(self) -> float | None:
        """Return the loss that a transformers model computes; None without one, or for another kind of loss."""
        batch = self._planner.samples(self.shares[0])
        microbatch = self._take(batch, range(len(batch)))
        is_labelled = isinstance(microbatch, Mapping) and "labels" in microbatch
        if len(self.copies) > 1 or not is_labelled or "labels" not in signature(self.copies[0].forward).parameters:
            return None
        # verify does not check this loss, which may raise anything.
        with self._restoring_buffers(), contextlib.suppress(Exception):
            loss = getattr(self.copies[0](**microbatch), "loss", None)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                return float(loss.detach())
        return None


class _JointProof(_Proof):
    """The same for a `JointLoss`: what a microbatch gives are the representations of its samples."""

    result = "representation"
    unexplained = "the gradients differ, and neither the modules nor the representations show why"

    def run_microbatch(self, microbatch: Microbatch) -> Any:
        with catch_causes():
            return self._joint.encode(self.given, clone(microbatch))

    def compute_sums(self) -> dict[str, Term]:
        encoded: list[Any] = []
        for share, microbatch in zip(self.shares, self.microbatches(), strict=True):
            encoded.append(self.run_microbatch(microbatch))
            encoding = Encoded(*pytree.tree_flatten(encoded[-1]), self._drawn)
            fault = describe_fault([encoding], [range(len(self._samples(share)))])
            if fault is not None:
                raise LossContractError(fault)
        representations = pytree.tree_map(lambda *rows: torch.cat(rows), *encoded)
        if isinstance(representations, tuple):
            return terms_of(self._joint.loss(*representations))
        return terms_of(self._joint.loss(representations))

    @property
    def _joint(self) -> JointLoss:
        return cast(JointLoss, self.loss_fn)

    def _find_different_sums(self, uncut: UpdateRun, cut: UpdateRun) -> Iterator[str]:
        """Find a sample with another representation alone than in the whole batch."""
        samples = self._samples(self.shares[0])
        together = pytree.tree_leaves(self.run_microbatch(self.everything))
        for row in range(len(samples)):
            try:
                alone = pytree.tree_leaves(self.run_microbatch(self._take(samples, [row])))
            except Exception as error:
                yield f"encode runs on the batch whole and fails on sample {row} alone: {in_one_line(error)}"
                return
            for rows, representation in zip(together, alone, strict=True):
                beside_others, by_itself = rows[row].detach().double(), representation[0].detach().double()
                if beside_others.shape != by_itself.shape:
                    continue
                if float((beside_others - by_itself).norm()) > 1e-9 * float(beside_others.norm()):
                    yield (
                        f"encode gives sample {row} another representation alone than beside the other samples, so "
                        "cutting must change the answer; let it treat each sample by itself"
                    )
                    return

    def _compute_own_loss(self) -> float | None:
        return None


def _has_rows(microbatch: Any, number: int) -> bool:
    """Return true for a mapping with so many samples in dim 0 of each tensor."""
    values = microbatch.values() if isinstance(microbatch, Mapping) else ()
    return {value.shape[:1] for value in values if isinstance(value, Tensor)} == {(number,)}


def _unique(causes_by_rank: Sequence[list[str]]) -> list[str]:
    """Return the texts of all ranks, each once."""
    return list(dict.fromkeys(cause for causes in causes_by_rank for cause in causes))


def _differ(value: float, reference: float) -> bool:
    return abs(value - reference) > 1e-9 * max(abs(value), abs(reference))
