"""Tuning of the microbatch limit, and the memory of a policy, by small updates that leave no trace."""

import contextlib
import math
import random
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from inspect import unwrap
from typing import Any, cast

import numpy as np
from torch.nn.parallel import DistributedDataParallel

from megabatch.autotune.measure import ComputeTerms, LongestSample, MeasuredModel, MicrobatchMeasurer, Sample
from megabatch.autotune.memory import GIVE_A_BOUND, check_device, check_measurable, measure_budget
from megabatch.autotune.snapshot import ModuleSnapshot, parameter_norms
from megabatch.core.agreement import REPLAN, first_failure
from megabatch.core.call import MicrobatchPlanner, PreparedBatch
from megabatch.core.contract import CoupledLoss, LossFunction
from megabatch.core.extension import Extension
from megabatch.core.gradients import Gradients, drop_gradients
from megabatch.core.mesh import DataRanks
from megabatch.core.samples import Batch, Samples
from megabatch.core.update import OpenUpdate
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, PlanError, ReplanError
from megabatch.inspection import random_state
from megabatch.planning.limit_search import TimedMicrobatch, bound_tokens, cost_of, fitting, largest_fitting, search
from megabatch.planning.limits import MeasuredMicrobatch, TunedLimit, gains_little, in_gib
from megabatch.torch_private.classes import is_fsdp2

TIMED_ROWS = 8  # at most: enough to hide the cost of launches, and quick


