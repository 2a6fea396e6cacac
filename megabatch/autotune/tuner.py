"""Chooses the bound of microbatches by small updates, which leave nothing behind."""

import contextlib
import random
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from inspect import unwrap
from typing import Any, cast

import numpy as np
from torch import optim
from torch.nn.parallel import DistributedDataParallel

from megabatch.autotune.measure import LongestSample, MeasuredModel, MicrobatchMeasurer, Sample
from megabatch.autotune.memory import GIVE_A_BOUND, Budget, budget_of, check_device, check_measurable
from megabatch.autotune.snapshot import ModuleSnapshot, norms
from megabatch.batching.samples import Batch, Samples
from megabatch.engine import random_state
from megabatch.engine.call import first_failure
from megabatch.engine.prepare import MicrobatchPlanner
from megabatch.engine.update import OpenUpdate
from megabatch.errors import MegabatchError, PlanError
from megabatch.losses.contract import JointLoss, LossFunction
from megabatch.planning.limits import TunedLimit, bound_tokens, cost_of, in_gib, largest_fitting, search
from megabatch.torch_private import is_fsdp2
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.gradients import WideGradients, drop_gradients

TIMED_ROWS = 8  # at most: where a launch is no longer to be seen, and soon done


class MicrobatchTuner:
    """Chooses the bound of microbatches by measuring some.

    Args:
        model: What the loss is called with.
        reducer: Of that model.
        wide: How its gradients are added.
        cutter: Says whether the bound is to be chosen.
        memory_bytes: What this rank may use on its device; None: what is free there, a tenth of it kept free.

    Raises `PlanError` for what cannot be measured.
    """

    def __init__(
        self, model: Any, wrapper: Wrapper, wide: WideGradients, planner: MicrobatchPlanner, memory_bytes: float | None
    ) -> None:
        self.optimizer: optim.Optimizer | None = None  # whose states are to have room; None: two for each parameter
        self.wrapper, self._subject, self._memory_bytes = wrapper, MeasuredModel(model, wrapper, wide), memory_bytes
        self._measured: tuple[Callable[[], Any], Sample] | None = None  # a loss, and the longest sample it was given
        self._check_auto()

    def _check_auto(self) -> None:
        """Raise `PlanError` for what a measured microbatch would not leave as it was, or does not tell."""
        check_device(self.wrapper.device)
        devices = {str(each.device): None for model in self.wrapper.models for each in model.parameters()}
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

    def check_longest(self, planner: MicrobatchPlanner, batch: Batch, opened: OpenUpdate | None) -> None:
        """Raise `PlanError` where a later call of an update has a sample that is longer than the limit allows."""
        bound = None if planner.fit is None else planner.fit.max_microbatch_tokens
        if bound is None or not _has_gradients(opened):
            return
        longest = max(planner.samples(batch).lengths, default=0)
        if longest > bound:
            raise PlanError(
                f"a sample of {longest} tokens comes in a later call of an update, when there are gradients beside "
                f"which nothing is measured, and the bound that was chosen is {bound}; give the longest sample to the "
                "first call or to choose_bound(), or give max_microbatch_tokens="
            )

    def fitted(
        self, planner: MicrobatchPlanner, batch: Batch, loss_fn: LossFunction | JointLoss, opened: OpenUpdate | None
    ) -> MicrobatchPlanner:
        """The cutter, whose bound is to be chosen, with one for this batch; the same on all ranks. Collective.

        Measured are copies of the longest sample of all ranks, unless ones as long were measured before.
        """
        if isinstance(loss_fn, JointLoss):
            raise PlanError(
                "a JointLoss keeps representations of all samples, so that one microbatch does not tell what fits, and "
                f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
            )
        if _has_gradients(opened):  # beside which nothing is measured
            return planner
        longest = self.longest(planner, batch, loss_fn)
        if longest is None:
            return planner
        with self.copies(planner, longest, loss_fn, opened) as copies:
            fit = self._fit(copies, longest, _most_rows(planner, longest))
        self._measured = referred(loss_fn), longest.sample
        return replace(planner, fit=fit)

    @contextlib.contextmanager
    def copies(
        self, planner: MicrobatchPlanner, longest: LongestSample, loss_fn: LossFunction, opened: OpenUpdate | None,
        budget: Budget | None = None,
    ) -> Generator[MicrobatchMeasurer]:  # fmt: skip
        """Surrounds small updates, of which nothing is left; with what tells of their memory. Collective.

        ``budget``: as it was found before others like them; None: it is found here.
        """
        self.wrapper.check_unchanged()
        drop_gradients(self.wrapper.parameters)
        with self._as_before(opened):
            copies = MicrobatchMeasurer(self._subject, planner, longest, loss_fn, self.optimizer)
            if budget is None:
                copies.measure(1)  # what is made once, workspaces and compiled code, is there from here on
                budget = budget_of(self.wrapper.device, self._memory_bytes, self.wrapper.ranks)
            copies.budget = budget
            yield copies

    def longest(self, planner: MicrobatchPlanner, batch: Batch, loss_fn: LossFunction) -> LongestSample | None:
        """The longest sample of all ranks, or of an earlier call; None where the bound need not be chosen for it."""
        ranks, told, failure, samples = self.wrapper.ranks, [1.0, 0.0, 0.0, 0.0, 0.0], None, None
        known = (
            None
            if self._measured is None or self._measured[0]() is not unwrap(cast(Any, loss_fn))
            else self._measured[1]
        )
        knowledge = -1.0 if self._measured is None else float(known is not None)
        try:
            samples = planner.samples(batch)
            told = [0.0, len(samples), max(samples.lengths, default=-1), sum(samples.lengths), knowledge]
        except Exception as error:  # whatever the user's length raises, the other ranks must hear of it
            failure = error
        failed, counts, lengths, sums, knows = zip(*ranks.exchange(told), strict=True)
        if any(failed):
            raise first_failure(ranks, failure)
        assert samples is not None  # only a failure leaves it out
        if not _is_needed(planner.fit, counts, lengths, knows=min(knows) > 0):
            if planner.fit is not None and max(knows) < 0 and max(lengths) == planner.fit.longest_tokens:
                self._measured = referred(loss_fn), self._offered(samples, int(max(lengths)))[0]  # as it was elsewhere
            return None
        longest, usual = self._offered(samples, int(max(lengths)))
        if known is not None and min(knows) > 0 and known.num_tokens > longest.num_tokens:
            longest = known
        return LongestSample(longest, usual, int(max(counts)), max(sums))

    def _offered(self, samples: Samples, num_tokens: int) -> tuple[Sample, Sample]:
        """A sample of so many tokens, the longest, and one of middle length; the same on all ranks."""
        ranks, failure, longest, usual = self.wrapper.ranks, None, None, None
        try:
            check_measurable(self.wrapper.device)
            order = sorted(range(len(samples)), key=samples.lengths.__getitem__)
            if order and samples.lengths[order[-1]] == num_tokens:
                longest = _sample(samples, order[-1])
            if order:
                usual = _sample(samples, order[len(order) // 2])
        except Exception as error:  # whatever the user's loading raises, as above
            failure = error
        failed, *offers = zip(*ranks.exchange_objects((failure is not None, longest, usual)), strict=True)
        if any(failed):
            raise first_failure(ranks, failure)
        longest, usual = (next(each for each in of_all if each is not None) for of_all in offers)
        return longest, usual

    def _fit(self, copies: MicrobatchMeasurer, longest: LongestSample, most_rows: int) -> TunedLimit:
        measured = search(copies.measure, lambda: copies.space, most_rows)
        tokens = bound_tokens(measured, copies.space, longest.num_tokens)
        largest = largest_fitting(measured, copies.space)
        if tokens is None or largest is None:
            left = max(0.0, copies.space.allowed)
            raise PlanError(
                f"one sample of {longest.num_tokens} tokens needs {in_gib(measured[0].num_bytes)}, and parameters, "
                f"gradients and states leave {in_gib(left)} of the {in_gib(copies.limit_bytes)} that may be used; "
                "give more memory, shorten it, shard the model or recompute activations"
            )
        timed_rows = min(TIMED_ROWS, largest.rows)
        timed = [*copies.timed(longest.sample, timed_rows), *copies.timed(longest.usual, timed_rows)]
        cost = cost_of(measured, copies.space, copies.stays_bytes, longest.num_tokens, timed)
        return TunedLimit(
            tokens, cost, longest.num_tokens, tuple(measured), copies.limit_bytes, copies.allowed_bytes,
            outgrown_rows=longest.most_rows if largest.rows == longest.most_rows else None,
        )  # fmt: skip

    @contextlib.contextmanager
    def _as_before(self, opened: OpenUpdate | None) -> Generator[None]:
        """Surrounds measured updates: what they move is put back, or an error says what could not be."""
        modules = {id(each): each for model in self.wrapper.models for each in model.modules()}.values()
        for module in modules:
            if is_fsdp2(module):
                module.reshard()  # an evaluation may have left it gathered
        kept = [ModuleSnapshot(module) for module in modules]
        parameters = {name: each for model in self.wrapper.models for name, each in model.named_parameters()}
        before = norms(parameters.values())
        state, others = random_state.note(self.wrapper.device), (random.getstate(), np.random.get_state())
        try:
            yield
        finally:
            self._subject.forget()
            if opened is not None:  # by a call without samples
                self._subject.wide.begin()
            for each in kept:
                each.put_back()
            random_state.put_back(state)
            random.setstate(others[0])
            np.random.set_state(others[1])
        now = norms(parameters.values())
        moved = [name for name, a, b in zip(parameters, before, now, strict=True) if a != b]
        self._check_moved(moved)

    def _check_moved(self, names: Sequence[str]) -> None:
        """Raise, on all ranks, where a forward has written to parameters."""
        ranks = self.wrapper.ranks
        if not any(moved for (moved,) in ranks.exchange([float(len(names))])):
            return
        failure = None
        if names:
            failure = MegabatchError(
                f"the loss wrote to parameter {names[0]!r} while it was measured, which cannot be taken back; make the "
                f"model anew, and {GIVE_A_BOUND}"
            )
        raise first_failure(ranks, failure)


def referred(loss_fn: LossFunction | JointLoss) -> Callable[[], Any]:
    """Gives the loss for as long as it is there; what stands in its place, to watch it, is no other one."""
    try:
        return weakref.ref(unwrap(cast(Any, loss_fn)))
    except TypeError:  # of a callable of another kind
        return lambda: None


def _has_gradients(opened: OpenUpdate | None) -> bool:
    return opened is not None and opened.num_microbatches > 0


def _sample(samples: Samples, index: int) -> Sample:
    return Sample(samples.one(index), samples.lengths[index])


def _is_needed(fit: TunedLimit | None, counts: Sequence[float], lengths: Sequence[float], *, knows: bool) -> bool:
    """Whether a bound is to be chosen for what the ranks have; ``knows``: they have the sample that was measured."""
    if fit is None or max(lengths) > fit.longest_tokens:
        return max(lengths) >= 0
    outgrown = any(fit.is_outgrown(rows, rows * tokens) for rows, tokens in zip(counts, lengths, strict=True))
    return outgrown and (knows or max(lengths) == fit.longest_tokens)


def _most_rows(planner: MicrobatchPlanner, longest: LongestSample) -> int:
    """Of a microbatch: no more than a rank has, or than have fitted in memory."""
    learned = longest.most_rows if planner.learned is None else planner.learned.tokens // longest.num_tokens
    return max(1, min(longest.most_rows, learned))
