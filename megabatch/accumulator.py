"""GradientAccumulator: the open update, from plan to gradient. It knows no optimizer, schedule, data source or file."""

import contextlib
import copy
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch import engine
from megabatch.batching.inside_samples import InsideSamples
from megabatch.batching.packed_row import OneRow
from megabatch.batching.padding import Padding
from megabatch.batching.sample_outputs import split_outputs
from megabatch.batching.samples import Batch, Collate, Length, Microbatch, Samples
from megabatch.batching.shared_prefix import SharedPrefix
from megabatch.engine import random_state
from megabatch.engine.call import (
    CallAgreement,
    MicrobatchPlanner,
    MicrobatchStep,
    PreparedBatch,
    StatedLimit,
    agree_on_call,
    agree_on_weights,
    iterate_steps,
    with_dummies,
)
from megabatch.engine.error_broadcast import ErrorBroadcast, agreeing, is_out_of_memory, mark_known, out_of_memory_error
from megabatch.engine.guards.graph_on_demand import GraphOnDemand
from megabatch.engine.oom_retry import OOMRetry
from megabatch.engine.ownership import ByLoss, Ownership, Receipt
from megabatch.engine.packing_check import check_packing, watched
from megabatch.engine.update import OpenUpdate, Update, add_terms
from megabatch.errors import MegabatchError, MicrobatchLimit, PlanError, check_positive, missing_attribute
from megabatch.losses.contract import (
    CoupledLoss,
    LossFunction,
    LossHooks,
    Term,
    loss_hooks,
    takes_divisor,
    terms_of,
)
from megabatch.losses.padded_targets import check_totals
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel, Plan, check_cost, check_limits
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.checks import check_rank_agreement
from megabatch.wrappers.detect import Models, choose_policy, detect_wrapper
from megabatch.wrappers.gradients import (
    ExactGradients,
    WideGradients,
    clip_gradients,
    drop_gradients,
    graph_nodes,
    no_float16_autocast,
    scale_gradients,
)
from megabatch.wrappers.mesh import num_collectives

MAX_COMPARED_CALLS = 8  # calls in which ranks compare each collective: a loss made anew for each call is always new
OWN_LOOP = "surround each microbatch of your loop with microbatch(), and call scale(loss).backward() of what it yields"
REMOVED = {  # method -> what to do instead; a line is kept for one release
    "pin_cost": "give cost=gradient.cost to a new GradientAccumulator",
    "step_in_backward": "step the optimizer after finalize(), since it freed no memory where gradients accumulate",
    "microbatches": OWN_LOOP,
    "backward": OWN_LOOP,
}
LOST = (
    "an update was lost when one of its calls failed or other code took its gradient; the sums of its other calls are "
    "dropped"
)


class _Call(NamedTuple):
    """A call that is under way."""

    model: Models
    wrapper: Wrapper
    loss_fn: Any
    prepared: PreparedBatch
    agreement: CallAgreement
    opened: OpenUpdate
    hooks: LossHooks
    takes_divisor: bool  # the loss divides its total itself
    is_new: bool  # the loss was not tried in a call before

    @property
    def given(self) -> list[object]:
        """Objects besides the model that a loss may use: the batch, as far as it is in memory."""
        return [self.prepared.samples.held(), self.prepared.collated]


