"""Memory and time of small updates on copies of one sample, the same on all ranks."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from megabatch.autotune.memory import (
    GIVE_A_BOUND,
    Budget,
    Duration,
    estimate_state_bytes,
    measure_memory,
    measure_time,
)
from megabatch.core.agreement import first_failure
from megabatch.core.call import (
    CallAgreement,
    MicrobatchPlanner,
    MicrobatchStep,
    PreparedBatch,
    collate_planned,
    iterate_steps,
)
from megabatch.core.contract import LossFunction, Term, loss_hooks, weigh_of
from megabatch.core.gradients import Gradients, drop_gradients, no_float16_autocast
from megabatch.core.update import OpenUpdate
from megabatch.core.wrapper import Wrapper
from megabatch.errors import MegabatchError, MicrobatchLimit, PlanError, Shortage, in_one_line
from megabatch.inspection.error_kinds import is_out_of_memory, rank_of_process, whoever_runs
from megabatch.planning.limit_search import MemoryRoom, TimedMicrobatch
from megabatch.planning.limits import MeasuredMicrobatch
from megabatch.planning.plan import Plan
from megabatch.torch_private.operations import pytree

ComputeTerms = Callable[[LossFunction, Mapping[str, float], MicrobatchStep], dict[str, Term]]
LACKS_MEMORY = 2.0  # in the message after a measured update: it ran out of memory; 1.0 is any other error


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
    """A model with its wrapper, for measured updates.

    Args:
        compute_terms: ``compute_terms(loss_fn, divisors, step)`` runs a loss on a microbatch, and returns its terms.
        wrapper: The wrapper of the model.
        wide: Accumulates its gradients.
    """

    def __init__(self, compute_terms: ComputeTerms, wrapper: Wrapper, wide: Gradients) -> None:
        self.compute_terms, self.wrapper, self.wide = compute_terms, wrapper, wide

    @property
    def waits(self) -> bool:
        """True if ranks wait for each other inside of a measured update."""
        is_local = self.wrapper.is_microbatch_local and not any(map(_finds_unused, self.wrapper.models))
        return not (is_local or self.wrapper.ranks.is_alone)

    def discard(self) -> None:
        """Drop the gradients and buffers of a measured update."""
        self.wrapper.discard()
        self.wide.discard()
        drop_gradients(self.wrapper.parameters)


class MicrobatchMeasurer:
    """Runs small updates on copies of the longest sample, and records their memory and time."""

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

    def warm_up(self) -> None:
        """Run one sample, which allocates once: workspaces and compiled code. Collective."""
        with self._raising_on_all(self._longest.sample, 1):
            self._subject.wide.begin()
            self._run_update(self._make_update(self._longest.sample, (1,)))
            self._subject.discard()

    def measure(self, rows: int) -> MeasuredMicrobatch:
        """Return the peak memory and the seconds of a microbatch of so many rows; collective."""
        wrapper, sample = self._subject.wrapper, self._longest.sample
        # The first microbatch makes the gradients, beside which the next runs, as every later one would. A GPU's
        # allocator asks for memory in that one, so a third is timed.
        sizes = (1, rows) if wrapper.device.type == "cpu" else (1, rows, rows)
        with self._raising_on_all(sample, rows):
            share = self._make_update(sample, sizes)
            self._subject.wide.begin()
            with measure_memory(wrapper.device) as use:
                seconds = self._run_update(share)
            self._subject.discard()
            collated_bytes = self._collated_bytes(share, rows)
        is_offloaded = wrapper.parameters[0].device.type != wrapper.device.type  # states are in host memory then
        before = self.budget.used
        before += 0.0 if is_offloaded else estimate_state_bytes(self._optimizer, wrapper.parameters)
        stays = before + use.left_bytes + collated_bytes
        sent = [seconds, use.peak_bytes - use.left_bytes, stays]
        sent += [self.budget.limit - stays, self.budget.there - stays, self.budget.limit, self.budget.limit - before]
        rows_of = wrapper.ranks.exchange_numbers(sent)
        times, peaks, lasting, allowed, there, limits, for_updates = zip(*rows_of, strict=True)
        self.space, self.stays_bytes = MemoryRoom(min(allowed), min(there)), max(lasting)
        self.limit_bytes, self.allowed_bytes = min(limits), min(for_updates)
        return MeasuredMicrobatch(rows, max(peaks), max(times))

    def measure_seconds(self, sample: Sample, rows: int) -> TimedMicrobatch:
        """Return the seconds of a microbatch with copies of a sample; collective."""
        with self._raising_on_all(sample, rows):
            self._subject.wide.begin()
            seconds = self._run_update(self._make_update(sample, (1, rows)))
            self._subject.discard()
        rows_of = self._subject.wrapper.ranks.exchange_numbers([seconds])
        slowest = max(row[0] for row in rows_of)
        return TimedMicrobatch(rows, max(1, sample.num_tokens), slowest)

    def _make_update(self, sample: Sample, sizes: Sequence[int]) -> PreparedBatch:
        """Make an update of copies of a sample, in microbatches of ``sizes`` rows."""
        hooks = loss_hooks(self._loss_fn)

        def length(_: Any) -> int:
            return sample.num_tokens

        samples = replace(self._planner, length=length).samples([sample.value] * sum(sizes), hooks.prepare)
        cut = tuple(tuple(range(end - rows, end)) for rows, end in zip(sizes, itertools.accumulate(sizes), strict=True))
        # Between two reductions "every:K" keeps what "last" keeps.
        sync, _, period = self._planner.choice[0].partition(":")
        return collate_planned(samples, Plan(cut, tuple(samples.lengths), sync="last" if period else sync), hooks.weigh)

    def _run_update(self, share: PreparedBatch) -> float:
        """Run one update. Return the seconds of its last microbatch."""
        wrapper, weigh, took = self._subject.wrapper, weigh_of(self._loss_fn), Duration()
        num_planned = len(share.plan.microbatches)
        # The plan has one microbatch more than run, so that DDP does not reduce, which would rebuild its buckets.
        # With find_unused_parameters all run: DDP keeps its buckets then, and a reduction clears its unused parameters.
        num_run = None if any(map(_finds_unused, wrapper.models)) else num_planned
        call = CallAgreement(
            num_planned + 1, len(share.samples), share.plan.num_tokens, share.weight_sums, share.dummy
        )  # fmt: skip
        opened = OpenUpdate(wrapper)
        opened.count_call(call)
        with (
            no_float16_autocast(wrapper.models),
            contextlib.closing(iterate_steps(share, call, weigh, wrapper)) as steps,
        ):
            for step in itertools.islice(steps, num_run):
                with measure_time(wrapper.device) as took:
                    terms = self._subject.compute_terms(self._loss_fn, opened.divisors, step)
                    opened.backward(terms, step)
                del step, terms  # with its microbatch
        return took.seconds

    @contextlib.contextmanager
    def _raising_on_all(self, sample: Sample, rows: int) -> Generator[None]:
        """Raise an error of one rank on all ranks, unless they wait for each other inside of the update."""
        ranks, failure = self._subject.wrapper.ranks, None
        try:
            yield
        except Exception as error:
            failure = error
            if is_out_of_memory(error):
                failure = self._out_of_memory(in_one_line(error), sample, rows)
                failure.__cause__ = error
                if rows == 1:  # error_broadcast tells the other ranks
                    raise failure from error
            elif rows == 1 and not isinstance(error, MegabatchError):
                failure = PlanError(
                    f"one sample of {sample.num_tokens} tokens alone does not run ({in_one_line(error)}); mend that, "
                    f"or for what needs several samples {GIVE_A_BOUND}"
                )
                failure.__cause__ = error
            if self._subject.waits:
                raise failure from failure.__cause__
        lacks_memory = isinstance(failure, MegabatchError) and failure.shortage is not None
        codes = [code for (code,) in ranks.exchange_numbers([LACKS_MEMORY if lacks_memory else float(bool(failure))])]
        if any(code not in (0.0, LACKS_MEMORY) for code in codes):
            raise first_failure(ranks, failure)
        if any(codes):  # on each rank, which then goes on with fewer rows
            raise failure or self._out_of_memory("it says why", sample, rows, process="another rank")

    def _out_of_memory(self, text: str, sample: Sample, rows: int, process: str | None = None) -> MegabatchError:
        """Return the error of a measured update that ran out of memory, since the system had less than it reported."""
        process, bound = process or whoever_runs(self._subject.wrapper.ranks.num_all), None
        samples, change = "a sample", "shorten it, checkpoint activations, or shard the model over more ranks"
        if rows > 1:
            bound = MicrobatchLimit(rows // 2, rows // 2 * max(1, sample.num_tokens))
            samples, change = f"{rows} samples", f"give max_microbatch_tokens={bound.tokens}"
        failure = MegabatchError(
            f"{process} ran out of memory when it measured {samples} of {sample.num_tokens} tokens, the longest; "
            f"{change} ({text})"
        )
        failure.shortage = Shortage(rank_of_process(), (), bound)
        return failure

    def _collated_bytes(self, share: PreparedBatch, rows: int) -> float:
        """Return the bytes of an update's microbatches on the CPU, if all are collated in advance to weigh them."""
        if self._subject.wrapper.device.type != "cpu" or not share.collated:
            return 0.0
        leaves = [leaf for leaf in pytree.tree_leaves(share.collated[-1]) if isinstance(leaf, Tensor)]
        return sum(leaf.nbytes for leaf in leaves) / (rows * self._longest.num_tokens) * self._longest.most_tokens


def _finds_unused(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) and model.find_unused_parameters