class MicrobatchTuner(Extension):
    """Chooses the limit of microbatches by measuring some.

    Args:
        compute_terms: Runs a loss on a microbatch; see `MeasuredModel`.
        wrapper: The wrapper of the model.
        wide: Accumulates its gradients.
        memory_bytes: Memory that this rank may use on its device. None: its free memory, less a tenth.

    Raises:
        PlanError: For a device, model or wrapper that cannot be measured.
    """

    plans_anew = True

    def __init__(
        self, compute_terms: ComputeTerms, wrapper: Wrapper, wide: Gradients, memory_bytes: float | None
    ) -> None:
        self.wrapper, self._memory_bytes = wrapper, memory_bytes
        self._optimizer: Any = None  # for whose states a measurement leaves room
        self._subject = MeasuredModel(compute_terms, wrapper, wide)
        self._measured: tuple[Callable[[], Any], Sample] | None = None  # a loss, and its longest measured sample
        self._num_settled = 0  # samples of a call for which the limit has stayed
        self._check_auto()

    def _check_auto(self) -> None:
        """Raise `PlanError` for a model that a measured microbatch would change, or would not represent."""
        check_device(self.wrapper.device)
        devices = {str(parameter.device): None for model in self.wrapper.models for parameter in model.parameters()}
        if len(devices) > 1:
            raise PlanError(
                f"the model has parameters on {' and '.join(devices)}, of which the memory of one is measured, and "
                f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
            )
        if self.wrapper.is_pipeline:
            raise PlanError(
                "a Pipeline runs the microbatches of a call together, so that one does not tell what fits, and "
                f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
            )
        for module in self.wrapper.models:
            if isinstance(module, DistributedDataParallel) and module.static_graph:
                raise PlanError(
                    "DDP with static_graph=True keeps the graph of its first backward, which would be measured, and "
                    f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
                )

    def reserve_for(self, gradient: Any, optimizer: Any) -> None:
        """Leave room for the states of ``optimizer``."""
        self._optimizer = optimizer

    def tune(self, gradient: Any, batch: Batch, loss_fn: LossFunction | CoupledLoss) -> None:
        gradient.planner = self.fitted(gradient.planner, batch, loss_fn, gradient.open_update)

    def before_call(self, gradient: Any, batch: Batch, loss_fn: LossFunction | CoupledLoss) -> None:
        """Choose the limit before the first call."""
        if gradient.fit is None:
            gradient.tune(batch, loss_fn)

    def check_call(
        self, gradient: Any, batch: Batch, prepared: PreparedBatch | None, loss_fn: LossFunction | CoupledLoss
    ) -> None:
        """Raise `ReplanError` if the samples may need another limit, which `fitted` then decides on all ranks.

        Raises `PlanError` for a `JointLoss`, and for a sample of a later call that is longer than the limit.
        """
        _refuse_joint_loss(loss_fn)
        fit = gradient.fit
        if fit is None:  # no rank had a sample to measure
            return
        samples = gradient.planner.samples(batch) if prepared is None else prepared.samples
        longest, rows, bound = max(samples.lengths, default=-1), len(samples), fit.max_microbatch_tokens
        if not _has_gradients(gradient.open_update):
            is_new = self._measured is None and longest == fit.longest_tokens  # of a limit that was chosen elsewhere
            is_larger = rows > self._num_settled and fit.is_outgrown(rows, rows * longest)
            if is_new or longest > fit.longest_tokens or is_larger:
                raise ReplanError(REPLAN[-1])
        elif longest > bound:
            raise PlanError(
                f"a sample of {longest} tokens comes in a later call of an update, when there are gradients beside "
                f"which nothing is measured, and the bound that was chosen is {bound}; give the longest sample to the "
                "first call or to tune(), or give max_microbatch_tokens="
            )

    def fitted(
        self, planner: MicrobatchPlanner, batch: Batch, loss_fn: LossFunction | CoupledLoss, opened: OpenUpdate | None
    ) -> MicrobatchPlanner:
        """Return the planner with a limit for this batch, the same on all ranks. Collective.

        This measures copies of the longest sample of all ranks, unless it measured ones as long before.
        """
        _refuse_joint_loss(loss_fn)
        loss_fn = cast(LossFunction, loss_fn)
        if _has_gradients(opened):  # beside which nothing is measured
            return planner
        longest = self.find_longest(planner, batch, loss_fn)
        if longest is None:
            return planner
        with self.measuring_copies(planner, longest, loss_fn, opened) as measurer:
            fit = self._tune(measurer, longest, _most_rows(planner, longest))
        self._measured, self._num_settled = (weak_reference(loss_fn), longest.sample), 0
        return replace(planner, fit=fit)

    @contextlib.contextmanager
    def measuring_copies(
        self, planner: MicrobatchPlanner, longest: LongestSample, loss_fn: LossFunction, opened: OpenUpdate | None
    ) -> Generator[MicrobatchMeasurer]:  # fmt: skip
        """Run small updates inside, and restore all state after them. Collective."""
        self.wrapper.check_unchanged()
        drop_gradients(self.wrapper.parameters)
        with restoring(self._subject, opened, GIVE_A_BOUND):
            measurer = MicrobatchMeasurer(self._subject, planner, longest, loss_fn, self._optimizer)
            measurer.warm_up()
            measurer.budget = measure_budget(self.wrapper.device, self._memory_bytes, self.wrapper.ranks)
            yield measurer

    def find_longest(self, planner: MicrobatchPlanner, batch: Batch, loss_fn: LossFunction) -> LongestSample | None:
        """Return the longest sample of all ranks or of an earlier call; None if the limit stays."""
        ranks, announced, failure, samples = self.wrapper.ranks, [1.0, 0.0, 0.0, 0.0, 0.0], None, None
        known = None
        if self._measured is not None and self._measured[0]() is unwrap(cast(Any, loss_fn)):
            known = self._measured[1]
        knowledge = -1.0 if self._measured is None else float(known is not None)
        try:
            samples = planner.samples(batch)
            announced = [0.0, len(samples), max(samples.lengths, default=-1), sum(samples.lengths), knowledge]
        except Exception as error:  # the user's length may raise anything, and the other ranks must know
            failure = error
        failed, counts, lengths, sums, knows = zip(*ranks.exchange_numbers(announced), strict=True)
        if any(failed):
            raise first_failure(ranks, failure)
        assert samples is not None  # only a failure leaves it out
        if not _needs_tuning(planner.fit, counts, lengths, knows=min(knows) > 0):
            if planner.fit is not None and max(knows) < 0 and max(lengths) == planner.fit.longest_tokens:
                # The limit was chosen elsewhere, so this sample counts as measured.
                self._measured = weak_reference(loss_fn), self._pick_samples(samples, int(max(lengths)))[0]
            self._num_settled = max(self._num_settled, len(samples))
            return None
        longest, usual = self._pick_samples(samples, int(max(lengths)))
        if known is not None and min(knows) > 0 and known.num_tokens > longest.num_tokens:
            longest = known
        return LongestSample(longest, usual, int(max(counts)), max(sums))

    def _pick_samples(self, samples: Samples, num_tokens: int) -> tuple[Sample, Sample]:
        """Return the longest sample, of so many tokens, and one of median length; the same on all ranks."""
        ranks, failure, longest, usual = self.wrapper.ranks, None, None, None
        try:
            check_measurable(self.wrapper.device)
            order = sorted(range(len(samples)), key=samples.lengths.__getitem__)
            if order and samples.lengths[order[-1]] == num_tokens:
                longest = _sample(samples, order[-1])
            if order:
                usual = _sample(samples, order[len(order) // 2])
        except Exception as error:  # the user's loading may raise anything
            failure = error
        failed, *offers = zip(*ranks.exchange_objects((failure is not None, longest, usual)), strict=True)
        if any(failed):
            raise first_failure(ranks, failure)
        longest, usual = (next(offer for offer in of_all if offer is not None) for of_all in offers)
        return longest, usual

    def _tune(self, measurer: MicrobatchMeasurer, longest: LongestSample, most_rows: int) -> TunedLimit:
        measured = search(lambda rows: self._measure(measurer, rows), lambda: measurer.space, most_rows)
        tokens = bound_tokens(measured, measurer.space, longest.num_tokens, most_rows)
        largest = largest_fitting(measured, measurer.space)
        if tokens is None or largest is None:
            left_bytes = max(0.0, measurer.space.allowed)
            raise PlanError(
                f"one sample of {longest.num_tokens} tokens needs {in_gib(measured[0].num_bytes)}, and parameters, "
                f"gradients and states leave {in_gib(left_bytes)} of the {in_gib(measurer.limit_bytes)} that may be "
                "used; give more memory, shorten it, shard the model or recompute activations"
            )
        is_limited = tokens < longest.most_rows * longest.num_tokens  # by memory
        gains = not gains_little(fitting(measured, measurer.space))  # by larger ones
        measured = [microbatch for microbatch in measured if math.isfinite(microbatch.num_bytes)]
        tokens_each = longest.num_tokens
        timed = [TimedMicrobatch(microbatch.rows, tokens_each, microbatch.seconds or 0.0) for microbatch in measured]
        if longest.usual.num_tokens != longest.sample.num_tokens:  # which tells attention from the rest
            timed.append(measurer.measure_seconds(longest.usual, min(TIMED_ROWS, largest.rows)))
        cost = cost_of(measured, measurer.space, measurer.stays_bytes, longest.num_tokens, timed)
        return TunedLimit(
            tokens, cost, longest.num_tokens, tuple(measured), measurer.limit_bytes, measurer.allowed_bytes,
            outgrown_rows=longest.most_rows if gains and not is_limited else None,
        )  # fmt: skip

    def _measure(self, measurer: MicrobatchMeasurer, rows: int) -> MeasuredMicrobatch:
        """Measure a microbatch. One that runs out of memory does not fit, where no other rank waits for this one."""
        try:
            return measurer.measure(rows)
        except MegabatchError as error:
            if rows == 1 or error.shortage is None or self._subject.waits:
                raise
        self._subject.discard()
        return MeasuredMicrobatch(rows, math.inf)


@contextlib.contextmanager
def restoring(subject: MeasuredModel, opened: OpenUpdate | None, advice: str) -> Generator[None]:
    """Restore all state after measured updates; raise if a forward has written to parameters. Collective."""
    models = subject.wrapper.models
    modules = {id(module): module for model in models for module in model.modules()}.values()
    for module in modules:
        if is_fsdp2(module):
            module.reshard()  # an evaluation may have left it gathered
    snapshots = [ModuleSnapshot(module) for module in modules]
    parameters = {name: parameter for model in models for name, parameter in model.named_parameters()}
    before = parameter_norms(parameters.values())
    state, other_generators = random_state.note(subject.wrapper.device), (random.getstate(), np.random.get_state())
    try:
        yield
    finally:
        subject.discard()
        if opened is not None:  # an earlier call had no samples
            subject.wide.begin()
        for snapshot in snapshots:
            snapshot.put_back()
        random_state.put_back(state)
        random.setstate(other_generators[0])
        np.random.set_state(other_generators[1])
    now = parameter_norms(parameters.values())
    moved = [name for name, a, b in zip(parameters, before, now, strict=True) if a != b]
    _check_moved(moved, subject.wrapper.ranks, advice)


def _check_moved(names: Sequence[str], ranks: DataRanks, advice: str) -> None:
    """Raise on all ranks if a forward has written to parameters."""
    if not any(moved for (moved,) in ranks.exchange_numbers([float(len(names))])):
        return
    failure = None
    if names:
        failure = MegabatchError(
            f"the loss wrote to parameter {names[0]!r} while it was measured, which cannot be taken back; make the "
            f"model anew, and {advice}"
        )
    raise first_failure(ranks, failure)


def _refuse_joint_loss(loss_fn: LossFunction | CoupledLoss) -> None:
    if isinstance(loss_fn, CoupledLoss):
        raise PlanError(
            "a JointLoss keeps representations of all samples, so that one microbatch does not tell what fits, and "
            f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
        )


def weak_reference(loss_fn: LossFunction | CoupledLoss) -> Callable[[], Any]:
    """Return a weak reference to the loss, under its wrappers."""
    try:
        return weakref.ref(unwrap(cast(Any, loss_fn)))
    except TypeError:  # a callable without weak references
        return lambda: None


def _has_gradients(opened: OpenUpdate | None) -> bool:
    return opened is not None and opened.num_microbatches > 0


def _sample(samples: Samples, index: int) -> Sample:
    return Sample(samples.one(index), samples.lengths[index])


def _needs_tuning(fit: TunedLimit | None, counts: Sequence[float], lengths: Sequence[float], *, knows: bool) -> bool:
    """Return true if the limit must be chosen for these samples; ``knows``: all ranks have the measured sample."""
    if fit is None or max(lengths) > fit.longest_tokens:
        return max(lengths) >= 0
    outgrown = any(fit.is_outgrown(rows, rows * tokens) for rows, tokens in zip(counts, lengths, strict=True))
    return outgrown and (knows or max(lengths) == fit.longest_tokens)


def _most_rows(planner: MicrobatchPlanner, longest: LongestSample) -> int:
    """Return the most rows of a microbatch: as many as a rank has, or as fitted in memory."""
    learned = longest.most_rows if planner.learned is None else planner.learned.tokens // longest.num_tokens
    return max(1, min(longest.most_rows, learned))
