"""Memory and time of small updates on copies of one sample, the same on all ranks."""

import contextlib
import itertools
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from megabatch.autotune.memory import GIVE_A_BOUND, Budget, estimate_state_bytes, measure_memory, measure_time
from megabatch.engine.call import (
    CallAgreement,
    MicrobatchPlanner,
    PreparedBatch,
    collate_planned,
    first_failure,
    iterate_steps,
)
from megabatch.engine.error_broadcast import is_out_of_memory, rank_of_process, whoever_runs
from megabatch.engine.update import OpenUpdate
from megabatch.errors import MegabatchError, MicrobatchLimit, PlanError, Shortage, in_one_line
from megabatch.losses.contract import LossFunction, loss_hooks, weigh_of
from megabatch.planning.limits import MeasuredMicrobatch, MemoryRoom, TimedMicrobatch
from megabatch.planning.plan import Plan
from megabatch.torch_private import pytree
from megabatch.wrappers.base import Wrapper
from megabatch.wrappers.gradients import WideGradients, drop_gradients, no_float16_autocast

NUM_RUN = 2  # microbatches of a measured update: the second runs beside gradients, as every later one would


class Sample(NamedTuple):
    """One sample of a batch, in memory of its own."""

    value: Any
    num_tokens: int  # as its batch counts them


