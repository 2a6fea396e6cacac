"""One call: split, collate and weigh this rank's samples, agree with the other ranks, and yield the microbatches.

Errors in a batch are found here, before the first forward, and are raised on all ranks at once.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from typing import ClassVar, cast

from torch import Tensor

from megabatch.core.contract import LossHooks, Prepare, Weigh, counted_weights, is_own
from megabatch.core.mesh import DataRanks
from megabatch.core.samples import STOPPED, Batch, Batching, Length, Microbatch, Samples
from megabatch.core.wrapper import Wrapper, policies_of_call
from megabatch.errors import LossContractError, MicrobatchLimit, PlanError
from megabatch.inspection.error_kinds import agreeing
from megabatch.inspection.tree import to_device
from megabatch.planning.limits import TunedLimit
from megabatch.planning.plan import CostModel, Plan, check_lengths, pad_with_dummies, priced

# The message between ranks has a fixed size.
MAX_WEIGHED_TERMS = 8


@dataclass(frozen=True)
class PreparedBatch:
    """This rank's samples of one call, the plan of their microbatches, and the microbatches' weights.

    Attributes:
        collated: Microbatches on the CPU. Empty unless they were weighed, and for a deferred batch.
        weights: Weights of each microbatch, by term. Empty without ``weigh``.
        weight_sums: Sums over this rank's microbatches, by term. Empty without a weighed microbatch.
        parts: By index of a microbatch that ran out of memory, the samples of each part that ran instead.
        is_given: True if the plan is the user's.
    """

    samples: Samples
    plan: Plan
    collated: tuple[Microbatch, ...]
    weights: tuple[dict[str, float], ...]
    weight_sums: dict[str, float] = field(default_factory=dict[str, float])
    parts: dict[int, list[tuple[int, ...]]] = field(default_factory=dict[int, list[tuple[int, ...]]])
    is_given: bool = False

    def microbatches(self) -> Generator[Microbatch]:
        """Iterate over the microbatches of the plan, on the CPU."""
        if not self.collated:
            return self.samples.in_turn(self.plan.microbatches)
        return (microbatch for microbatch in self.collated)

    def dummy(self) -> Microbatch:
        """Return a new copy of the last microbatch: a compiled model knows its shape, and a loss may write to it.

        For a deferred batch, repeat the last sample instead, since the others would have to be loaded again. With
        `Shapes`, return the last sample alone.
        """
        return self.samples.take(self.rows(len(self.plan.microbatches)))

    def rows(self, index: int) -> tuple[int, ...]:
        """Return the samples of microbatch ``index``. After the end of the plan, return those of a dummy microbatch."""
        cut = self.plan.microbatches
        if not cut:
            return ()
        if index < len(cut):
            return cut[index]
        # A dummy microbatch of one sample has the cheapest shape that is long enough.
        if self.plan.shapes:
            return (len(self.samples) - 1,)
        return self.samples.dummy_rows(self.plan)


@dataclass(frozen=True)
class MicrobatchPlanner:
    """Settings by which a rank splits its samples into microbatches: the user's arguments and the sync policy.

    Subclasses override methods that do nothing here: for pipelines, context axes, chunks of samples and fixed shapes.

    Attributes:
        choice: The sync policy, and the reason for it.
        cost: The user's cost model.
        fit: The measured limit, if the user gave none.
        learned: The limit learned from microbatches that did not fit in memory.
        cuts_samples: True if microbatches may hold parts of samples.
        adds_up: True if the weight of a padded microbatch is that of its samples.
    """

    micro_batch_size: int | None
    max_microbatch_tokens: int | None
    batching: Batching
    length: Length | None
    choice: tuple[str, str]
    ranks: DataRanks
    cost: CostModel | None
    fit: TunedLimit | None = None
    learned: MicrobatchLimit | None = None
    cuts_samples: ClassVar[bool] = False
    adds_up: ClassVar[bool] = True

    @cached_property
    def known_cost(self) -> CostModel | None:
        """The cost by which samples are split: given or measured. None: relative defaults."""
        return self.cost or (self.fit and self.fit.cost)

    @cached_property
    def stated_limits(self) -> tuple[int | None, int | None]:
        """Samples and tokens of a microbatch as they were given or measured; both None before the measurement."""
        if self.fit is not None:
            return None, self.fit.max_microbatch_tokens
        return self.micro_batch_size, self.max_microbatch_tokens

    @cached_property
    def limits(self) -> tuple[int | None, int | None]:
        """Samples and tokens of a microbatch, no more than have fit in memory."""
        rows, tokens = self.stated_limits
        if self.learned is None:
            return rows, tokens
        if rows is not None:
            rows = min(rows, self.learned.samples)
        if tokens is not None:
            tokens = max(1, min(tokens, self.learned.tokens))
        return rows, tokens

    @property
    def has_rows(self) -> bool:
        """True if each sample is a whole row of its microbatch."""
        return self.batching.has_rows

    def samples(self, batch: Batch, prepare: Prepare | None = None) -> Samples:
        """Return the batch as samples, which `Samples.take` turns into the microbatches that the loss is given."""
        return self.batching.samples(batch, self.length, prepare)

    def plan(self, samples: Samples) -> Plan:
        """Return the plan by which samples are split into microbatches."""
        rows, tokens = self.limits
        if rows is None and tokens is None:
            if len(samples):
                raise PlanError(
                    'max_microbatch_tokens is "auto" and the first forward_backward() or tune() chooses the limit, '
                    "from the loss and its samples; call one of them before, or give max_microbatch_tokens="
                )
            # Without samples any limit does.
            rows = 1
        check_lengths(samples.lengths, self.stated_limits[1])
        lengths = samples.lengths
        if tokens is not None:
            # A sample that is longer than what has fit in memory goes alone.
            lengths = [min(length, tokens) for length in lengths]
        cost = self.known_cost
        plan = self.batching.plan(samples, lengths, (rows, tokens), cost)
        sync, reason = self.choice
        plan = replace(plan, lengths=tuple(samples.lengths), sync=sync, reason=reason)
        return plan if cost is None else priced(plan, cost)

    def of_call(self, batch: Batch) -> "MicrobatchPlanner":
        """Return the planner of one call. Collective where the plan depends on the samples of other ranks."""
        return self

    def of_forwards(self, verb: str, fn: object) -> "MicrobatchPlanner":
        """Return the planner of a call without a backward, of the method ``verb`` with a loss or function."""
        return self

    def check_goes_with(self, feature: str) -> None:
        """Raise `PlanError` for a feature, named as in the error, that this planner does not go with."""

    def check_announced(self, weights: dict[str, float]) -> None:
        """Raise `PlanError` for weights of an update, announced to `open`, that this planner does not go with."""

    def dummy(self, samples: Samples) -> Microbatch:
        """Return the last sample of an earlier call as a microbatch, for a rank without samples."""
        return samples.dummy()

    def check_call(self, wrapper: Wrapper, plan: Plan, loss_fn: object) -> None:
        """Raise `PlanError` on all ranks for a call that this planner is not for. May be collective."""

    def surround_steps(
        self, steps: "Generator[MicrobatchStep]", prepared: PreparedBatch, loss_fn: Callable[..., object],
        wrapper: Wrapper,
    ) -> "Generator[MicrobatchStep]":  # fmt: skip
        """Return the steps of a call, with what runs before and after each."""
        return steps

    def lowered(self, bound: MicrobatchLimit | None) -> "MicrobatchPlanner":
        """Return a planner whose microbatches also respect ``bound``."""
        if bound is None:
            return self
        return replace(self, learned=MicrobatchLimit(*map(min, bound, self.learned or bound)))

    def fitted(self, plan: Plan, samples: Samples) -> Plan:
        """Return a plan that was made before, for these samples. Raises `PlanError` if it is for other samples."""
        if not isinstance(cast(object, plan), Plan):
            raise PlanError(f"plan is a {type(plan).__name__}; give what plan() returned, or last_plan")
        if plan.lengths != tuple(samples.lengths):
            difference = _describe_difference(plan.lengths, samples.lengths)
            raise PlanError(
                f"plan is of another batch ({difference}); give it with the samples that it was made for, in their "
                "order"
            )
        cut = tuple(filter(None, plan.microbatches))
        if sorted(chain.from_iterable(cut)) != list(range(len(samples))):
            raise PlanError("plan has not every sample once; give what plan() returned, or last_plan")
        self.batching.check_plan(samples, plan)
        sync, reason = self.choice
        return replace(plan, microbatches=cut, sync=sync, reason=reason, num_split=0, steps=())

    def is_repeatable(self, hooks: LossHooks) -> bool:
        """Return True if no function of the user's that may draw random numbers is called to prepare a batch."""
        return self.batching.is_repeatable and (hooks.prepare is None or is_own(hooks.prepare))

    def prepare(self, batch: Batch, hooks: LossHooks, user_plan: Plan | None = None) -> PreparedBatch:
        """Split, collate and weigh this rank's samples. Raises `PlanError` or `LossContractError`."""
        samples = self.samples(batch, hooks.prepare)
        plan = self.plan(samples) if user_plan is None else self.fitted(user_plan, samples)
        self.check(samples, plan, hooks)
        prepared = collate_planned(samples, plan, self.weigh_own(hooks.weigh))
        return prepared if user_plan is None else replace(prepared, is_given=True)

    def weigh_own(self, weigh: Weigh | None) -> Weigh | None:
        """Return the function that counts this rank's weight in a microbatch of `samples`.

        It is another than ``weigh`` where `samples` has whole sequences and this rank computes a stretch of each.
        """
        return weigh

    def check(self, samples: Samples, plan: Plan, hooks: LossHooks) -> None:
        """Raise `LossContractError` for a loss whose weight the samples do not have, before they are collated."""
        self.batching.check(samples, plan, hooks)

    def complete(
        self, prepared: PreparedBatch, agreement: "CallAgreement", hooks: LossHooks, wrapper: Wrapper
    ) -> tuple[PreparedBatch, "CallAgreement"]:
        """Return the call as it runs. Where other ranks have more microbatches, dummies follow. No message is sent."""
        return prepared, agreement


