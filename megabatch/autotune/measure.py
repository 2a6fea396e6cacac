"""Small updates of copies of a sample: what they take of memory and time, told to all ranks."""

import contextlib
import itertools
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from megabatch.autotune.memory import GIVE_A_BOUND, Budget, bytes_to_come, measuring, timing
from megabatch.engine.call import CallPlan, first_failure, iterate_steps
from megabatch.engine.oom_broadcast import is_out_of_memory, rank_of_process, whoever_runs
from megabatch.engine.prepare import MicrobatchPlanner, PreparedBatch, collate_planned
from megabatch.engine.update import OpenUpdate
from megabatch.errors import MegabatchError, MicrobatchLimit, PlanError, Shortage, in_one_line
from megabatch.losses.contract import LossFunction, loss_hooks, weigh_of
from megabatch.planning.limits import MeasuredMicrobatch, MemoryRoom, TimedMicrobatch
from megabatch.planning.plan import Plan
from megabatch.torch_private import pytree
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.gradients import WideGradients, drop_gradients, no_float16_autocast

NUM_RUN = 2  # microbatches of a measured update: the second has gradients beside it, and a third would have no more


class Sample(NamedTuple):
    """One sample of a batch, on its own memory."""

    value: Any
    num_tokens: int  # as its batch counts them


@dataclass(frozen=True)
class LongestSample:
    """The longest sample of a call, and what else is to be known of its samples."""

    sample: Sample
    usual: Sample  # of another length
    most_rows: int  # samples of the rank that has the most
    most_tokens: float  # of the rank that has the most

    @property
    def num_tokens(self) -> int:
        """At least 1, to divide by."""
        return max(1, self.sample.num_tokens)