@dataclass(frozen=True)
class LongestSample:
    """The longest sample of a call, with statistics of all its samples."""

    sample: Sample
    usual: Sample  # of another length
    most_rows: int  # samples of the rank with the most
    most_tokens: float  # of the rank with the most

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest sample, at least 1."""
        return max(1, self.sample.num_tokens)


class MeasuredModel:
    """A model with its wrapper, for measured updates."""

    def __init__(self, model: Any, wrapper: Wrapper, wide: WideGradients) -> None:
        self.model, self.wrapper, self.wide = model, wrapper, wide

    @property
    def waits(self) -> bool:
        """True if ranks wait for each other inside of a measured update."""
        return not self.wrapper.is_microbatch_local or any(map(_finds_unused, self.wrapper.models))

    def discard(self) -> None:
        """Drop the gradients and buffers of a measured update."""
        self.wrapper.discard()
        self.wide.discard()
        drop_gradients(self.wrapper.parameters)


class MicrobatchMeasurer:
    """Runs small updates on copies of the longest sample, and records their memory."""

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
        """Return the peak memory of a microbatch of so many rows; collective."""
        wrapper, sample = self._subject.wrapper, self._longest.sample
        with self._raising_on_all(sample, rows):
            share = self._make_update(sample, rows)
            self._subject.wide.begin()
            with measure_memory(wrapper.device) as use:
                self._run_update(share)
            self._subject.discard()
            collated_bytes = self._collated_bytes(share, rows)
        is_offloaded = wrapper.parameters[0].device.type != wrapper.device.type  # states are in host memory then
        before = self.budget.used
        before += 0.0 if is_offloaded else estimate_state_bytes(self._optimizer, wrapper.parameters)
        stays = before + use.left_bytes + collated_bytes
        sent = [use.peak_bytes - use.left_bytes, stays]
        sent += [self.budget.limit - stays, self.budget.there - stays, self.budget.limit, self.budget.limit - before]
        peaks, kept, allowed, there, limits, for_updates = zip(*wrapper.ranks.exchange_numbers(sent), strict=True)
        self.space, self.stays_bytes = MemoryRoom(min(allowed), min(there)), max(kept)
        self.limit_bytes, self.allowed_bytes = min(limits), min(for_updates)
        return MeasuredMicrobatch(rows, max(peaks))

    def measure_seconds(self, sample: Sample, most_rows: int) -> list[TimedMicrobatch]:
        """Return the seconds of a microbatch with one copy of a sample, and with several; collective."""
        found: list[TimedMicrobatch] = []
        for rows in sorted({1, most_rows}):
            seconds = math.inf
            with self._raising_on_all(sample, rows):
                share = self._make_update(sample, rows)
                for _ in range(2):  # the faster of two, since other work on the machine only adds time
                    self._subject.wide.begin()
                    with measure_time(self._subject.wrapper.device) as took:
                        self._run_update(share)
                    self._subject.discard()
                    seconds = min(seconds, took.seconds / NUM_RUN)
            slowest = max(told for (told,) in self._subject.wrapper.ranks.exchange_numbers([seconds]))
            found.append(TimedMicrobatch(rows, max(1, sample.num_tokens), slowest))
        return found

    def _make_update(self, sample: Sample, rows: int) -> PreparedBatch:
        """Make an update of copies of a sample, in microbatches of ``rows``."""
        hooks = loss_hooks(self._loss_fn)

        def length(_: Any) -> int:
            return sample.num_tokens

        samples = replace(self._planner, length=length).samples([sample.value] * (NUM_RUN * rows), hooks.prepare)
        cut = tuple(tuple(range(index * rows, (index + 1) * rows)) for index in range(NUM_RUN))
        return collate_planned(samples, Plan(cut, tuple(samples.lengths), sync=self._planner.choice[0]), hooks.weigh)

    def _run_update(self, share: PreparedBatch) -> None:
        """Run one update."""
        wrapper, weigh = self._subject.wrapper, weigh_of(self._loss_fn)
        # The plan has one microbatch more than run, so that DDP does not reduce, which would rebuild its buckets.
        # With find_unused_parameters all run: DDP keeps its buckets then, and a reduction clears its unused parameters.
        num_run = None if any(map(_finds_unused, wrapper.models)) else NUM_RUN
        call = CallAgreement(
            NUM_RUN + 1, len(share.samples), share.plan.num_tokens, share.weight_sums, share.dummy
        )  # fmt: skip
        opened = OpenUpdate(wrapper)
        opened.count_call(call)
        with (
            no_float16_autocast(wrapper.models),
            contextlib.closing(iterate_steps(share, call, weigh, wrapper)) as each,
        ):
            for step in itertools.islice(each, num_run):
                terms = opened.terms_of(self._loss_fn, self._subject.model, step)
                opened.backward(terms, step)
                del step, terms  # with its microbatch

    @contextlib.contextmanager
    def _raising_on_all(self, sample: Sample, rows: int) -> Generator[None]:
        """Raise an error of one rank on all ranks, unless they wait for each other inside of the update."""
        ranks, failure = self._subject.wrapper.ranks, None
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):  # error_broadcast tells the other ranks
                raise self._out_of_memory(error, sample, rows) from error
            failure = error
            if rows == 1 and not isinstance(error, MegabatchError):
                failure = PlanError(
                    f"one sample of {sample.num_tokens} tokens alone does not run ({in_one_line(error)}); mend that, "
                    f"or for what needs several samples {GIVE_A_BOUND}"
                )
                failure.__cause__ = error
            if self._subject.waits:
                raise failure from failure.__cause__
        if any(failed for (failed,) in ranks.exchange_numbers([float(failure is not None)])):
            raise first_failure(ranks, failure)

    def _out_of_memory(self, error: Exception, sample: Sample, rows: int) -> MegabatchError:
        """Return the error of a measured update that ran out of memory, since the system had less than it reported."""
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

    def _collated_bytes(self, share: PreparedBatch, rows: int) -> float:
        """Return the bytes of an update's microbatches on the CPU, if all are collated in advance to weigh them."""
        if self._subject.wrapper.device.type != "cpu" or not share.collated:
            return 0.0
        leaves = [leaf for leaf in pytree.tree_leaves(share.collated[0]) if isinstance(leaf, Tensor)]
        return sum(leaf.nbytes for leaf in leaves) / (rows * self._longest.num_tokens) * self._longest.most_tokens


def _finds_unused(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) and model.find_unused_parameters