def _describe_difference(lengths: Sequence[int], other_lengths: Sequence[int]) -> str:
    for row, (length, other_length) in enumerate(zip(lengths, other_lengths, strict=False)):
        if length != other_length:
            return f"sample {row}: {length} and {other_length} tokens"
    return f"{len(lengths)} and {len(other_lengths)} samples"


def weights_of(weigh: Weigh, microbatch: Microbatch) -> dict[str, float]:
    """Return the weights that ``weigh`` counts in a microbatch, by term."""
    return counted_weights(_call_weigh(weigh, microbatch))


def _call_weigh(weigh: Weigh, microbatch: Microbatch) -> object:
    try:
        return weigh(microbatch)
    except StopIteration as error:
        raise LossContractError(f"weigh {STOPPED}") from error


def collate_planned(samples: Samples, plan: Plan, weigh: Weigh | None) -> PreparedBatch:
    """Collate and weigh the planned microbatches on the CPU. Keep no microbatch of a deferred batch.

    Without ``weigh`` this collates nothing: each microbatch is collated in its turn.
    """
    if weigh is None:
        return PreparedBatch(samples, plan, (), ())
    try:
        collated, counts = samples.weigh(plan.microbatches, partial(_call_weigh, weigh))
        weights = tuple(map(counted_weights, counts))
    except KeyError as error:
        if len(kinds := samples.keys()) < 2:
            raise
        raise PlanError(
            f"weigh asks for {error} and samples of one batch have the keys {list(kinds[0])} and {list(kinds[1])}; "
            "give it to all"
        ) from error
    return PreparedBatch(samples, plan, collated, weights, _sum_weights(weights))


