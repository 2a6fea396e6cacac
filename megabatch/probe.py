"""Small updates of copies of one sample, which are measured and leave nothing behind."""

import contextlib
import itertools
import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn, optim
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from megabatch import gradient, rng
from megabatch.alarm import is_out_of_memory, rank_of_process, whoever_runs
from megabatch.batch import Batch
from megabatch.contract import JointLoss, LossFunction, hooks_of, terms_of, weigh_of
from megabatch.cut import Plan
from megabatch.errors import MegabatchError, PlanError, Shortage, in_one_line, require_positive
from megabatch.fit import Fit, Measured, Space, Timed, bound_tokens, cost_of, in_gib, search
from megabatch.kept import Kept, norms
from megabatch.memory import GIVE_A_BOUND, Budget, budget_of, bytes_to_come, check_device, measuring, timing
from megabatch.plain import PlainReducer
from megabatch.precision import Wide, no_float16_autocast
from megabatch.run import Agreement, told_failure, turns
from megabatch.share import Cutter, Share, collated
from megabatch.stages import PipelineReducer
from megabatch.update import OpenUpdate

TIMED_ROWS = 8  # at most: where a launch is no longer to be seen, and soon done
NUM_RUN = 2  # microbatches of a measured update: the second has gradients beside it, and a third would have no more