class GradientAccumulator:
    """Computes the exact gradient of an update, microbatch by microbatch.

    After `finalize`, ``p.grad`` is the gradient of ``sum(total) / sum(weight)``. The sums run over every sample that
    any rank gave since the last `finalize`. The split into microbatches does not change the result. The constructor
    and all methods except `plan` are collective.

    Args:
        model: A plain model, or one wrapped by DistributedDataParallel, FSDP2's ``fully_shard`` or ``replicate``, or
            FSDP1, with or without tensor parallelism. A list of such models is passed to the loss as a list. The
            gradients of a plain model on several ranks are summed once per update.
        mesh: Names the mesh axes if the model does not. None reads the wrapper's own mesh.
        micro_batch_size: Samples per forward. Give this or ``max_microbatch_tokens``.
        max_microbatch_tokens: Padded tokens per forward, a hard limit. "auto", or neither argument, chooses the largest
            limit that fits, or one that is as fast: the first `forward_backward` measures a few microbatches, which
            leave nothing behind.
            The ``fit`` of another accumulator reuses its measured limit.
        memory_bytes: Bytes that this rank may use on its device, for "auto". None uses 90 % of the free memory.
        cost: Seconds and bytes of a microbatch, used to split samples and to predict the cost of a plan. None uses the
            measurements of "auto", or relative defaults if you give a limit. "measure" times the microbatches of your
            updates and splits by that: the gradient is the same, but its last bits follow the clock.
        sync: "last" reduces gradients once per call, "every" with each microbatch. "replica_last" (for HSDP)
            reduce-scatters with each microbatch and all-reduces once per call. "auto" chooses by the wrapper. After
            `open`, "once per call" is once per update. "gather_once" (for FSDP2 and HSDP) reduces as "auto" does, and
            gathers parameters once per call instead of twice per microbatch. It keeps them gathered until the call's
            last backward.
        collate: Makes a microbatch of a list of samples. The default pads on the right. `OneRow` does not pad.
            `SharedPrefix` computes the tokens that samples begin with in common once. `InsideSamples` cuts samples that
            are longer than ``max_microbatch_tokens``.
        padding: Padding values of the default collate, ``{key: value}``. They override the choices of `Padding`.
        length: Returns the number of tokens of a sample. The default is the size of dim 0 of its first tensor.
        accumulate_dtype: The dtype in which gradients are added, such as torch.float32 for bfloat16 parameters.
            `finalize` rounds them to the parameters' dtype after the norm and the clip. None uses each parameter's own.
        same_bits: Give gradients, norms, losses and metrics the same bits on any number of data ranks. This needs one
            of the two limits as a number, shares of ``UpdateSampler(same_bits=True)`` and, with FSDP2,
            ``MixedPrecisionPolicy(reduce_dtype=torch.float64)``. Gradients are added in float64, and a parameter that
            no sample uses has a gradient of zeros.
        shapes: Fill each microbatch up to one of at most so many shapes, rows x tokens, so that ``torch.compile`` with
            ``dynamic=False`` compiles as many graphs. The first `forward_backward` chooses them from the lengths of all
            ranks, and `state_dict` keeps them. It needs a model of transformers without experts and without code of
            your own, and ``losses.next_token`` or ``losses.classification``. With `OneRow` few tokens fill up. Padded
            rows take many more, and a longer sample in a later call adds a shape.

    Attributes:
        fit: The measured limit, a `TunedLimit`. None before the measurement, and if you give a limit.
        cuts_samples: True with `InsideSamples`.
        last_plan: The `Plan` of this rank's last call, as it ran. None before the first call.

    Raises:
        PlanError: An argument, a model or a wrapper that cannot be planned or reduced exactly.
    """

    def __init__(
        self,
        model: Models,
        *,
        mesh: DeviceMesh | None = None,
        micro_batch_size: int | None = None,
        max_microbatch_tokens: int | str | TunedLimit | None = None,
        memory_bytes: int | None = None,
        cost: CostModel | str | None = None,
        sync: str = "auto",
        collate: Collate | None = None,
        length: Length | None = None,
        padding: Mapping[str, float] | None = None,
        accumulate_dtype: torch.dtype | None = None,
        same_bits: bool = False,
        shapes: int | None = None,
    ) -> None:
        fit = None
        if isinstance(max_microbatch_tokens, TunedLimit):
            fit, max_microbatch_tokens = max_microbatch_tokens, "auto"
        limits = check_limits(micro_batch_size, max_microbatch_tokens)
        measures_cost = cost == "measure"
        cost = check_cost(None if measures_cost else cost, ' or "measure"')
        self.model = model
        # The wrapper knows how gradients are reduced; nothing below asks for DDP or FSDP by name.
        self._wrapper = detect_wrapper(model, mesh)
        new_planner, self._new_update, new_gradients = MicrobatchPlanner, OpenUpdate, WideGradients
        self._same_bits = bool(same_bits)
        if same_bits:
            from megabatch.engine import same_bits as exact

            accumulate_dtype = exact.check_settings(self._wrapper, limits, collate, accumulate_dtype, same_bits)
            new_planner, self._new_update = exact.SameBitsPlanner, exact.SameBitsUpdate
            new_gradients = ExactGradients
        self.cuts_samples = isinstance(collate, InsideSamples)
        if self.cuts_samples:
            from megabatch.engine.chunk_planner import ChunkPlanner

            new_planner, collate = ChunkPlanner, None
        if self._wrapper.is_pipeline:
            from megabatch.pipeline.schedule_steps import SchedulePlanner

            new_planner = partial(SchedulePlanner, pipeline=cast(Any, model))
        self._wide = new_gradients(self._wrapper.parameters, accumulate_dtype)
        self._wrapper.accumulate_in(self._wide)
        self.ranks = ranks = self._wrapper.ranks  # the ranks that work on an update
        choice = choose_policy(self._wrapper, sync)
        # Ranks with other models or settings would sum one parameter's gradient into another's.
        check_rank_agreement(self._wrapper, choice[0], accumulate_dtype, shapes)
        self._padding = Padding(self._wrapper.models, padding, names_collate=collate is not None)
        self._planner = new_planner(*limits, collate, length, choice, ranks, cost, fit, padding=self._padding)
        self._limit = StatedLimit()  # or a MicrobatchTuner, where the limit is "auto"
        if self._planner.is_auto:
            from megabatch.autotune.tuner import MicrobatchTuner

            self._limit = MicrobatchTuner(model, self._wrapper, self._wide, memory_bytes)
        elif memory_bytes is not None:
            raise PlanError('memory_bytes is for max_microbatch_tokens="auto", and a limit is given; leave one out')
        self._meter: Any = None  # a CostMeter, with cost="measure"
        if measures_cost:
            self._refuse_same_bits('cost="measure"')
            from megabatch.autotune.cost_meter import CostMeter

            self._meter = CostMeter(self._wrapper, self._planner)
        # A rank that runs out of memory inside a collective must tell those that wait for it.
        self._error_broadcast = None if ranks.is_alone else ErrorBroadcast(ranks, self._wrapper.device)
        if self._error_broadcast is not None:
            ranks.position.accumulator = self._error_broadcast.number
        if self.cuts_samples:
            from megabatch.engine.chunk_planner import check_settings

            others = {"same_bits": same_bits, "shapes": shapes, "cost": measures_cost}
            with self._guarded():
                check_settings(self._wrapper, limits[1], others)
        self._is_packed = isinstance(collate, OneRow)
        self._sharing = collate if isinstance(collate, SharedPrefix) else None
        if isinstance(collate, OneRow | SharedPrefix):
            with self._guarded():
                check_packing(self._wrapper, collate, limits)
        self._shapes: Any = None  # a FewShapes, with shapes=
        if shapes is not None:
            self._refuse_same_bits(f"shapes={shapes}")
            from megabatch.autotune.few_shapes import FewShapes

            self._shapes = FewShapes(shapes, self._wrapper, self._planner, padding)
        self._ownership = Ownership(self._wrapper)
        self._remembered: ByLoss[Callable[[], Microbatch | None]] = ByLoss()  # by loss, makes a dummy
        self._was_finite: Tensor | bool = True  # False if the update of these samples was not finite
        self._open: OpenUpdate | None = None
        self._is_lost = False  # a call failed after others had added to the update; reset by finalize() and discard()
        self._num_compared_calls = 0
        self._running = False  # inside a call, between its first microbatch and its last
        self._loop: Any = None  # a UserLoop, from the first microbatch() of an update to finalize()
        self.last_plan: Plan | None = None
        self.fit = self._planner.fit  # the measured limit; None if the user gave a limit

    @property
    def open_update(self) -> OpenUpdate | None:
        """The open update. None between `finalize` and the next call."""
        return self._open

    @property
    def is_counting(self) -> bool | None:
        """True while a microbatch runs, False while a dummy microbatch runs, None if no microbatch runs by itself."""
        return self._wrapper.is_counting

    @property
    def oom_limit(self) -> MicrobatchLimit | None:
        """The microbatch limit that was learned from running out of memory. None if every microbatch has fit."""
        return self._planner.learned

    def lower_limit(self, limit: MicrobatchLimit | None) -> None:
        """Lower the limit of a microbatch, for example to another accumulator's ``oom_limit``. None changes nothing.

        The ``shortage.bound`` of a `MegabatchError` is also such a limit.
        """
        self._planner = self._planner.lowered(limit)

    @property
    def cost(self) -> CostModel | None:
        """The cost by which the next call splits samples: given, measured, or that of ``fit``. None: relative defaults.

        With ``cost="measure"`` it may change in `finalize`. It is this rank's own.
        """
        return self._planner.known_cost

    def reserve_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Reserve memory for the states of ``optimizer`` when "auto" chooses the limit.

        Without this call, "auto" reserves two states for each trained element. `Learner` calls this. Raises `PlanError`
        for ``same_bits`` with an optimizer that steps shards to other bits than whole parameters.
        """
        if self._same_bits:
            from megabatch.engine.same_bits import check_optimizer

            check_optimizer(self._wrapper, optimizer)
        self._limit.optimizer = optimizer

    def plan(self, batch: Batch) -> Plan:
        """Return the plan by which this rank would split its samples. Run no model and contact no other rank.

        A call of a pipeline on several data ranks is split by the lengths of all ranks, which this plan does not know.

        Args:
            batch: This rank's samples, as for `forward_backward`.

        Raises:
            PlanError: An unusable batch, or a limit that is "auto" and not measured yet, or shapes that are not chosen.
        """
        if self._shapes is not None:
            self._shapes.check_chosen()
        return self._planner.plan(self._planner.samples(batch))

    def tune(self, batch: Batch, loss_fn: LossFunction | CoupledLoss) -> None:
        """Measure the limit for samples as long as the longest of this batch, if it is "auto" and not yet known.

        The first `forward_backward` calls this. Afterwards ``fit`` is the limit, and nothing else has changed.
        Collective.

        Args:
            batch: This rank's samples, as for `forward_backward`.
            loss_fn: The loss that later calls use.

        Raises:
            PlanError: Memory cannot be measured, or a single sample does not fit.
        """
        with self._guarded():
            self._planner = self._limit.fitted(self._planner, batch, loss_fn, self._open)
        self.fit = self._planner.fit

    def prepare(self, batch: Batch, loss_fn: LossFunction | CoupledLoss) -> Batch:
        """Split, collate and weigh the batch of a later call in a thread, while the device works.

        Call it between `forward_backward` and `finalize` with the next batch, and give what it returns to the later
        call in place of the batch. That call computes the same bits. A batch with an error raises in its call, on all
        ranks. This method is not collective, and you may leave it out on any rank.

        Leave the samples and the model's config as they are until the call. ``weigh`` and ``length`` run in the thread.
        The call prepares the samples itself if it has another loss or another limit, if torch has written to the
        samples since, and if it is the second with this batch.

        Returns:
            A batch of the same samples. It is the batch itself, and nothing is prepared, for a collate function of your
            own and a loss with ``prepare=`` of its own, which may draw random numbers, for a `Deferred` batch, for
            samples that are not dicts of tensors on the CPU, and for a pipeline on several data ranks, which agree on
            its schedule steps.

        Args:
            batch: This rank's samples, as for `forward_backward`.
            loss_fn: The loss of the later call.
        """
        hooks = loss_hooks(loss_fn)
        if not self._planner.is_repeatable(hooks):
            return batch
        from megabatch.batching.early_preparation import prepare_early

        return prepare_early(batch, partial(self._planner.prepare, hooks=hooks), (self._planner, hooks, None))

    def open(self, weights: Mapping[str, float] | float | None = None) -> None:
        """Open an update of several calls, before the first. Gradients are then reduced once, in `finalize`.

        Without ``weights``, the update has one differentiable term, and its divisor is corrected in `finalize`. With
        them, each call's totals are divided by the weight of the update before their backward, and the update may have
        any number of terms over any number of calls, each with its own divisor.

        DDP (without a communication hook), FSDP2 and HSDP hold the reduction back under the policies "last" and
        "replica_last". This costs the overlap with the last backward. FSDP2 keeps what "last" keeps until `finalize`.
        Other wrappers, and "every", reduce as often as without `open`.

        Args:
            weights: The weight of this rank's samples in all calls: a mapping from each differentiable term to a
                number, or a number for the only term. The sum over data ranks is the divisor, as with ``weigh``. A
                rank without samples gives 0. `finalize` raises `LossContractError` if the calls return another sum;
                on a device and without ``weigh``, ``update.finite`` is false instead.

        Raises:
            MegabatchError: An update is open.
            LossContractError: A weight that is negative, not finite, or not a number.
            PlanError: Terms that differ between ranks.
        """
        # An error of one rank is raised on all, since the others already wait for its message.
        failure: MegabatchError | None = None
        try:
            self._check_can_open()
            self._wrapper.check_unchanged()
        except MegabatchError as error:
            failure = error
        self.ranks.position.verb = "open()"
        with self._guarded("open()"), agreeing():
            told = agree_on_weights(self.ranks, weights, failure)
        if not all(each.is_integer() for each in told.values()):
            self._refuse_same_bits(f"open() was told weights that are no whole numbers, {told}")
        opened = self._begin()
        # Several calls follow, so a reduction in the last backward of each would be repeated.
        opened.told, opened.is_held = told, True

    def _check_can_open(self) -> None:
        """Raise an error if no update can be opened."""
        if self._running or self._is_lost:
            self._refuse_to_add()
        if self._open is not None:
            raise MegabatchError("open() was called in an open update; call it before the first call, or finalize()")

    def _begin(self) -> OpenUpdate:
        """Open an update before its first call, and drop the gradients of the one before."""
        self._ownership.release()
        drop_gradients(self._wrapper.parameters)
        if self._wide.dtype is not None:
            self._wide.begin()
        self._open = self._new_update(self._wrapper)
        return self._open

    def forward(
        self, batch: Batch, fn: Callable[[Any, Microbatch], Any], *, plan: Plan | None = None, trim: bool = True
    ) -> list[Any]:
        """Return the output of ``fn`` for each of this rank's samples, in their order. Run no backward.

        The samples are cut as `forward_backward` cuts them, so that both compute the same numbers. An open update stays
        as it is, and random numbers are drawn as if this call had not been. Modules keep their mode: call
        ``model.eval()`` if you want it. Collective: every rank runs as many forwards as the one that has the most.

        Args:
            batch: This rank's samples. A rank may have none.
            fn: ``fn(model, microbatch)`` returns a tensor [B, ...] with samples in dim 0, or a tuple or mapping of
                such tensors. It runs under ``torch.no_grad()``, and a second time with gradients if it takes
                derivatives itself.
            plan: The cut of an earlier call with samples of the same lengths, ``last_plan``. None makes one.
            trim: Cut off padding. Outputs are then [B], [B, T, ...] with a column for each of the T padded tokens, or
                [B, T - 1, ...] with one for each next token. A sample of n tokens keeps n or n - 1 columns. Give False
                for outputs of another kind, such as embeddings [B, D], which stay whole.

        Returns:
            A list as long as the batch: what ``fn`` returns, without dim 0, on the device.

        Raises:
            MegabatchError: A call inside a microbatch.
            PlanError: An unusable batch, plan or output; a pipeline, a ``cp`` axis, and `OneRow`.
        """
        if self._is_packed or self.ranks.context_groups:
            raise PlanError(
                "forward() returns the output of each sample, and samples lie in one row or are cut over the mesh axis "
                "'cp'; use an accumulator without"
            )
        # No weight is counted: outputs are not divided.
        hooks = LossHooks(None, loss_hooks(fn).prepare)
        planner = self._planner if self._shapes is None else self._shapes.planner_of(self._planner, None)
        with (
            self._guarded("forward()"),
            self._open_forwards("forward", batch, hooks, plan, planner) as (prepared, steps),
        ):
            forwards = GraphOnDemand(self._wrapper)
            outputs = [(step.is_dummy, forwards.run(fn, self.model, step.microbatch)) for step in steps]
        return split_outputs([output for is_dummy, output in outputs if not is_dummy], prepared.plan, trim=trim)

    def evaluate(self, batch: Batch, loss_fn: LossFunction) -> dict[str, Tensor]:
        """Return the quotient of each term of a loss over the samples of all ranks: sum of totals over sum of weights.

        Like `forward`, this runs no backward and leaves an open update as it is. Modules keep their mode. Collective.
        A loss that takes derivatives, such as forces, gets a graph, which is freed with its microbatch.

        Args:
            batch: This rank's samples. A rank may have none.
            loss_fn: A loss as for `forward_backward`, without gradients.

        Returns:
            Scalars on the device by name of the term, the same on all ranks. NaN for a term without weight; empty if
            no rank has a sample.

        Raises:
            LossContractError: An unusable loss, or one that names other terms on other ranks.
            MegabatchError: A call inside a microbatch.
            PlanError: An unusable batch, a pipeline, a `JointLoss`, and a loss that takes the divisor.
        """
        if isinstance(loss_fn, CoupledLoss) or takes_divisor(loss_fn):
            raise PlanError("evaluate() needs a loss that sums over samples; this couples them, or takes the divisor")
        sums = self._new_update(self._wrapper)
        planner = self._planner if self._shapes is None else self._shapes.planner_of(self._planner, loss_fn)
        with self._guarded("evaluate()"):
            with self._open_forwards("evaluate", batch, loss_hooks(loss_fn), None, planner) as (_, steps):
                forwards = GraphOnDemand(self._wrapper)
                for step in steps:
                    sums.add(terms_of(forwards.run(loss_fn, self.model, step.microbatch)), step)
            with agreeing():
                update, _ = sums.close(None, None)
        if (problem := update.problem()) is not None:
            raise problem
        return update.terms

    @contextlib.contextmanager
    def _open_forwards(
        self, name: str, batch: Batch, hooks: LossHooks, plan: Plan | None, planner: MicrobatchPlanner
    ) -> Generator[tuple[PreparedBatch, Generator[MicrobatchStep]]]:
        """Surround the forwards of a call without a backward: prepare it, and agree on it with the other ranks."""
        wrapper, prepared, failure = self._wrapper, None, None
        self.ranks.position.verb = f"{name}()"
        try:
            if self._running or (self._loop is not None and self._loop.is_running):
                raise MegabatchError(
                    f"{name}() was called inside a microbatch; call it before the first or after the last"
                )
            if wrapper.is_pipeline:
                raise PlanError(f"{name}() cannot run a pipeline; use megabatch.pipeline.evaluate")
            wrapper.reshard()  # as in `_open_call`
            prepared = planner.prepare(batch, hooks, plan)
        except Exception as error:  # the user's collate may raise anything; the other ranks must know
            failure = error
        with agreeing():
            agreement = agree_on_call(wrapper, prepared, failure, hooks.weigh, lambda: None)
        assert prepared is not None  # else its failure was raised
        prepared, agreement = planner.complete(prepared, agreement, hooks, wrapper)
        self.last_plan = with_dummies(prepared.plan, agreement.num_microbatches)
        # With trains=False the wrapper prepares no reduction, which would wait for a backward.
        steps = iterate_steps(prepared, agreement, hooks.weigh, wrapper, trains=False)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._padding.watched())
                if self._is_packed:
                    stack.enter_context(watched(self.model, agreement.num_microbatches))
                if self._sharing is not None and prepared.plan.shared:
                    stack.enter_context(self._sharing.computing(self.model))
                stack.enter_context(random_state.replay(random_state.note(wrapper.device)))
                stack.enter_context(torch.no_grad())
                yield prepared, stack.enter_context(contextlib.closing(steps))
        finally:
            # FSDP frees gathered parameters in its backward, and there was none.
            wrapper.reshard()

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
        if not (self._running or self._is_lost or self._loop):  # else `_open_call` raises
            self._limit.before_call(self, batch, loss_fn)
            if self._shapes is not None and not self._shapes.is_settled:  # by the limit
                self.tune(batch, loss_fn)
                with self._guarded():
                    self._planner = cast(Any, self._shapes).fitted(self._planner, batch, loss_fn)
        run_call = self._wrapper.run_call or getattr(loss_fn, "run_call", None) or self._run_call
        with (
            self._guarded("forward_backward()"),
            self._open_call(batch, loss_fn, plan) as call,
        ):
            sums = run_call(call)
        return {name: Term(total, torch.as_tensor(weight, dtype=total.dtype)) for name, (total, weight) in sums.items()}

    def _run_call(self, call: "_Call") -> dict[str, Term]:
        """Run the microbatches of a call one after another. Return this rank's sums."""
        sums: dict[str, Term] = {}
        call.opened.count_call(call.agreement)
        prepared, wrapper = call.prepared, self._wrapper
        with (
            contextlib.closing(iterate_steps(prepared, call.agreement, call.hooks.weigh, wrapper)) as own_steps,
            contextlib.closing(self._planner.surround_steps(own_steps, prepared, call.loss_fn, wrapper)) as steps,
        ):
            # The first call of a loss also checks it, so that its time is not that of a microbatch.
            meter = None if call.is_new else self._meter
            for step in steps if meter is None else meter.time_steps(steps, prepared):
                for part in self._run_step(step, call.loss_fn, call):
                    add_terms(sums, part)
                del step  # with its microbatch, before the next is made
        return sums

    def _refuse_shapes(self, what: str) -> None:
        if self._shapes is not None:
            raise PlanError(f"shapes= and {what}; leave one of the two out")

    def _run_step(self, step: MicrobatchStep, loss_fn: LossFunction, call: "_Call") -> list[dict[str, Term]]:
        """Run one microbatch. If it does not fit in memory, run it again in parts. Return the sums of each part."""
        opened, wrapper = call.opened, self._wrapper
        before = Receipt.of(wrapper.parameters)
        num_sent = 0 if wrapper.ranks.is_alone else num_collectives()
        opened.taking_back.clear()
        run = partial(self._forward_backward, loss_fn=loss_fn, call=call)
        try:
            return [run(step, before=before)]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            retry = OOMRetry(call.prepared, call.hooks.weigh, wrapper, opened, takes_divisor=call.takes_divisor,
                             same_bits=self._same_bits)  # fmt: skip
            run_in_parts = retry.prepare_parts(step, error, before, num_sent, run)
        return run_in_parts()  # out of the handler, which keeps the failed graph in memory

    def _forward_backward(
        self, step: MicrobatchStep, loss_fn: LossFunction, call: "_Call", before: Receipt | None = None
    ) -> dict[str, Term]:
        """Run forward and backward of one microbatch. Return its sums. ``before`` may be a receipt of this moment."""
        if call.is_new or call.takes_divisor:
            terms = self._call_checked_loss(step, loss_fn, call)
        else:
            accumulating = self._wrapper.accumulating
            if before is None or before.parameters is not accumulating:
                before = Receipt.of(accumulating)
            terms = terms_of(loss_fn(self.model, step.microbatch))
            self._ownership.check_unmoved(before)
            del before  # which would keep gradients that a wrapper frees in its backward
        return call.opened.backward(terms, step)

    def _call_checked_loss(self, step: MicrobatchStep, loss_fn: LossFunction, call: "_Call") -> dict[str, Term]:
        """Run a loss that is new or takes the divisor, and check its side effects on gradients."""
        opened, ownership, model = call.opened, self._ownership, self.model
        if call.is_new:
            opened.check_divided(loss_fn, model, step)
        random = random_state.note(self._wrapper.device) if call.is_new else None
        before = Receipt.of(self._wrapper.accumulating)
        given = dict(step.microbatch) if isinstance(step.microbatch, Mapping) else {}  # the loss may pop its labels
        terms = opened.terms_of(loss_fn, model, step)
        if not call.takes_divisor:
            ownership.check_unmoved(before)
        if random is not None:
            ownership.check_reach(loss_fn, before, terms, [step.microbatch, *call.given])
            totals = [term.total for term in terms.values() if term.total.requires_grad]
            check_totals(self._padding.running_lengths, given, graph_nodes(totals))
        del before  # which would keep gradients that a wrapper frees in its backward
        if random is not None and ownership.uses_up(loss_fn, terms):
            random_state.put_back(random)
            terms = opened.terms_of(loss_fn, model, step)
        return terms

    @contextlib.contextmanager
    def microbatch(
        self, index: int, *, of: int, sum_over: float | Tensor | None = None, mean_over: float | Tensor | None = None,
        update_weight: float | Tensor | None = None, divided: bool = False,
    ) -> Generator["engine.LoopMicrobatch"]:  # fmt: skip
        """Surround forward and backward of one microbatch in a loop of your own, which keeps its data and its loss.

        This reduces gradients by the sync policy, counts the microbatches, and divides by the weight of the update.
        In the body, call ``part.scale(loss).backward()`` once, with the ``part`` that this yields (`LoopMicrobatch`).
        Without `LoopMicrobatch.scale`, `finalize` divides the gradient of a sum, in the pass that clips or in one of
        its own. Say what the loss is by ``sum_over``, ``mean_over``, ``update_weight`` or ``divided``. Every number is
        this rank's own. After the last microbatch, call `finalize`. An error in the body drops the update, and the
        other ranks raise a `MegabatchError` with its text, here or in `finalize`.

        Args:
            index: Number of the microbatch in the update, from 0.
            of: Microbatches of the update. Every rank runs the same number; where one has fewer, it repeats any of its
                microbatches with ``sum_over=0``.
            sum_over: The loss is a sum over so many targets, samples, or what else is to weigh.
            mean_over: The loss is a mean over so many.
            update_weight: The sum of these numbers over the microbatches of this rank. With it, gradients need no pass
                of their own. Alone, it says that the loss is a sum.
            divided: The loss is divided already by the weight of the update over all ranks.

        Raises:
            MegabatchError: A microbatch out of order, without a backward, or with several.
            LossContractError: A loss that is not what you say.
            PlanError: A pipeline, and ranks that run different numbers.
        """
        from megabatch.engine.user_loop import read_request

        if self._loop is None:
            self._check_can_loop(index)
        request, failure = None, None
        try:
            request = read_request(of, sum_over, mean_over, update_weight, divided)
        except MegabatchError as error:
            failure = error  # the other ranks must know
        if self._loop is None:
            self._open_loop(request, failure)
        loop: Any = self._loop
        try:
            others = self._error_broadcast
            with contextlib.nullcontext() if others is None else others.listening(f"microbatch {index} of {of}"):
                if request is None:
                    raise cast(Exception, failure)
                loop.check_next(index, request.of)
                with loop.run(index, request) as part:
                    yield part
        except BaseException:
            if self._loop is loop:  # else the body has discarded the update
                self._abandon()
            raise

    def _open_loop(self, request: Any, failure: MegabatchError | None) -> None:
        """Open an update of `microbatch`: agree on it with the other ranks, and drop the old gradients."""
        from megabatch.engine.user_loop import UserLoop, agree_on_loop

        wrapper, (sync, _) = self._wrapper, self._planner.choice
        self.ranks.position.verb = "microbatch()"
        wrapper.reshard()  # as in `_open_call`
        try:
            wrapper.check_unchanged()
        except MegabatchError as error:
            failure = failure or error
        with agreeing():
            request, agreement = agree_on_loop(wrapper, request, failure)
        opened = self._begin()
        wrapper.begin_call(sync)
        self._loop = UserLoop(wrapper, self._ownership, opened, sync, request, agreement)

    def _check_can_loop(self, index: int) -> None:
        """Raise an error if no update of `microbatch` can begin."""
        if self._running or self._is_lost:
            self._refuse_to_add()
        if self._wrapper.is_pipeline:
            raise PlanError("a pipeline runs the microbatches of a call together; use forward_backward, not microbatch")
        self._refuse_same_bits("microbatch(), whose loop makes its own cut")
        self._refuse_shapes("microbatch(), whose loop makes its own microbatches")
        if self._open is not None:
            raise MegabatchError("microbatch() was entered in an update of other calls; finalize() it before")
        if index != 0:
            raise MegabatchError(f"microbatch {index} was entered when no update is open; begin with microbatch 0")

    @contextlib.contextmanager
    def _open_call(
        self, batch: Batch, loss_fn: LossFunction | CoupledLoss, given: Plan | None, *, tunes: bool = True
    ) -> Generator["_Call"]:
        """Surround one call: prepare it and agree on it with the other ranks. If it fails, drop the update.

        With ``tunes``, a measured limit that the samples of any rank have outgrown is measured anew, on all ranks.
        """
        if self._running or self._is_lost or self._loop is not None:
            self._refuse_to_add()
        wrapper, ownership, order = self._wrapper, self._ownership, self._wrapper.collective_order
        hooks = loss_hooks(loss_fn)
        self.ranks.position.verb = "forward_backward()"
        self.ranks.position.call += 1
        planner, prepared, failure = self._planner.of_call(batch), None, None
        tried = ownership.tried.get(loss_fn)  # None for a new loss
        if wrapper.forwards_meet:
            wrapper.reshard()  # a forward without a backward leaves weights gathered, perhaps those before the step
            order.wants_comparison = tried is None and self._compares_new(loss_fn)
        try:
            ownership.check()
            wrapper.check_unchanged()
            self._limit.check_call(self._planner, batch, loss_fn, self._open)
            if self._shapes is not None:
                self._shapes.check(loss_fn)
            early = getattr(batch, "preparation", None)  # of a batch that `prepare` returned
            prepared = early and early.take((planner, hooks, given))
            prepared = prepared or planner.prepare(batch, hooks, given)
        except Exception as error:  # the user's collate or weigh may raise anything; the other ranks must know
            failure = error
        is_outgrown = tunes and self._limit.is_outgrown(self._planner, batch, prepared, self._open)
        try:
            with agreeing():
                agreement = agree_on_call(
                    wrapper, prepared, failure, hooks.weigh, partial(self._recall, loss_fn), is_outgrown=is_outgrown
                )
        except MegabatchError as error:
            if error.loses_update:  # found on any rank: the gradients no longer belong to this update
                self._open, self._is_lost = None, True
                self._wide.discard()
            raise
        if agreement.is_outgrown:
            prepared = None  # its memory is not to be measured
            self._planner = self._limit.fitted(self._planner, batch, loss_fn, self._open)
            self.fit = self._planner.fit
            with self._open_call(batch, loss_fn, given, tunes=False) as call:
                yield call
            return
        assert prepared is not None  # else its failure was raised
        prepared, agreement = planner.complete(prepared, agreement, hooks, wrapper)
        planner.check_call(wrapper, prepared.plan, loss_fn)
        # A later call may leave this rank without samples: it then repeats one of these, with weight 0.
        if not self.ranks.is_alone and len(prepared.samples):
            last = prepared.samples.copy_last()
            self._remembered.set(loss_fn, partial(self._make_dummy, last))
            self._was_finite = True
        # A wrapper may free gradients in its backward.
        ownership.enter(is_new=tried is None)
        was_open = self._open is not None
        if self._open is None or not self._open.has_calls:  # other code may have run a backward since open()
            drop_gradients(wrapper.parameters)
        if self._open is None:
            if self._wide.dtype is not None:
                self._wide.begin()
            self._open = self._new_update(wrapper)
        if self._open.is_held:
            wrapper.hold_reduction(prepared.plan.sync)
        if agreement.num_microbatches:
            wrapper.begin_call(prepared.plan.sync)
        plan = prepared.plan
        if agreement.num_microbatches > len(plan.microbatches):
            plan = with_dummies(plan, agreement.num_microbatches)
        self.last_plan = plan
        self._running = True
        if agreement.compares_order:
            order.is_compared, self._num_compared_calls = True, self._num_compared_calls + 1
        try:
            with contextlib.ExitStack() as watching:
                watching.enter_context(no_float16_autocast(wrapper.models))
                watching.enter_context(self._padding.watched())
                if self._is_packed:
                    watching.enter_context(watched(self.model, agreement.num_microbatches))
                if self._sharing is not None and prepared.plan.shared:
                    watching.enter_context(self._sharing.computing(self.model))
                divides = takes_divisor(loss_fn) if tried is None else tried
                yield _Call(
                    self.model, wrapper, loss_fn, prepared, agreement, self._open, hooks, divides, is_new=tried is None
                )
            ownership.leave(self._open.total_factor)
            self._running = False
            if prepared.parts:
                self.last_plan = plan.in_parts(prepared.parts)
                ran = [rows for parts in prepared.parts.values() for rows in parts if rows]
                self.lower_limit(plan.bound_of(ran) if ran else None)
        finally:
            order.is_compared = False
            if self._running:  # the loss raised
                self._is_lost = was_open  # and with it the weights that open() was told
                self._abandon()

    def _compares_new(self, loss_fn: object) -> bool:
        """Return True if ranks that wait for each other in forwards compare the collectives of a new loss."""
        is_together = self._wrapper.run_call is not None or hasattr(loss_fn, "run_call")
        return not is_together and self._num_compared_calls < MAX_COMPARED_CALLS

    @contextlib.contextmanager
    def _guarded(self, verb: str | None = None) -> Generator[None]:
        """Surround code that may fail while other ranks wait: they raise a one-line error, too.

        Running out of memory is always told, and within a call, a ``verb``, any error.
        """
        if self._error_broadcast is not None:
            with self._error_broadcast.listening(verb):
                yield
            return
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory_error(error, self.ranks) from error
            raise

    def _refuse_same_bits(self, what: str) -> None:
        if self._same_bits:
            raise PlanError(f"same_bits=True and {what}; leave one of the two out")

    def _refuse_to_add(self) -> None:
        """Raise `MegabatchError` since no call can add to the update."""
        if self._running:
            raise MegabatchError(
                "forward_backward() or microbatch() was called inside the loss of another call; finish one before the "
                "next"
            )
        if self._loop is not None:
            raise MegabatchError("the update consists of microbatch(), and no call adds to it; finalize() it before")
        raise MegabatchError(f"{LOST}; discard() it, and give its samples again")

    def _make_dummy(self, samples: Samples) -> Microbatch:
        return self._planner.dummy(samples)  # by the planner of now: a lower limit may have changed its shapes

    def _recall(self, loss_fn: object) -> Microbatch | None:
        """Return a dummy microbatch from an earlier call with the same loss, for a rank without samples.

        Samples of an update that was not finite are dropped: zero times a gradient that is not finite is NaN.
        """
        if not self._was_finite:  # waits for the device, where a rank has no sample
            self._remembered, self._was_finite = ByLoss(), True
        make = self._remembered.get(loss_fn)
        return None if make is None else make()

    def finalize(self, *, max_norm: float | None = None, weight: float | None = None) -> Update:
        """Close the update. ``p.grad`` is then its gradient. Collective.

        An update without weight leaves every ``p.grad`` None. On a device and without ``weigh`` it leaves zeros, since
        only the device knows the weight. The host does not wait for the device.

        Args:
            max_norm: Clip the gradient to this 2-norm. Without it, ``update.finite`` covers the losses and not the
                gradients.
            weight: Replaces the divisor of an update with one term.

        Returns:
            The update: its loss, terms, norm and counts. Step the optimizer only if ``update.finite`` is true.

        Raises:
            LossContractError: On the CPU, the counted and the returned weights differ, on any rank. On a device that
                check would wait, so ``update.finite`` is false instead, and ``update.problem()`` names the fault.
            MegabatchError: No update is open, or it was lost.
        """
        if self._is_lost:
            self._drop()
            raise MegabatchError(f"{LOST}; give its samples again")
        if self._open is None or self._running:
            raise MegabatchError(
                "finalize() was called and no update is open: call forward_backward(), or run a loop of microbatch(), "
                "before, and again if it raised"
            )
        check_positive(max_norm=max_norm, weight=weight)
        if self._loop is not None:
            self._loop.check_complete()
        if weight is not None and self._open.told:
            raise PlanError(f"weight is {weight:.10g}, but open() was told the weight before; leave one of them out")
        position = self.ranks.position
        position.verb = "finalize()"
        # If other code took the gradient of one rank, every rank must learn it before it steps.
        opened, taken = self._open, None
        try:
            self._ownership.check()
        except MegabatchError as error:
            opened.is_taken, taken = True, error  # opened.close() reports this to the other ranks
            mark_known(error)
        self._open = None
        self._ownership.release()
        try:
            if self._loop is not None and self._error_broadcast is not None:
                self._error_broadcast.check()
            with self._guarded("finalize()"):
                update = self._close(opened, weight, max_norm)
                if self._loop is not None:
                    update = self._loop.report(update)
                if taken is not None:
                    raise taken
        except MegabatchError as error:
            self._abandon()
            raise (taken or error) from None
        # Gradients are rounded once, after the norm and the clip.
        self._wide.finish()
        self._was_finite, self._loop = update.finite, None
        position.update, position.call = position.update + 1, 0
        if self._meter is not None and (cost := self._meter.end_update()) != self._planner.cost:
            self._planner = replace(self._planner, cost=cost)
        return update

    def _close(self, opened: OpenUpdate, weight: float | None, max_norm: float | None) -> Update:
        """Close an update: reduce its gradient, then apply the missing factor and the clip."""
        with agreeing():
            update, factor = opened.close(weight, max_norm)
        parameters, groups = self._wrapper.parameters, self._wrapper.norm_groups
        # No weight on any rank: zeros would still let momentum and weight decay move the parameters.
        if isinstance(factor, float) and factor == 0.0:
            drop_gradients(parameters)
            if opened.is_held:
                self._wrapper.discard()
            return replace(update, finite=torch.zeros_like(update.finite))
        self._wrapper.finish_update()
        if max_norm is not None:
            scale = None if self._loop is None else self._loop.loss_scale  # a GradScaler has multiplied by it
            limit = max_norm if scale is None else max_norm * scale
            uncounted, exactly = self._wrapper.uncounted, self._same_bits
            norm = clip_gradients(parameters, limit, factor, groups, exactly=exactly, uncounted=uncounted, scale=scale)
            return update.with_norm(norm if scale is None else norm / scale)
        # The only pass over gradients, for a weight that was not known before the backward.
        if factor is not None:
            scale_gradients(parameters, factor)
        return update

    def state_dict(self) -> dict[str, Any]:
        """Return what the next update needs beside model and optimizer, between two updates.

        With ``shapes`` it has the shapes, which are the same on every rank; save the state with each checkpoint. With
        ``cost="measure"`` it has this rank's cost, from which any rank may continue to measure. Otherwise it is empty.

        Raises:
            MegabatchError: An update is open, whose gradient a checkpoint does not have.
        """
        if self._open is not None or self._running:
            raise MegabatchError(
                "state_dict() was called while an update is open; a checkpoint is between two updates: call it after "
                "finalize()"
            )
        state: dict[str, Any] = {}
        if self._meter is not None and self.cost is not None:
            state["cost"] = asdict(self.cost)
        return state if self._shapes is None else state | {"shapes": self._shapes.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the update of a saved state, and drop the open one.

        Raises `PlanError` for a state of other settings.
        """
        self._drop()
        state = dict(state)
        state.pop("units", None)  # of same_bits="proved", which is gone
        cost = state.pop("cost", None)
        if self._meter is not None and cost is not None:
            self._meter.cost = CostModel(**cost)
            self._planner = replace(self._planner, cost=self._meter.cost)
        if self._shapes is not None:
            self._planner = self._shapes.load(self._planner, state.pop("shapes", []))
        if "shapes" in state:
            raise PlanError("the state has shapes; give the shapes= with which it was saved")
        if state:
            raise PlanError(
                f"the state has {', '.join(state)}, of an update that was saved open, which can no longer be loaded; "
                "give the update's samples again"
            )

    def discard(self) -> None:
        """Drop the open update and its gradient, even in the middle of a call. Do nothing if no update is open."""
        # Ranks whose update was lost have nothing left to discard, whether they call this or not.
        if self._open is not None or any(parameter.grad is not None for parameter in self._wrapper.parameters):
            self.ranks.position.num_discarded += 1
        self._drop()

    def _drop(self) -> None:
        """Drop the open update, also one that was lost."""
        self._is_lost = False
        self._abandon()

    if not TYPE_CHECKING:  # where every attribute would be known

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name, REMOVED)

    def __getstate__(self) -> Any:
        raise PlanError(
            "a GradientAccumulator cannot be pickled; save its state_dict(), and make a new one for the model"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradientAccumulator":
        if self._open is not None or self.ranks.num_all > 1:
            why = "with an open update" if self._open is not None else "over several ranks"
            raise MegabatchError(
                f"a GradientAccumulator {why} cannot be copied; make a new one for the copied model, after finalize()"
            )
        made = memo[id(self)] = object.__new__(type(self))
        vars(made).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made

    def _abandon(self) -> None:
        """Drop the open update and its gradient: an update is never applied in part."""
        self.ranks.position.call = 0
        self._open, self._running = None, False
        if self._loop is not None:
            self._loop.is_dropped, self._loop = True, None
        self._ownership.release()
        self._wrapper.discard()
        self._wide.discard()
        drop_gradients(self._wrapper.parameters)
