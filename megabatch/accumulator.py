"""GradientAccumulator: the open update, from plan to gradient. It knows no optimizer, schedule, data source or file."""

import contextlib
import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch import loops
from megabatch.batching.padding import Padding
from megabatch.core.by_loss import ByLoss
from megabatch.core.call import (
    CallAgreement,
    MicrobatchPlanner,
    MicrobatchStep,
    PreparedBatch,
    agree_on_call,
    iterate_steps,
    with_dummies,
)
from megabatch.core.choice import choose_batching
from megabatch.core.contract import (
    CoupledLoss,
    LossFunction,
    LossHooks,
    Term,
    loss_hooks,
    takes_divisor,
    terms_of,
)
from megabatch.core.error_kinds import is_out_of_memory, mark_known
from megabatch.core.extension import Call, Extension, Extensions
from megabatch.core.gradients import clip_gradients, drop_gradients, no_float16_autocast, scale_gradients
from megabatch.core.mesh import num_collectives
from megabatch.core.samples import Batch, Batching, Collate, Length, Microbatch, Samples
from megabatch.core.update import NOT_OPEN, OpenUpdate, Update, add_terms
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, MicrobatchLimit, PlanError, ReplanError, check_positive, missing_attribute
from megabatch.guards.loss_trial import NewLossTrial
from megabatch.guards.memory_guard import MemoryGuard
from megabatch.guards.ownership import Ownership
from megabatch.guards.receipts import Receipt, check_unmoved
from megabatch.planners.built_in import (
    BuiltIn,
    OtherPlanners,
    Parts,
    choose_planner,
    refuse_moved,
    usual_planner,
)
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel, Plan
from megabatch.planning.planner import Planner
from megabatch.wrappers.detect import Models, choose_policy, detect_wrapper

OWN_LOOP = "surround each microbatch of your loop with microbatch(), and call scale(loss).backward() of what it yields"
REMOVED = {  # method -> what to do instead; a line is kept for one release
    "pin_cost": "give planner=Tokens(8192, cost=gradient.cost) to a new GradientAccumulator",
    "step_in_backward": "step the optimizer after finalize(), since it freed no memory where gradients accumulate",
    "microbatches": OWN_LOOP,
    "backward": OWN_LOOP,
}
LOST = (
    "an update was lost when one of its calls failed or other code took its gradient; the sums of its other calls are "
    "dropped"
)