def _sum_weights(weights: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the sums of the microbatches' weights by term. Raises `LossContractError` for unusable terms."""
    names = list(map(sorted, weights))
    if not names:
        return {}
    if names.count(names[0]) < len(names):
        raise LossContractError(f"weigh names the terms {names}; name the same terms for each microbatch")
    if len(names[0]) > MAX_WEIGHED_TERMS:
        raise LossContractError(f"weigh names {len(names[0])} terms; at most {MAX_WEIGHED_TERMS} are supported")
    return {name: sum(map(itemgetter(name), weights)) for name in names[0]}


@dataclass(frozen=True)
class CallAgreement:
    """The ranks' agreement on one call.

    Attributes:
        num_microbatches: The largest number that any rank has.
        num_samples: Sum over data ranks.
        num_tokens: Sum over data ranks.
        weights: Sums over data and context ranks, by weighed term. Empty without ``weigh``.
        dummy: Makes a dummy microbatch, for a rank that has fewer than the others. Else it may be None.
        compares_order: True if ranks compare each collective of the call before it begins.
    """

    num_microbatches: int
    num_samples: int
    num_tokens: int
    weights: dict[str, float]
    dummy: Callable[[], Microbatch] | None
    compares_order: bool = False


@dataclass(frozen=True)
class MicrobatchStep:
    """One microbatch on its device, and its weights.

    Attributes:
        announced: Weights by term in the ranks' agreement: counted by ``weigh``, or stated by a deferred batch.
    """

    microbatch: Microbatch
    index: int
    announced: dict[str, float]
    is_dummy: bool
    differentiate: ClassVar[Callable[[Tensor], None]] = staticmethod(Tensor.backward)


def agree_on_call(
    wrapper: Wrapper, prepared: PreparedBatch | None, failure: Exception | None,
    recall_dummy: Callable[[], Microbatch | None],
) -> CallAgreement:  # fmt: skip
    """Agree with the other ranks on a call. A single rank sends no message.

    Args:
        wrapper: The model's wrapper.
        prepared: This rank's samples, or None if they could not be prepared.
        failure: The error that prevented it. It is raised on all ranks, so that none is left waiting.
        recall_dummy: Returns a dummy microbatch from an earlier call with this loss, or None if there was none.
    """
    if not wrapper.ranks.is_alone:
        from megabatch.core.agreement import agree_over_ranks

        with agreeing():
            return agree_over_ranks(wrapper, prepared, failure, recall_dummy)
    if prepared is None:
        raise cast(Exception, failure)
    samples, num_microbatches = prepared.samples, len(prepared.plan.microbatches)
    return CallAgreement(num_microbatches, samples.num_samples, samples.num_tokens, prepared.weight_sums, dummy=None)


def iterate_steps(
    prepared: PreparedBatch, agreement: CallAgreement, weigh: Weigh | None, wrapper: Wrapper, *, trains: bool = True
) -> Generator[MicrobatchStep]:
    """Yield the microbatches one after another. Each is on the device only for its own forward and backward.

    If ``trains`` is False, no backward follows, and the wrapper prepares no reduction.
    """
    samples, num_real = prepared.samples, len(prepared.plan.microbatches)
    on_cpu = wrapper.device.type == "cpu"
    count = partial(weights_of, weigh) if weigh is not None else None
    policies = policies_of_call(prepared.plan.sync, agreement.num_microbatches)
    # The user's loading may be under way in the generator, so it is closed at once.
    with contextlib.closing(prepared.microbatches()) as real:
        for index in range(agreement.num_microbatches):
            is_dummy = index >= num_real
            if is_dummy:
                assert agreement.dummy is not None
                microbatch = agreement.dummy()
            else:
                microbatch = next(real)
            if count is None:
                announced = {}
            elif is_dummy:
                announced = count(microbatch)
            else:
                announced = prepared.weights[index]
                samples.check_names(microbatch, announced, count)
            is_last = index == agreement.num_microbatches - 1
            with wrapper.microbatch(policies[index], last=is_last) if trains else contextlib.nullcontext():
                wrapper.is_counting = not is_dummy
                try:
                    samples.expect(microbatch)
                    on_device = microbatch if on_cpu else to_device(microbatch, wrapper.device)
                    on_device = samples.owned(microbatch, on_device)
                    yield MicrobatchStep(on_device, index, announced, is_dummy)
                    del on_device
                finally:
                    wrapper.is_counting = None
            # The memory is free before the next microbatch is collated.
            del microbatch


def with_dummies(plan: Plan, num_microbatches: int) -> Plan:
    """Return the plan, filled up with dummy microbatches to ``num_microbatches``."""
    if num_microbatches <= len(plan.microbatches):
        return plan
    return replace(plan, microbatches=pad_with_dummies(plan.microbatches, num_microbatches))