class Prober:
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
        self, model: Any, reducer: PlainReducer, wide: Wide, cutter: Cutter, memory_bytes: float | None
    ) -> None:
        self.optimizer: optim.Optimizer | None = None  # whose states are to have room; None: two for each parameter
        self.model, self.reducer, self.wide, self._memory_bytes = model, reducer, wide, memory_bytes
        if memory_bytes is not None:
            require_positive("memory_bytes", memory_bytes)
        if cutter.is_auto:
            self._check_auto()
        elif memory_bytes is not None:
            raise PlanError('memory_bytes is for max_microbatch_tokens="auto", and a bound is given; leave one out')

    def _check_auto(self) -> None:
        """Raise `PlanError` for what a measured microbatch would not leave as it was, or does not tell."""
        check_device(self.reducer.device)
        if isinstance(self.reducer, PipelineReducer):
            raise PlanError(
                "a Pipeline runs the microbatches of a call together, so that one does not tell what fits, and "
                f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
            )
        for module in self.reducer.models:
            if isinstance(module, DistributedDataParallel) and module.static_graph:
                raise PlanError(
                    "DDP with static_graph=True keeps the graph of its first backward, which would be measured, and "
                    f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
                )

    def fitted(
        self, cutter: Cutter, batch: Batch, loss_fn: LossFunction | JointLoss, opened: OpenUpdate | None
    ) -> Cutter:
        """The cutter, whose bound is to be chosen, with one for this batch; the same on all ranks. Collective.

        Measured are copies of the longest sample of all ranks, unless ones as long were measured before. In an open
        update there are gradients, and nothing is measured.
        """
        if opened is not None:
            return cutter
        if isinstance(loss_fn, JointLoss):
            raise PlanError(
                "a JointLoss keeps representations of all samples, so that one microbatch does not tell what fits, and "
                f'max_microbatch_tokens is "auto"; {GIVE_A_BOUND}'
            )
        longest = self._longest(cutter, batch)
        if longest is None:
            return cutter
        self.reducer.check_unchanged()
        gradient.drop(self.reducer.parameters)
        with self._as_before():
            return replace(cutter, fit=self._fit(_Updates(self, cutter, longest, loss_fn), longest))

    def _longest(self, cutter: Cutter, batch: Batch) -> "_Longest | None":
        """The longest sample of all ranks; None where the bound need not be chosen for it."""
        ranks, told, failure, samples = self.reducer.ranks, [1.0, 0.0, 0.0, 0.0], None, None
        try:
            samples = cutter.samples(batch)
            told = [0.0, len(samples), max(samples.lengths, default=-1), sum(samples.lengths)]
        except Exception as error:  # whatever the user's length raises, the other ranks must hear of it
            failure = error
        failed, counts, lengths, sums = zip(*ranks.exchange(told), strict=True)
        if any(failed):
            raise told_failure(ranks, failure)
        assert samples is not None  # only a failure leaves it out
        tokens = int(max(lengths))
        if tokens < 0 or (cutter.fit is not None and tokens <= cutter.fit.longest_tokens):
            return None
        longest = samples.one(samples.lengths.index(tokens)) if tokens in samples.lengths else None
        order = sorted(range(len(samples)), key=samples.lengths.__getitem__)
        usual = samples.one(order[len(order) // 2]) if order else None  # of the middle length
        all_longest, all_usual = zip(*ranks.exchange_objects((longest, usual)), strict=True)
        longest, usual = (next(each for each in all_of if each is not None) for all_of in (all_longest, all_usual))
        return _Longest(longest, max(1, tokens), int(max(counts)), max(sums), usual)

    def _fit(self, updates: "_Updates", longest: "_Longest") -> Fit:
        updates.measure(1)  # what is made once, workspaces and compiled code, is there from here on
        updates.budget = budget_of(self.reducer.device, self._memory_bytes, self.reducer.ranks)
        measured = search(updates.measure, lambda: updates.space, longest.most_rows)
        tokens = bound_tokens(measured, updates.space, longest.tokens)
        if tokens is None:
            left = max(0.0, updates.space.allowed)
            raise PlanError(
                f"one sample of {longest.tokens} tokens needs {in_gib(measured[0].num_bytes)}, and parameters, "
                f"gradients and states leave {in_gib(left)} of the {in_gib(updates.limit_bytes)} that may be used; "
                "give more memory, shorten it, shard the model or recompute activations"
            )
        most_rows = min(TIMED_ROWS, max(each.rows for each in measured if each.num_bytes <= updates.space.allowed))
        timed = [*updates.timed(longest.sample, most_rows), *updates.timed(longest.usual, most_rows)]
        cost = cost_of(measured, updates.space, updates.stays_bytes, longest.tokens, timed)
        return Fit(tokens, cost, longest.tokens, tuple(measured), updates.limit_bytes, updates.allowed_bytes)

    @contextlib.contextmanager
    def _as_before(self) -> Generator[None]:
        """Surrounds measured updates: what they move is put back, or an error says what could not be."""
        modules = {id(each): each for model in self.reducer.models for each in model.modules()}.values()
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left it gathered
        kept = [Kept(module) for module in modules]
        parameters = {name: each for model in self.reducer.models for name, each in model.named_parameters()}
        before = norms(parameters.values())
        state, others = rng.note(self.reducer.device), (random.getstate(), np.random.get_state())
        try:
            yield
        finally:
            self.forget()
            for each in kept:
                each.put_back()
            rng.put_back(state)
            random.setstate(others[0])
            np.random.set_state(others[1])
        now = norms(parameters.values())
        moved = [name for name, a, b in zip(parameters, before, now, strict=True) if a != b]
        self._check_moved(moved)

    def forget(self) -> None:
        """Drop what a measured update has left."""
        self.reducer.discard()
        self.wide.discard()
        gradient.drop(self.reducer.parameters)

    def _check_moved(self, names: Sequence[str]) -> None:
        """Raise, on all ranks, where a forward has written to parameters."""
        ranks = self.reducer.ranks
        if not any(moved for (moved,) in ranks.exchange([float(len(names))])):
            return
        failure = None
        if names:
            failure = MegabatchError(
                f"the loss wrote to parameter {names[0]!r} while it was measured, which cannot be taken back; make the "
                f"model anew, and {GIVE_A_BOUND}"
            )
        raise told_failure(ranks, failure)


@dataclass(frozen=True)
class _Longest:
    """The longest sample of a call, and what else is to be known of its samples."""

    sample: Any
    tokens: int
    most_rows: int  # samples of the rank that has the most
    most_tokens: float  # of the rank that has the most
    usual: Any  # a sample of another length


class _Updates:
    """Runs small updates of copies of the longest sample, and keeps what they say of memory."""

    def __init__(self, prober: Prober, cutter: Cutter, longest: _Longest, loss_fn: LossFunction) -> None:
        self._prober, self._cutter, self._longest, self._loss_fn = prober, cutter, longest, loss_fn
        self.budget = Budget(0.0, 0.0, 0.0)
        self.space = Space(0.0, 0.0)
        self.stays_bytes = 0.0  # the most that a rank keeps from microbatch to microbatch
        self.limit_bytes = self.allowed_bytes = 0.0  # the least that a rank may use, and of it for an update

    def measure(self, rows: int) -> Measured:
        """What a microbatch of so many rows takes, in an update of a few; collective."""
        reducer = self._prober.reducer
        share = self._share(self._longest.sample, rows)
        self._prober.wide.begin()
        with measuring(reducer.device) as needed, no_float16_autocast(reducer.models), self._short_of(rows):
            self._run(share)
        self._prober.forget()
        before = self.budget.used + bytes_to_come(self._prober.optimizer, reducer.parameters)
        stays = before + needed.left_bytes + self._own_bytes(share, rows)
        told = [needed.peak_bytes - needed.left_bytes, stays]
        told += [self.budget.limit - stays, self.budget.there - stays, self.budget.limit, self.budget.limit - before]
        peaks, kept, allowed, there, limits, for_updates = zip(*reducer.ranks.exchange(told), strict=True)
        self.space, self.stays_bytes = Space(min(allowed), min(there)), max(kept)
        self.limit_bytes, self.allowed_bytes = min(limits), min(for_updates)
        return Measured(rows, max(peaks))

    def timed(self, sample: Any, most_rows: int) -> list[Timed]:
        """The seconds of a microbatch of one copy of a sample, and of several; collective."""
        found: list[Timed] = []
        for rows in sorted({1, most_rows}):
            share, seconds = self._share(sample, rows), math.inf
            for _ in range(2):  # the better of two: what else the machine does only adds
                self._prober.wide.begin()
                with timing(self._prober.reducer.device) as took, no_float16_autocast(self._prober.reducer.models):
                    self._run(share)
                self._prober.forget()
                seconds = min(seconds, took.seconds / NUM_RUN)
            slowest = max(told for (told,) in self._prober.reducer.ranks.exchange([seconds]))
            found.append(Timed(rows, max(1, share.plan.lengths[0]), slowest))
        return found

    def _share(self, sample: Any, rows: int) -> Share:
        """An update of copies of a sample, in microbatches of ``rows``."""
        hooks = hooks_of(self._loss_fn)
        samples = self._cutter.samples([sample] * (NUM_RUN * rows), hooks.prepare)
        cut = tuple(tuple(range(index * rows, (index + 1) * rows)) for index in range(NUM_RUN))
        return collated(samples, Plan(cut, tuple(samples.lengths), sync=self._cutter.choice[0]), hooks.weigh)

    def _run(self, share: Share) -> None:
        reducer, weigh = self._prober.reducer, weigh_of(self._loss_fn)
        # One microbatch more is announced and not run, so that DDP, which would rebuild its buckets, does not reduce.
        # Where it is to find unused parameters it keeps the buckets, and forgets those it found when it reduces.
        num_run = None if any(map(_finds_unused, reducer.models)) else NUM_RUN
        agreement = Agreement(
            NUM_RUN + 1, len(share.samples), share.plan.num_tokens, share.weight_sums(), share.stand_in
        )  # fmt: skip
        opened = OpenUpdate(reducer)
        opened.open_call(agreement)
        with contextlib.closing(turns(share, agreement, weigh, reducer, reducer.device)) as each:
            for turn in itertools.islice(each, num_run):
                opened.backward(terms_of(self._loss_fn(self._prober.model, turn.microbatch)), turn)
                del turn  # with its microbatch

    @contextlib.contextmanager
    def _short_of(self, rows: int) -> Generator[None]:
        """Surrounds a measured update: what there is may be less than the system said."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            tokens, who = self._longest.tokens, whoever_runs(self._prober.reducer.ranks.num_all)
            samples, change = "a sample", "shorten it, checkpoint activations, or shard the model over more ranks"
            if rows > 1:
                samples, change = f"{rows} samples", f"give max_microbatch_tokens={rows // 2 * tokens}"
            failure = MegabatchError(
                f"{who} ran out of memory when it measured {samples} of {tokens} tokens, the longest; {change} "
                f"({in_one_line(error)})"
            )
            failure.shortage = Shortage(rank_of_process(), (), None)
            raise failure from error

    def _own_bytes(self, share: Share, rows: int) -> float:
        """A whole update's microbatches, which are collated before they are run where they are weighed, on the CPU."""
        if self._prober.reducer.device.type != "cpu" or not share.collated:
            return 0.0
        leaves = [leaf for leaf in pytree.tree_leaves(share.collated[0]) if isinstance(leaf, Tensor)]
        return sum(leaf.nbytes for leaf in leaves) / (rows * self._longest.tokens) * self._longest.most_tokens


def _finds_unused(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel) and model.find_unused_parameters
