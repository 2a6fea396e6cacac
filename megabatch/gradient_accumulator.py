"""GradientAccumulator: the arguments of a user as the objects of an accumulator, and the calls beside its own."""

import contextlib
import copy
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megabatch.batching.choice import choose_batching
from megabatch.batching.padding import Padding
from megabatch.core.accumulator import Accumulator, Parts
from megabatch.core.contract import CoupledLoss, LossFunction, loss_hooks, takes_divisor
from megabatch.core.extension import Extension
from megabatch.core.guard import ErrorGuard
from megabatch.core.samples import Batch, Batching, Collate, Length, Microbatch
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, MicrobatchLimit, PlanError, missing_attribute
from megabatch.guards.call_watch import CallWatch
from megabatch.planners.built_in import BuiltIn, OtherPlanners, choose_planner, refuse_moved, usual_planner
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel, Plan
from megabatch.planning.planner import Planner
from megabatch.wrappers.detect import Models, choose_policy, detect_wrapper

if TYPE_CHECKING:
    from megabatch.loops.user_loop import LoopMicrobatch

LOOP = "surround each microbatch of your loop with microbatch(), and call scale(loss).backward() of what it yields"
# What to do instead of a method that was removed. A line stays for one release.
REMOVED = {
    "pin_cost": "give planner=Tokens(8192, cost=gradient.cost) to a new GradientAccumulator",
    "step_in_backward": "step the optimizer after finalize(), since it freed no memory where gradients accumulate",
    "microbatches": LOOP,
    "backward": LOOP,
}


class GradientAccumulator(Accumulator):
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
        # The wrapper knows how gradients are reduced; nothing below asks for DDP or FSDP by name.
        wrapper = detect_wrapper(model, mesh)
        accumulate_dtype = choice.check(wrapper, inner, accumulate_dtype)
        new_planner = choice.new_planner(batching.new_planner(usual_planner(wrapper)))
        wide = choice.new_gradients(wrapper.parameters, accumulate_dtype)
        wrapper.accumulate_in(wide)
        policy = choose_policy(wrapper, sync)
        errors = _join_ranks(wrapper, policy[0], accumulate_dtype, choice.common_settings)
        padding = Padding(wrapper.models, inner.pad.fills)
        inner.pad = padding
        rows, tokens = choice.limits
        planner_of_calls = new_planner(
            micro_batch_size=rows, max_microbatch_tokens=tokens, batching=inner, length=length, choice=policy,
            ranks=wrapper.ranks, cost=choice.known_cost, fit=choice.fit,
        )  # fmt: skip
        watch = CallWatch(wrapper, padding)
        parts = Parts(model, wrapper, planner_of_calls, wide, watch, errors, choice.new_update)
        attached = choice.extensions(parts)
        with errors.listening():
            batching.check_model(wrapper, choice.limits)
        super().__init__(parts, [*attached, *extensions, OtherPlanners()])

    @property
    def cuts_samples(self) -> bool:
        """True with `InsideSamples`."""
        return self.planner.cuts_samples

    @property
    def fit(self) -> TunedLimit | None:
        """The measured limit. None before the measurement, and if you gave a limit."""
        return self.planner.fit

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

        return compute_outputs(self, self.wrapper, batch, fn, plan, trim=trim)

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

        return evaluate(self, self.wrapper, batch, loss_fn, self._new_update(self.wrapper))

    @contextlib.contextmanager
    def microbatch(
        self, index: int, *, of: int, sum_over: float | Tensor | None = None, mean_over: float | Tensor | None = None,
        update_weight: float | Tensor | None = None, divided: bool = False,
    ) -> Generator["LoopMicrobatch"]:  # fmt: skip
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
                self.check_can_add()
                check_first(self, self.wrapper, index)
            request = read_request(of, sum_over, mean_over, update_weight, divided)
        except MegabatchError as error:
            # The other ranks must know.
            failure = error
        if not isinstance(self._open, LoopUpdate):
            sync, _ = self.planner.choice
            loop = open_loop(self.wrapper, self.call_guard, self.error_guard, sync, request, failure)
            self.begin(loop).begin_call(sync, loop.of)
        loop = cast(LoopUpdate, self._open)
        try:
            with self.error_guard.surround_body(f"microbatch {index} of {of}"):
                if request is None:
                    raise cast(Exception, failure)
                loop.check_next(index, request.of)
                with loop.run(index, request) as part:
                    yield part
        except BaseException:
            # The body may have discarded the update.
            if self._open is loop:
                self.abandon()
            raise

    # For a type checker, every attribute would be known.
    if not TYPE_CHECKING:

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
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return copied


def _join_ranks(wrapper: Wrapper, policy: str, dtype: torch.dtype | None, settings: str) -> ErrorGuard:
    """Compare the model and the settings of all ranks. Return the guard against errors of any rank. Collective.

    Ranks with other models or settings would sum one parameter's gradient into another's. A rank that runs out of
    memory inside a collective must tell those that wait for it.
    """
    if wrapper.ranks.is_alone:
        return ErrorGuard(wrapper.ranks)
    from megabatch.guards.error_broadcast import ErrorBroadcast
    from megabatch.wrappers.rank_agreement import check_rank_agreement

    check_rank_agreement(wrapper, policy, dtype, settings)
    broadcast = ErrorBroadcast(wrapper.ranks, wrapper.device)
    wrapper.ranks.position.accumulator = broadcast.number
    return broadcast