class MeasuredModel:
    """A model that is measured, and what an update of it leaves."""

    def __init__(self, model: Any, wrapper: Wrapper, wide: WideGradients) -> None:
        self.model, self.wrapper, self.wide = model, wrapper, wide

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each other inside of a measured update."""
        return not self.wrapper.runs_alone or any(map(_finds_unused, self.wrapper.models))

    def forget(self) -> None:
        """Drop what a measured update has left."""
        self.wrapper.discard()
        self.wide.discard()
        drop_gradients(self.wrapper.parameters)


class MicrobatchMeasurer:
    """Runs small updates of copies of the longest sample, and keeps what they say of memory."""

    def __init__(
        self, subject: MeasuredModel, planner: MicrobatchPlanner, longest: LongestSample, loss_fn: LossFunction,
        optimizer: optim.Optimizer | None,
    ) -> None:  # fmt: skip
        self._subject, self._planner, self._longest, self._loss_fn = subject, planner, longest, loss_fn
        self._optimizer = optimizer
        self.budget = Budget(0.0, 0.0, 0.0)
        self.space = MemoryRoom(0.0, 0.0)
        self.stays_bytes = 0.0  # the most that a rank keeps from microbatch to microbatch
        self.limit_bytes = self.allowed_bytes = 0.0  # the least that a rank may use, and of it for an update

    def measure(self, rows: int) -> MeasuredMicrobatch:
        """What a microbatch of so many rows takes, in an update of a few; collective."""
        wrapper, sample = self._subject.wrapper, self._longest.sample
        with self._heard(sample, rows):
            share = self._share(sample, rows)
            self._subject.wide.begin()
            with measuring(wrapper.device) as needed:
                self._run(share)
            self._subject.forget()
            own_bytes = self._own_bytes(share, rows)
        before = self.budget.used + bytes_to_come(self._optimizer, wrapper.parameters)
        stays = before + needed.left_bytes + own_bytes
        told = [needed.peak_bytes - needed.left_bytes, stays]
        told += [self.budget.limit - stays, self.budget.there - stays, self.budget.limit, self.budget.limit - before]
        peaks, kept, allowed, there, limits, for_updates = zip(*wrapper.ranks.exchange(told), strict=True)
        self.space, self.stays_bytes = MemoryRoom(min(allowed), min(there)), max(kept)
        self.limit_bytes, self.allowed_bytes = min(limits), min(for_updates)
        return MeasuredMicrobatch(rows, max(peaks))

    def timed(self, sample: Sample, most_rows: int) -> list[TimedMicrobatch]:
        """The seconds of a microbatch of one copy of a sample, and of several; collective."""
        found: list[TimedMicrobatch] = []
        for rows in sorted({1, most_rows}):
            seconds = math.inf
            with self._heard(sample, rows):
                share = self._share(sample, rows)
                for _ in range(2):  # the better of two: what else the machine does only adds
                    self._subject.wide.begin()
                    with timing(self._subject.wrapper.device) as took:
                        self._run(share)
                    self._subject.forget()
                    seconds = min(seconds, took.seconds / NUM_RUN)
            slowest = max(told for (told,) in self._subject.wrapper.ranks.exchange([seconds]))
            found.append(TimedMicrobatch(rows, max(1, sample.num_tokens), slowest))
        return found

    def _share(self, sample: Sample, rows: int) -> PreparedBatch:
        """An update of copies of a sample, in microbatches of ``rows``."""
        hooks = loss_hooks(self._loss_fn)

        def length(_: Any) -> int:
            return sample.num_tokens

        samples = replace(self._planner, length=length).samples([sample.value] * (NUM_RUN * rows), hooks.prepare)
        cut = tuple(tuple(range(index * rows, (index + 1) * rows)) for index in range(NUM_RUN))
        return collate_planned(samples, Plan(cut, tuple(samples.lengths), sync=self._planner.choice[0]), hooks.weigh)

    def _run(self, share: PreparedBatch) -> None:
        """One update."""
        wrapper, weigh = self._subject.wrapper, weigh_of(self._loss_fn)
        # One microbatch more is announced and not run, so that DDP, which would rebuild its buckets, does not reduce.
        # Where it is to find unused parameters it keeps the buckets, and forgets those it found when it reduces.
        num_run = None if any(map(_finds_unused, wrapper.models)) else NUM_RUN
        call = CallPlan(
            NUM_RUN + 1, len(share.samples), share.plan.num_tokens, share.weight_sums(), share.dummy
        )  # fmt: skip
        opened = OpenUpdate(wrapper)
        opened.open_call(call)
        with (
            no_float16_autocast(wrapper.models),
            contextlib.closing(iterate_steps(share, call, weigh, wrapper)) as each,
        ):
            for step in itertools.islice(each, num_run):
                terms = opened.terms_of(self._loss_fn, self._subject.model, step)
                opened.backward(terms, step)
                del step, terms  # with its microbatch

    @contextlib.contextmanager
    def _heard(self, sample: Sample, rows: int) -> Generator[None]:
        """Surrounds a measured update: what it raises on one rank is raised on all, unless they wait inside of it."""
        ranks, failure = self._subject.wrapper.ranks, None
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):  # which is told by the alarm
                raise self._shortage(error, sample, rows) from error
            failure = error
            if rows == 1 and not isinstance(error, MegabatchError):
                failure = PlanError(
                    f"one sample of {sample.num_tokens} tokens alone does not run ({in_one_line(error)}); mend that, "
                    f"or for what needs several samples {GIVE_A_BOUND}"
                )
                failure.__cause__ = error
            if self._subject.waits:
                raise failure from failure.__cause__
        if any(failed for (failed,) in ranks.exchange([float(failure is not None)])):
            raise first_failure(ranks, failure)

    def _shortage(self, error: Exception, sample: Sample, rows: int) -> MegabatchError:
        """There may be less memory than the system said."""
        who, bound = whoever_runs(self._subject.wrapper.ranks.num_all), None
        samples, change = "a sample", "shorten it, checkpoint activations, or shard the model over more ranks"
        if rows > 1:
            bound = MicrobatchLimit(rows // 2, rows // 2 * max(1, sample.num_tokens))
            samples, change = f"{rows} samples", f"give max_microbatch_tokens={bound.tokens}"
        failure = MegabatchError(
            f"{who} ran out of memory when it measured {samples} of {sample.num_tokens} tokens, the longest; {change} "
            f"({in_one_line(error)})"
        )
        failure.shortage = Shortage(rank_of_process(), (), bound)
        return failure

    def _own_bytes(self, share: PreparedBatch, rows: int) -> float:
        """A whole update's microbatches, which are collated before they are run where they are weighed, on the CPU."""
        if self._subject.wrapper.device.type != "cpu" or not share.collated:
            return 0.0
        leaves = [leaf for leaf in pytree.tree_leaves(share.collated[0]) if isinstance(leaf, Tensor)]
        return sum(leaf.nbytes for leaf in leaves) / (rows * self._longest.num_tokens) * self._longest.most_tokens


def _finds_unused(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) and model.find_unused_parameters