class GradientAccumulator:
    """Computes the exact gradient of an update, microbatch by microbatch.

    After `finalize`, ``p.grad`` is the gradient of ``sum(total) / sum(weight)``. The sums run over every sample that
    any rank gave since the last `finalize`. The split into microbatches does not change the result. The constructor,
    `open`, `tune`, `forward`, `evaluate`, `forward_backward`, `microbatch` and `finalize` are collective.

    Args:
        model: A plain model, or one wrapped by DistributedDataParallel, FSDP2's ``fully_shard`` or ``replicate``, or
            FSDP1, with or without tensor parallelism. A list of such models is passed to the loss as a list. The
            gradients of a plain model on several ranks are summed once per update.
        micro_batch_size: Samples per forward.
        max_microbatch_tokens: Padded tokens per forward, a hard limit. "auto", or no limit at all, chooses the largest
            limit that fits, or one that is as fast, see `Auto`. The ``fit`` of another accumulator reuses its limit.
        planner: How samples are split, in place of the two limits: `Rows`, `Tokens`, `Auto`, `Shapes` or `SameBits` of
            ``megabatch.planners``, or a `Planner` of your own.
        collate: Makes a microbatch of a list of samples. The default pads on the right.
        batching: In place of ``collate``: `Padded` pads with your values, `OneRow` does not pad, `SharedPrefix`
            computes the tokens that samples begin with in common once, `InsideSamples` cuts samples that are longer
            than ``max_microbatch_tokens``. They are in ``megabatch.batching``.
        length: Returns the number of tokens of a sample. The default is the size of dim 0 of its first tensor.
        sync: "last" reduces gradients once per call, "every" with each microbatch, "every:4" with each fourth and the
            last. "replica_last" (for HSDP)
            reduce-scatters with each microbatch and all-reduces once per call. "auto" chooses by the wrapper. After
            `open`, "once per call" is once per update. "gather_once" (for FSDP2 and HSDP) reduces as "auto" does, and
            gathers parameters once per call instead of twice per microbatch. It keeps them gathered until the call's
            last backward.
        mesh: Names the mesh axes if the model does not. None reads the wrapper's own mesh.
        accumulate_dtype: The dtype in which gradients are added, such as torch.float32 for bfloat16 parameters.
            `finalize` rounds them to the parameters' dtype after the norm and the clip. None uses each parameter's own.
        extensions: Objects of `Extension`, which measure, guard or change calls.

    Attributes:
        last_plan: The `Plan` of this rank's last call, as it ran. None before the first call.

    Raises:
        PlanError: An argument, a model or a wrapper that cannot be planned or reduced exactly.
    """

    def __init__(
        self,
        model: Models,
        *,
        micro_batch_size: int | None = None,
        max_microbatch_tokens: int | str | TunedLimit | None = None,
        planner: BuiltIn | Planner | None = None,
        collate: Collate | None = None,
        batching: Batching | None = None,
        length: Length | None = None,
        sync: str = "auto",
        mesh: DeviceMesh | None = None,
        accumulate_dtype: torch.dtype | None = None,
        extensions: Sequence[Extension] = (),
        **moved: Any,
    ) -> None:
        refuse_moved(moved)
        choice = choose_planner(planner, micro_batch_size, max_microbatch_tokens)
        batching = choose_batching(collate, batching)
        inner = batching.for_microbatches()
        self.model = model
        # The wrapper knows how gradients are reduced; nothing below asks for DDP or FSDP by name.
        self._wrapper = wrapper = detect_wrapper(model, mesh)
        self.ranks = ranks = wrapper.ranks  # the ranks that work on an update
        accumulate_dtype = choice.check(wrapper, inner, accumulate_dtype)
        new_planner = choice.new_planner(batching.new_planner(usual_planner(wrapper)))
        self._new_update = choice.new_update
        self._wide = choice.new_gradients(wrapper.parameters, accumulate_dtype)
        wrapper.accumulate_in(self._wide)
        policy = choose_policy(wrapper, sync)
        self._guard = MemoryGuard(ranks)
        if not ranks.is_alone:
            self._guard = _join_ranks(wrapper, policy[0], accumulate_dtype, choice.common_settings)
        inner.pad = self._padding = Padding(wrapper.models, inner.pad.fills)
        rows, tokens = choice.limits
        self.planner = new_planner(
            micro_batch_size=rows, max_microbatch_tokens=tokens, batching=inner, length=length, choice=policy,
            ranks=ranks, cost=choice.known_cost, fit=choice.fit,
        )  # fmt: skip
        attached = choice.extensions(Parts(model, wrapper, self._wide, self.planner))
        with self.guarded():
            batching.check_model(wrapper, choice.limits)
        self._trial = NewLossTrial(wrapper, self._padding)
        self._ownership = Ownership(wrapper, self._trial)
        self._remembered: ByLoss[Callable[[], Microbatch | None]] = ByLoss()  # by loss, makes a dummy
        self._was_finite: Tensor | bool = True  # False if the update of these samples was not finite
        self._open: OpenUpdate | None = None
        self._is_lost = False  # a call failed after others had added to the update; reset by finalize() and discard()
        self.last_plan: Plan | None = None
        self._extensions = Extensions([*attached, *extensions, OtherPlanners()])
        self._extensions.attach(self)

    @property
    def cuts_samples(self) -> bool:
        """True with `InsideSamples`."""
        return self.planner.cuts_samples

    @property
    def fit(self) -> TunedLimit | None:
        """The measured limit. None before the measurement, and if you gave a limit."""
        return self.planner.fit

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
        return self.planner.learned

    def lower_limit(self, limit: MicrobatchLimit | None) -> None:
        """Lower the limit of a microbatch, for example to another accumulator's ``oom_limit``. None changes nothing.

        The ``shortage.bound`` of a `MegabatchError` is also such a limit.
        """
        self.planner = self.planner.lowered(limit)

    @property
    def cost(self) -> CostModel | None:
        """The cost by which the next call splits samples: given, measured, or that of ``fit``. None: relative defaults.

        With ``cost="measure"`` it may change in `finalize`. It is this rank's own.
        """
        return self.planner.known_cost

    def reserve_for(self, optimizer: torch.optim.Optimizer) -> None:
        """Reserve memory for the states of ``optimizer`` when "auto" chooses the limit.

        Without this call, "auto" reserves two states for each trained element. `Learner` calls this. Raises `PlanError`
        for `SameBits` with an optimizer that steps shards to other bits than whole parameters.
        """
        for reserve_for in self._extensions.reserve_for:
            reserve_for(self, optimizer)

    def plan(self, batch: Batch) -> Plan:
        """Return the plan by which this rank would split its samples. Run no model and contact no other rank.

        A call of a pipeline on several data ranks is split by the lengths of all ranks, which this plan does not know.

        Args:
            batch: This rank's samples, as for `forward_backward`.

        Raises:
            PlanError: An unusable batch, or a limit that is "auto" and not measured yet, or shapes that are not chosen.
        """
        return self.planner.plan(self.planner.samples(batch))

    def tune(self, batch: Batch, loss_fn: LossFunction | CoupledLoss) -> None:
        """Measure the limit for samples as long as the longest of this batch, if it is "auto" and not yet known.

        The first `forward_backward` calls this. Afterwards ``fit`` is the limit. A measurement drops ``p.grad``, so
        step the optimizer before. Nothing else changes. Collective.

        Args:
            batch: This rank's samples, as for `forward_backward`.
            loss_fn: The loss that later calls use.

        Raises:
            PlanError: Memory cannot be measured, or a single sample does not fit.
        """
        with self.guarded():
            for tune in self._extensions.tune:
                tune(self, batch, loss_fn)

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
        if not self.planner.is_repeatable(hooks):
            return batch
        from megabatch.batching.early_preparation import prepare_early

        return prepare_early(batch, partial(self.planner.prepare, hooks=hooks), (self.planner, hooks, None))

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
        from megabatch.core.agreement import agree_on_weights

        with self.guarded("open()"), self._guard.agreeing():
            told = agree_on_weights(self.ranks, weights, failure)
        self.planner.check_told(told)
        opened = self._begin(self._new_update(self._wrapper))
        opened.tell(told)
        # Several calls follow, so a reduction in the last backward of each would be repeated.
        opened.hold_reduction()

    def _check_can_open(self) -> None:
        """Raise an error if no update can be opened."""
        self._check_can_add()
        if self._open is not None:
            raise MegabatchError("open() was called in an open update; call it before the first call, or finalize()")

    def _begin(self, opened: OpenUpdate) -> OpenUpdate:
        """Open an update before its first call, and drop the gradients of the one before."""
        self._ownership.release()
        drop_gradients(self._wrapper.parameters)
        self._wide.begin()
        self._open = opened
        return opened

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
        if not self.planner.has_rows:
            raise PlanError(
                "forward() returns the output of each sample, and samples lie in one row or are cut over the mesh axis "
                "'cp'; use an accumulator without"
            )
        from megabatch.loops.forwards import compute_outputs

        return compute_outputs(self, self._wrapper, batch, fn, plan, trim=trim)

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
        from megabatch.loops.forwards import evaluate

        return evaluate(self, self._wrapper, batch, loss_fn, self._new_update(self._wrapper))

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
            if self.can_add:  # else `_open_call` raises
                for before_call in self._extensions.before_call:
                    before_call(self, batch, loss_fn)
            sums = None
            with contextlib.suppress(ReplanError):  # which is raised on all ranks, before anything has run
                sums = self._add(batch, loss_fn, plan, self._extensions.check_call)
            if sums is None:
                self.tune(batch, loss_fn)
                sums = self._add(batch, loss_fn, plan, ())
        return {name: Term(total, torch.as_tensor(weight, dtype=total.dtype)) for name, (total, weight) in sums.items()}

    def _add(
        self, batch: Batch, loss_fn: LossFunction | CoupledLoss, plan: Plan | None,
        checks: Sequence[Callable[..., None]],
    ) -> dict[str, Term]:  # fmt: skip
        """Run one call. Return this rank's sums."""
        run_call = self._wrapper.run_call or getattr(loss_fn, "run_call", None)
        with self._open_call(batch, loss_fn, plan, checks, runs_alone=run_call is None) as call:
            return (run_call or self._run_call)(call)

    def _run_call(self, call: Call) -> dict[str, Term]:
        """Run the microbatches of a call one after another. Return this rank's sums."""
        sums: dict[str, Term] = {}
        call.opened.count_call(call.agreement)
        prepared, wrapper = call.prepared, self._wrapper
        with contextlib.ExitStack() as stack:
            steps = stack.enter_context(
                contextlib.closing(iterate_steps(prepared, call.agreement, call.hooks.weigh, wrapper))
            )
            surrounded = self.planner.surround_steps(steps, prepared, call.loss_fn, wrapper)
            steps = stack.enter_context(contextlib.closing(surrounded))
            for surround_steps in self._extensions.surround_steps:
                steps = stack.enter_context(contextlib.closing(surround_steps(steps, call)))
            for step in steps:
                for part in self._run_step(step, call):
                    add_terms(sums, part)
                del step  # with its microbatch, before the next is made
        return sums

    def _run_step(self, step: MicrobatchStep, call: Call) -> list[dict[str, Term]]:
        """Run one microbatch. If it does not fit in memory, run it again in parts. Return the sums of each part."""
        opened, wrapper = call.opened, self._wrapper
        before = Receipt.of(wrapper.parameters)
        num_sent = 0 if wrapper.ranks.is_alone else num_collectives()
        opened.taking_back.clear()
        run = partial(self._forward_backward, call)
        try:
            return [run(step, before)]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            from megabatch.guards.oom_retry import OOMRetry

            retry = OOMRetry(call.prepared, call.hooks.weigh, wrapper, opened, takes_divisor=call.takes_divisor)
            run_in_parts = retry.prepare_parts(step, error, before, num_sent, run)
        sums = run_in_parts()  # out of the handler, which keeps the failed graph in memory
        self._learn_from(call)
        return sums

    def _learn_from(self, call: Call) -> None:
        """Plan later calls within what has fit in memory, after a microbatch has run in parts."""
        parts = call.prepared.parts
        ran = [rows for parts_of_one in parts.values() for rows in parts_of_one if rows]
        self.last_plan = call.plan.in_parts(parts)
        if ran:
            self.lower_limit(call.plan.bound_of(ran))

    def _forward_backward(self, call: Call, step: MicrobatchStep, before: Receipt | None = None) -> dict[str, Term]:
        """Run forward and backward of one microbatch. Return its sums. ``before`` may be a receipt of this moment."""
        return call.opened.backward(call.compute_terms(call, step, before), step)

    def _compute_terms(self, call: Call, step: MicrobatchStep, before: Receipt | None) -> dict[str, Term]:
        """Run the loss of an earlier call. It may not change gradients."""
        accumulating = self._wrapper.accumulating
        if before is None or before.parameters is not accumulating:
            before = Receipt.of(accumulating)
        terms = terms_of(call.loss_fn(self.model, step.microbatch))
        check_unmoved(self._wrapper, before)
        return terms

    @contextlib.contextmanager
    def microbatch(
        self, index: int, *, of: int, sum_over: float | Tensor | None = None, mean_over: float | Tensor | None = None,
        update_weight: float | Tensor | None = None, divided: bool = False,
    ) -> Generator["loops.LoopMicrobatch"]:  # fmt: skip
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
        from megabatch.loops.user_loop import LoopUpdate, check_first, open_loop, read_request

        request, failure = None, None
        try:
            if not isinstance(self._open, LoopUpdate):
                self._check_can_add()
                check_first(self, self._wrapper, index)
            request = read_request(of, sum_over, mean_over, update_weight, divided)
        except MegabatchError as error:
            failure = error  # the other ranks must know
        if not isinstance(self._open, LoopUpdate):
            sync, _ = self.planner.choice
            loop = open_loop(self._wrapper, self._ownership, self._guard, sync, request, failure)
            self._begin(loop).begin_call(sync, loop.of)
        loop = cast(LoopUpdate, self._open)
        try:
            with self._guard.surround_body(f"microbatch {index} of {of}"):
                if request is None:
                    raise cast(Exception, failure)
                loop.check_next(index, request.of)
                with loop.run(index, request) as part:
                    yield part
        except BaseException:
            if self._open is loop:  # else the body has discarded the update
                self._abandon()
            raise

    @contextlib.contextmanager
    def _open_call(
        self, batch: Batch, loss_fn: LossFunction | CoupledLoss, given: Plan | None,
        checks: Sequence[Callable[..., None]], *, runs_alone: bool,
    ) -> Generator[Call]:  # fmt: skip
        """Surround one call: prepare it and agree on it with the other ranks. If it fails, drop the update.

        ``checks`` are those of extensions. ``runs_alone`` is True if microbatches run one by one, not all together.
        """
        self._check_can_add()
        wrapper, ownership, order = self._wrapper, self._ownership, self._wrapper.collective_order
        hooks, tried = loss_hooks(loss_fn), self._trial.tried.get(loss_fn)  # None for a new loss
        planner = self.planner.of_call(batch)
        self.ranks.position.verb = "forward_backward()"
        self.ranks.position.call += 1
        wrapper.before_agreement(is_new=tried is None and runs_alone)
        prepared, agreement = self._prepare_call(planner, batch, loss_fn, hooks, given, checks)
        planner.check_call(wrapper, prepared.plan, loss_fn)
        self._remember(prepared, loss_fn)
        # A wrapper may free gradients in its backward.
        ownership.enter(is_new=tried is None)
        was_open, opened = self._open is not None, self._open_for_call()
        opened.begin_call(prepared.plan.sync, agreement.num_microbatches)
        plan = with_dummies(prepared.plan, agreement.num_microbatches)
        self.last_plan = plan
        call = Call(
            self.model, wrapper, loss_fn, prepared, agreement, plan, opened, hooks, is_new=tried is None,
            takes_divisor=takes_divisor(loss_fn) if tried is None else tried,
            compute_terms=self._compute_terms if tried is False else self._trial.compute_terms,
        )  # fmt: skip
        opened.is_running = True
        order.begin_call(is_compared=agreement.compares_order)
        try:
            with contextlib.ExitStack() as watching:
                watching.enter_context(no_float16_autocast(wrapper.models))
                watching.enter_context(planner.batching.surround_call(self.model, plan, agreement.num_microbatches))
                yield call
            ownership.leave(opened.total_factor)
            opened.is_running = False
        finally:
            order.is_compared = False
            if opened.is_running:  # the loss raised
                self._is_lost = was_open  # and with it the weights that open() was told
                self._abandon()

    def _prepare_call(
        self, planner: MicrobatchPlanner, batch: Batch, loss_fn: Any, hooks: LossHooks, given: Plan | None,
        checks: Sequence[Callable[..., None]],
    ) -> tuple[PreparedBatch, CallAgreement]:  # fmt: skip
        """Split, collate and weigh a batch, and agree on the call with the other ranks. Errors are raised on all."""
        wrapper, prepared, failure = self._wrapper, None, None
        try:
            self._ownership.check()
            wrapper.check_unchanged()
            early = getattr(batch, "preparation", None)  # of a batch that `prepare` returned
            prepared = early and early.take((planner, hooks, given))
            prepared = prepared or planner.prepare(batch, hooks, given)
        except Exception as error:  # the user's collate or weigh may raise anything; the other ranks must know
            failure = error
        try:
            for check_call in checks:
                check_call(self, batch, prepared, loss_fn)
        except MegabatchError as error:  # it may say more than an error of the batch
            failure, prepared = error, None
        except Exception as error:  # it may come of a batch that could not be prepared
            failure, prepared = failure or error, None
        try:
            with self._guard.agreeing():
                agreement = agree_on_call(wrapper, prepared, failure, partial(self._recall, loss_fn))
        except MegabatchError as error:
            if error.loses_update:  # found on any rank: the gradients no longer belong to this update
                self._open, self._is_lost = None, True
                self._wide.discard()
            raise
        assert prepared is not None  # else its failure was raised
        return planner.complete(prepared, agreement, hooks, wrapper)

    def _remember(self, prepared: PreparedBatch, loss_fn: Any) -> None:
        """Keep a sample for a later call that leaves this rank without: it then repeats it, with weight 0."""
        if not self.ranks.is_alone and len(prepared.samples):
            self._remembered.set(loss_fn, partial(self._make_dummy, prepared.samples.copy_last()))
            self._was_finite = True

    def _open_for_call(self) -> OpenUpdate:
        """Return the open update, or open one, without the gradients of the one before."""
        opened = self._open or self._new_update(self._wrapper)
        if not opened.has_calls:  # other code may have run a backward since open()
            drop_gradients(self._wrapper.parameters)
        if self._open is None:
            self._wide.begin()
        self._open = opened
        return opened

    def guarded(self, verb: str | None = None) -> contextlib.AbstractContextManager[None]:
        """Surround code that may fail while other ranks wait: they raise a one-line error, too.

        Running out of memory is always told, and within a call, a ``verb``, any error.
        """
        return self._guard.listening(verb)

    @property
    def can_add(self) -> bool:
        """True if a call can add to the open update, or open one."""
        return not self._is_lost and (self._open is None or self._open.can_add)

    def _check_can_add(self) -> None:
        """Raise `MegabatchError` if no call can add to the update."""
        if self._is_lost:
            raise MegabatchError(f"{LOST}; discard() it, and give its samples again")
        if self._open is not None:
            self._open.check_can_add()

    def _make_dummy(self, samples: Samples) -> Microbatch:
        return self.planner.dummy(samples)  # by the planner of now: a lower limit may have changed its shapes

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
            weight: Replaces the divisor of an update with one term. It is the weight over all ranks, the same number on
                each, unlike the weights of `open`, which are this rank's.

        Returns:
            The update: its loss, terms, norm and counts. Step the optimizer only if ``update.finite`` is true.

        Raises:
            LossContractError: On the CPU, the counted and the returned weights differ, on any rank. On a device that
                check would wait, so ``update.finite`` is false instead, and ``update.problem()`` names the fault.
            MegabatchError: No update is open, or it was lost. On several ranks, any error drops the update on all.
        """
        position = self.ranks.position
        position.verb = "finalize()"
        opened = taken = None
        try:
            if self._open is not None:
                self._open.hear_errors()
            # An error of one rank is told to all, which else wait for its message.
            with self.guarded("finalize()"):
                self._check_can_finalize(max_norm, weight)
                opened, taken = self._take_open()
                update = opened.report(self._close(opened, weight, max_norm))
                if taken is not None:
                    raise taken
                # Gradients are rounded once, after the norm and the clip.
                self._wide.finish()
        except BaseException as error:
            # Ranks that were told have dropped the update, so this one does.
            if opened is not None or (self._open is not None and not self.ranks.is_alone):
                self._drop()
            if isinstance(error, MegabatchError):
                raise (taken or error) from None
            raise
        self._was_finite = update.finite
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
            self._ownership.check()
        except MegabatchError as error:
            # Every rank must learn it before it steps: opened.close() tells the others.
            opened.is_taken, taken = True, error
            mark_known(error)
        self._open = None
        self._ownership.release()
        return opened, taken

    def _close(self, opened: OpenUpdate, weight: float | None, max_norm: float | None) -> Update:
        """Close an update: reduce its gradient, then apply the missing factor and the clip."""
        with self._guard.agreeing():
            update, factor = opened.close(weight, max_norm)
        parameters, groups = self._wrapper.parameters, self._wrapper.norm_groups
        # No weight on any rank: zeros would still let momentum and weight decay move the parameters.
        if isinstance(factor, float) and factor == 0.0:
            drop_gradients(parameters)
            self._wrapper.discard()  # with what was not reduced yet
            return replace(update, finite=torch.zeros_like(update.finite))
        self._wrapper.finish_update()
        if max_norm is not None:
            norm = clip_gradients(
                parameters, max_norm, factor, groups, norm_of=self._wide.norm, uncounted=self._wrapper.uncounted,
                scale=opened.loss_scale,
            )  # fmt: skip
            return update.with_norm(norm)
        # The only pass over gradients, for a weight that was not known before the backward.
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
        if self._open is not None:
            self._open.is_dropped, self._open.is_running = True, False
        self._open = None
        self._ownership.release()
        self._wrapper.discard()
        self._wide.discard()
        drop_gradients(self._wrapper.parameters)


def _join_ranks(wrapper: Wrapper, policy: str, accumulate_dtype: torch.dtype | None, planner: str) -> MemoryGuard:
    """Compare the model and the settings of all ranks. Return what tells them an error of one. Collective.

    Ranks with other models or settings would sum one parameter's gradient into another's. A rank that runs out of
    memory inside a collective must tell those that wait for it.
    """
    from megabatch.guards.error_broadcast import ErrorBroadcast
    from megabatch.wrappers.rank_agreement import check_rank_agreement

    check_rank_agreement(wrapper, policy, accumulate_dtype, planner)
    broadcast = ErrorBroadcast(wrapper.ranks, wrapper.device)
    wrapper.ranks.position.accumulator = broadcast.number
    return broadcast
