"""The accumulator: the open update, from plan to gradient. It names no wrapper, planner, batching, loss or guard."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megabatch.core.call import (
    CallAgreement,
    MicrobatchPlanner,
    PreparedBatch,
    agree_on_call,
    iterate_steps,
    with_dummies,
)
from megabatch.core.contract import ByLoss, CoupledLoss, LossFunction, LossHooks, Term, loss_hooks, takes_divisor
from megabatch.core.extension import Call, Extension, Extensions
from megabatch.core.gradients import (
    Gradients,
    clip_gradients,
    drop_gradients,
    no_float16_autocast,
    scale_gradients,
)
from megabatch.core.guard import CallGuard, ErrorGuard
from megabatch.core.samples import Batch, Microbatch, Samples
from megabatch.core.update import NOT_OPEN, OpenUpdate, Update, add_terms
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, PlanError, ReplanError, check_positive
from megabatch.inspection.error_kinds import mark_known
from megabatch.planning.plan import Plan

LOST = (
    "an update was lost when one of its calls failed or other code took its gradient; the sums of its other calls are "
    "dropped"
)
Checks = Sequence[Callable[..., None]]


@dataclass(frozen=True)
class Parts:
    """The objects that an accumulator consists of. A loss gets the ``model``."""

    model: Any
    wrapper: Wrapper
    planner: MicrobatchPlanner
    wide: Gradients
    call_guard: CallGuard
    error_guard: ErrorGuard
    new_update: type[OpenUpdate] = OpenUpdate


@dataclass
class Outcome:
    """The end of an update. ``is_finite`` is its ``update.finite``, and True before."""

    is_finite: Tensor | bool = True


class DummySample(NamedTuple):
    """A sample of which a rank without samples makes a dummy microbatch, and the outcome of the last update with it."""

    samples: Samples
    outcome: Outcome


class Accumulator:
    """Computes the exact gradient of an update, microbatch by microbatch, with the objects that it is made of."""

    def __init__(self, parts: Parts, extensions: Sequence[Extension] = ()) -> None:
        self.model, self.wrapper, self.planner = parts.model, parts.wrapper, parts.planner
        self.ranks = parts.wrapper.ranks
        self.call_guard, self.error_guard = parts.call_guard, parts.error_guard
        self._wide, self._new_update = parts.wide, parts.new_update
        # By loss, the last sample of an earlier call.
        self._dummies: ByLoss[DummySample] = ByLoss()
        self._outcome = Outcome()
        self._open: OpenUpdate | None = None
        # True after a failed call of an update that had other calls, until finalize() or discard().
        self._is_lost = False
        self.last_plan: Plan | None = None
        self._extensions = Extensions(extensions)
        self._extensions.attach(self)

    @property
    def open_update(self) -> OpenUpdate | None:
        """The open update. None between `finalize` and the next call."""
        return self._open

    @property
    def is_counting(self) -> bool | None:
        """True while a microbatch runs, False while a dummy microbatch runs, None if no microbatch runs by itself."""
        return self.wrapper.is_counting

    def plan(self, batch: Batch) -> Plan:
        """Return the plan by which this rank would split its samples. Run no model and contact no other rank.

        A call of a pipeline on several data ranks is split by the lengths of all ranks, which this plan does not know.

        Args:
            batch: This rank's samples, as for `forward_backward`.

        Raises:
            PlanError: An unusable batch, or a limit that is "auto" and not measured yet, or shapes that are not chosen.
        """
        return self.planner.plan(self.planner.samples(batch))

    def open(self, weights: Mapping[str, float] | float | None = None) -> None:
        """Open an update of several calls, before the first. Gradients are then reduced once, in `finalize`.

        Without ``weights``, the update has one differentiable term, and its divisor is corrected in `finalize`. With
        them, each call's totals are divided by the weight of the update before their backward, and the update may have
        any number of terms over any number of calls, each with its own divisor.

        DDP (without a communication hook), FSDP2 and HSDP hold the reduction back under the policies "last" and
        "replica_last", and HSDP under "gather_once". This costs the overlap with the last backward. FSDP2 keeps what
        "last" keeps until `finalize`. Other wrappers, and "every", reduce as often as without `open`.

        Args:
            weights: The weight of this rank's samples in all calls: a mapping from each differentiable term to a
                number, or a number for the only term. The sum over data ranks is the divisor, as with ``weigh``. A
                rank without samples gives 0. If the calls return another sum, `finalize` raises `LossContractError` on
                the CPU, and ``update.finite`` is false on a device.

        Raises:
            MegabatchError: An update is open.
            LossContractError: A weight that is negative, not finite, or not a number.
            PlanError: Terms that differ between ranks, more than eight terms, weights that the planner does not go
                with, or parameters that were changed since the constructor.
        """
        # An error of one rank is raised on all, since the others already wait for its message.
        failure: MegabatchError | None = None
        try:
            self._check_can_open()
            self.wrapper.check_unchanged()
        except MegabatchError as error:
            failure = error
        self.ranks.position.verb = "open()"
        from megabatch.core.agreement import agree_on_weights

        with self.guarded("open()"), self.error_guard.agreeing():
            announced_weights = agree_on_weights(self.ranks, weights, failure)
        self.planner.check_announced(announced_weights)
        opened = self.begin(self._new_update(self.wrapper))
        opened.announce(announced_weights)
        # Several calls follow, so a reduction in the last backward of each would be repeated.
        opened.hold_reduction()

    def _check_can_open(self) -> None:
        """Raise an error if no update can be opened."""
        self.check_can_add()
        if self._open is not None:
            raise MegabatchError("open() was called in an open update; call it before the first call, or finalize()")

    def begin(self, opened: OpenUpdate) -> OpenUpdate:
        """Open an update before its first call, and drop the gradients of the one before."""
        self.call_guard.release()
        drop_gradients(self.wrapper.parameters)
        self._wide.begin()
        self._open = opened
        return opened

    def forward_backward(
        self, batch: Batch, loss_fn: LossFunction | CoupledLoss, *, plan: Plan | None = None
    ) -> dict[str, Term]:
        """Add the gradient of this rank's samples to the open update. Collective.

        The first call after `finalize` drops the old gradients.

        Args:
            batch: A mapping of tensors with samples in dim 0, or a list of samples, which are mappings of tensors of
                any length, or what `prepare` returned. A rank may have no sample, ``[]``.
            loss_fn: ``loss_fn(model, microbatch)`` returns ``(total, weight)``, scalars, or a mapping of names to such
                pairs. It sums and counts, and never divides.
            plan: The cut of an earlier call with samples of the same lengths, ``last_plan``. The microbatches are then
                the same. None makes one.

        Returns:
            This rank's sums in this call, by name of the term, detached. A pair without a name is called "loss".

        Raises:
            PlanError: An unusable batch or plan.
            LossContractError: A loss that breaks its contract.
            MegabatchError: A call inside another one, or an update that was lost or changed by other code.
        """
        with self.guarded("forward_backward()"):
            self.check_can_add()
            for before_call in self._extensions.before_call:
                before_call(self, batch, loss_fn)
            sums = None
            # A check of "auto" raises `ReplanError` for samples that need another limit, on all ranks, before anything
            # has run. The limit is then measured anew, and the checks do not run twice.
            with contextlib.suppress(ReplanError):
                sums = self._add(batch, loss_fn, plan, self._extensions.check_call)
            if sums is None:
                for tune in self._extensions.tune:
                    tune(self, batch, loss_fn)
                sums = self._add(batch, loss_fn, plan, ())
        return {name: Term(total, torch.as_tensor(weight, dtype=total.dtype)) for name, (total, weight) in sums.items()}

    def _add(
        self, batch: Batch, loss_fn: LossFunction | CoupledLoss, plan: Plan | None, checks: Checks
    ) -> dict[str, Term]:
        """Run one call. Return this rank's sums.

        ``run_call`` of the wrapper (a pipeline) or of the loss (a `CoupledLoss`) takes the place of `_run_call`.
        """
        run_call = self.wrapper.run_call or getattr(loss_fn, "run_call", None)
        with self._open_call(batch, loss_fn, plan, checks, runs_alone=run_call is None) as call:
            return (run_call or self._run_call)(call)

    def _run_call(self, call: Call) -> dict[str, Term]:
        """Run the microbatches of a call one after another. Return this rank's sums."""
        sums: dict[str, Term] = {}
        call.opened.count_call(call.agreement)
        prepared, wrapper = call.prepared, self.wrapper
        with contextlib.ExitStack() as stack:
            steps = stack.enter_context(
                contextlib.closing(iterate_steps(prepared, call.agreement, call.hooks.weigh, wrapper))
            )
            surrounded = self.planner.surround_steps(steps, prepared, call.loss_fn, wrapper)
            steps = stack.enter_context(contextlib.closing(surrounded))
            for surround_steps in self._extensions.surround_steps:
                steps = stack.enter_context(contextlib.closing(surround_steps(steps, call)))
            for step in steps:
                for terms in self.call_guard.run_step(self, step, call):
                    add_terms(sums, terms)
                # The memory of its microbatch is free before the next is collated.
                del step
        return sums

    @contextlib.contextmanager
    def _open_call(
        self, batch: Batch, loss_fn: LossFunction | CoupledLoss, plan: Plan | None, checks: Checks, *, runs_alone: bool
    ) -> Generator[Call]:
        """Surround one call: prepare it and agree on it with the other ranks. If it fails, drop the update.

        ``checks`` are those of extensions. ``runs_alone`` is True if microbatches run one by one, not all together.
        """
        wrapper, guard = self.wrapper, self.call_guard
        hooks, is_new = loss_hooks(loss_fn), guard.is_new(loss_fn)
        planner = self.planner.of_call(batch)
        self.ranks.position.verb = "forward_backward()"
        self.ranks.position.call += 1
        wrapper.before_agreement(is_new=is_new and runs_alone)
        prepared, agreement = self._prepare_call(planner, batch, loss_fn, hooks, plan, checks)
        planner.check_call(wrapper, prepared.plan, loss_fn)
        self._remember(prepared, loss_fn)
        was_open = self._open is not None
        opened = self._open_for_call()
        # A wrapper may free gradients in its backward, so that what the last call has left is forgotten.
        guard.enter(is_new=is_new)
        opened.begin_call(prepared.plan.sync, agreement.num_microbatches)
        self.last_plan = with_dummies(prepared.plan, agreement.num_microbatches)
        call = Call(
            self.model, wrapper, loss_fn, prepared, agreement, self.last_plan, opened, hooks, is_new,
            takes_divisor(loss_fn),
        )  # fmt: skip
        opened.is_running = True
        try:
            surrounding = planner.batching.surround_call(self.model, call.plan, agreement.num_microbatches)
            with wrapper.surround_call(agreement), no_float16_autocast(wrapper.models), surrounding:
                yield call
            guard.leave(opened.total_factor)
            opened.is_running = False
        finally:
            # The loss raised. What other calls have added is lost, and so are the weights that open() was told.
            if opened.is_running:
                self._is_lost = was_open
                self.abandon()

    def _prepare_call(
        self, planner: MicrobatchPlanner, batch: Batch, loss_fn: Any, hooks: LossHooks, plan: Plan | None,
        checks: Checks,
    ) -> tuple[PreparedBatch, CallAgreement]:  # fmt: skip
        """Split, collate and weigh a batch, and agree on the call with the other ranks. Errors are raised on all."""
        wrapper, guard = self.wrapper, self.call_guard
        prepared: PreparedBatch | None = None
        failure: Exception | None = None
        try:
            guard.check()
            wrapper.check_unchanged()
            # A batch that `prepare` returned.
            early = getattr(batch, "preparation", None)
            prepared = early and early.take((planner, hooks, plan))
            prepared = prepared or planner.prepare(batch, hooks, plan)
            guard.check_weights(planner, prepared, hooks)
        # The user's collate or weigh may raise anything, and the other ranks must know.
        except Exception as error:
            failure, prepared = error, None
        try:
            for check_call in checks:
                check_call(self, batch, prepared, loss_fn)
        # This error may say more than one of the batch.
        except MegabatchError as error:
            failure, prepared = error, None
        # This error may be the consequence of a batch that could not be prepared.
        except Exception as error:
            failure, prepared = failure or error, None
        try:
            agreement = agree_on_call(wrapper, prepared, failure, partial(self._recall, loss_fn))
        except MegabatchError as error:
            # On some rank, the gradients no longer belong to this update.
            if error.loses_update:
                self._open, self._is_lost = None, True
                self._wide.discard()
            raise
        assert prepared is not None
        return planner.complete(prepared, agreement, hooks, wrapper)

    def _remember(self, prepared: PreparedBatch, loss_fn: Any) -> None:
        """Keep a sample for a later call without samples: this rank then repeats it, with weight 0."""
        if not self.ranks.is_alone and len(prepared.samples):
            self._dummies.set(loss_fn, DummySample(prepared.samples.copy_last(), self._outcome))

    def _open_for_call(self) -> OpenUpdate:
        """Return the open update, or open one, without the gradients of the one before."""
        if self._open is None:
            return self.begin(self._new_update(self.wrapper))
        # Other code may have run a backward since open().
        if not self._open.has_calls:
            drop_gradients(self.wrapper.parameters)
        return self._open

    def guarded(self, verb: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Surround code that may fail while other ranks wait: they raise a one-line error, too.

        Running out of memory is always broadcast. With a ``verb``, the name of a call, any error is.
        """
        return self.error_guard.listening(verb)

    def check_can_add(self) -> None:
        """Raise `MegabatchError` if no call can add to the update."""
        if self._is_lost:
            raise MegabatchError(f"{LOST}; discard() it, and give its samples again")
        if self._open is not None:
            self._open.check_can_add()

    def _recall(self, loss_fn: object) -> Microbatch | None:
        """Return a dummy microbatch from an earlier call with the same loss, for a rank without samples.

        A sample of an update that was not finite is none: zero times a gradient that is not finite is NaN.
        """
        dummy = self._dummies.get(loss_fn)
        # This waits for the device, but only where a rank has no sample.
        if dummy is None or not dummy.outcome.is_finite:
            return None
        # The model may have changed, so that the sample now spoils this update.
        self._dummies.set(loss_fn, dummy._replace(outcome=self._outcome))
        # By the current planner, since a lower limit may have changed its shapes.
        return self.planner.dummy(dummy.samples)

    def finalize(self, *, max_norm: float | None = None, weight: float | None = None) -> Update:
        """Close the update. ``p.grad`` is then its gradient. Collective.

        An update without weight leaves every ``p.grad`` None. On a device and without ``weigh`` it leaves zeros, since
        only the device knows the weight. The host does not wait for the device.

        Args:
            max_norm: Clip the gradient to this 2-norm. Without it, ``update.finite`` covers the losses and not the
                gradients.
            weight: Replaces the divisor of an update with one term. It is the weight over all ranks, the same number on
                each, unlike the weights of `open`, which are this rank's.

        Returns:
            The update: its loss, terms, norm and counts. Step the optimizer only if ``update.finite`` is true.

        Raises:
            LossContractError: On the CPU, the counted and the returned weights differ, on any rank. On a device that
                check would wait, so ``update.finite`` is false instead, and ``update.problem()`` names the fault. Also
                for ``weight`` in an update of several terms.
            PlanError: ``max_norm`` or ``weight`` is no positive number, or ``weight`` is given after `open` was told
                the weights.
            MegabatchError: No update is open, or it was lost. On several ranks, any error drops the update on all.
        """
        position = self.ranks.position
        position.verb = "finalize()"
        opened = taken = None
        try:
            if self._open is not None:
                self._open.hear_errors()
            # An error of one rank is broadcast, since the others wait for its message.
            with self.guarded("finalize()"):
                self._check_can_finalize(max_norm, weight)
                opened, taken = self._take_open()
                update = opened.report(self._close(opened, weight, max_norm))
                if taken is not None:
                    raise taken
                # Gradients are rounded once, after the norm and the clip.
                self._wide.finish()
        except BaseException as error:
            # The other ranks raise the same error and drop the update.
            if opened is not None or (self._open is not None and not self.ranks.is_alone):
                self._drop()
            if isinstance(error, MegabatchError):
                raise (taken or error) from None
            raise
        self._outcome.is_finite = update.finite
        self._outcome = Outcome()
        position.update, position.call = position.update + 1, 0
        for after_finalize in self._extensions.after_finalize:
            after_finalize(self, update)
        return update

    def _check_can_finalize(self, max_norm: float | None, weight: float | None) -> None:
        """Raise an error if the update cannot be closed."""
        if self._is_lost:
            self._drop()
            raise MegabatchError(f"{LOST}; give its samples again")
        if self._open is None:
            raise MegabatchError(NOT_OPEN)
        check_positive(max_norm=max_norm, weight=weight)
        self._open.check_complete()
        if weight is not None:
            self._open.check_replaceable(weight)

    def _take_open(self) -> tuple[OpenUpdate, MegabatchError | None]:
        """Return the open update, which is then closed to calls, and the error if other code took its gradient."""
        opened, taken = cast(OpenUpdate, self._open), None
        try:
            self.call_guard.check()
        except MegabatchError as error:
            # Every rank must learn it before it steps: opened.close() tells the others.
            opened.is_taken, taken = True, error
            mark_known(error)
        self._open = None
        self.call_guard.release()
        return opened, taken

    def _close(self, opened: OpenUpdate, weight: float | None, max_norm: float | None) -> Update:
        """Close an update: reduce its gradient, then apply the missing factor and the clip."""
        with self.error_guard.agreeing():
            update, factor = opened.close(weight, max_norm)
        parameters, groups = self.wrapper.parameters, self.wrapper.norm_groups
        # No weight on any rank: zeros would still let momentum and weight decay move the parameters. Gradients that
        # are not reduced yet are dropped, too.
        if isinstance(factor, float) and factor == 0.0:
            drop_gradients(parameters)
            self.wrapper.discard()
            return replace(update, finite=torch.zeros_like(update.finite))
        self.wrapper.finish_update()
        if max_norm is not None:
            norm = clip_gradients(
                parameters, max_norm, factor, groups, norm_of=self._wide.norm, uncounted=self.wrapper.uncounted,
                scale=opened.loss_scale,
            )  # fmt: skip
            return update.with_norm(norm)
        # Without a clip, gradients need a pass only for a weight that was not known before the backward.
        if factor is not None:
            scale_gradients(parameters, factor)
        return update

    def state_dict(self) -> dict[str, Any]:
        """Return what the next update needs beside model and optimizer, between two updates.

        With `Shapes` it has the shapes, which are the same on every rank; save the state with each checkpoint. With
        ``cost="measure"`` it has this rank's cost, from which any rank may continue to measure. With ``extensions`` it
        has what they return. Otherwise it is empty. A `Learner` does not save it.

        Raises:
            MegabatchError: An update is open, whose gradient a checkpoint does not have.
        """
        if self._open is not None:
            raise MegabatchError(
                "state_dict() was called while an update is open; a checkpoint is between two updates: call it after "
                "finalize()"
            )
        return self._extensions.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the update of a saved state, and drop the open one.

        Raises `PlanError` for a state of other settings.
        """
        self._drop()
        state = self._extensions.load_state_dict(self, state)
        if state:
            raise PlanError(
                f"the state has {', '.join(state)}, which nothing of this accumulator loads; give the settings and "
                "extensions with which it was saved"
            )

    def discard(self) -> None:
        """Drop the open update and its gradient, or the gradient of the last update."""
        # Ranks whose update was lost have nothing left to discard, whether they call this or not.
        if self._open is not None or any(parameter.grad is not None for parameter in self.wrapper.parameters):
            self.ranks.position.num_discarded += 1
        self._drop()

    def _drop(self) -> None:
        """Drop the open update and its gradient. Calls may add again, also after a lost update."""
        self._is_lost = False
        self.abandon()

    def abandon(self) -> None:
        """Drop the open update and its gradient: an update is never applied in part.

        A lost update stays lost, so that `finalize` reports it. `discard` ends that.
        """
        self.ranks.position.call = 0
        if self._open is not None:
            self._open.is_dropped, self._open.is_running = True, False
        self._open = None
        self.call_guard.release()
        self.wrapper.discard()
        self._wide.discard()
        drop_gradients(self.wrapper.parameters)
        for after_drop in self._extensions.after_drop:
            after_drop(self)
