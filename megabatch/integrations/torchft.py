"""Updates that survive the loss of replicas at a constant batch, on torchft's Manager: `Replicas`.

Written for torchft 0.2.0. An update is a set of samples, so the replicas that are left can compute what a lost one
owed. One update may take several attempts. Each attempt is a quorum, the microbatches that nobody holds, a sum over
replicas and a vote. A replica keeps the sum of its microbatches over attempts.
"""

import enum
import json
import math
import os
import random
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from megabatch.core.call import MicrobatchStep
from megabatch.core.contract import LossFunction, Term, loss_hooks
from megabatch.core.extension import Call, Extension, Steps
from megabatch.core.samples import Batch
from megabatch.core.update import OpenUpdate, Update
from megabatch.core.wrapper import SelfWrapped, local, trainable
from megabatch.errors import MegabatchError, PlanError
from megabatch.integrations.lighthouse import call_while_it_answers
from megabatch.planners.same_bits import SameBitsPlanner
from megabatch.planning.balancing import balance, fill
from megabatch.planning.dealing import plan
from megabatch.planning.plan import CostModel, Plan
from megabatch.planning.sampler import UpdateSampler
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.classes import is_dtensor

MESSAGE_ELEMENTS = 2**23  # of a gradient
CUT_FOR = 6  # replicas: two, three and six of them then have equal shares
Load = Callable[[list[int]], Batch]
Row = dict[str, Any]  # what one replica tells the others


class Sums(NamedTuple):
    """Sums over replicas, with which an update is closed."""

    gradients: dict[int, Tensor]  # by index of the trained parameter; this rank's shards
    terms: list[dict[str, Term]]  # of each microbatch of the update
    differentiable: list[str]  # names of terms
    token: int  # a random number that names this reduction


class Finding(enum.IntEnum):
    """Result of a comparison of rows. All ranks of a replica act on the highest that one of them has."""

    SAME = 0
    FAILED = 1  # the attempt fails
    OUTDATED = 2  # and this replica takes the weights of another
    FOREIGN = 3  # this replica ends
    DIVERGED = 4  # all replicas end


ENDINGS = {  # of an error after "update N has "
    Finding.FOREIGN: "other samples, limits, clip, seed, modules in training, trained parameters or weights on this "
    "replica than on the others; give all replicas the same data, sampler, model, loss and settings",
    Finding.DIVERGED: "other weights or learning rates on replicas that made the same updates; step the same optimizer "
    "and scheduler on all replicas, give both to Replicas, and use the same hardware and number of threads",
}


class Replicas(Extension):
    """Runs updates on replicas that may be lost, stopped or added, with the samples of an undisturbed run.

    A replica is one process with a plain model, or several with a model that FSDP2 shards over all of them. Each
    microbatch is seeded by its number, so that dropout does not depend on the replica.

    Args:
        manager: A torchft ``Manager`` with ``use_async_quorum=False`` and without state dict functions. Make it last:
            from its start on, the others wait for this replica.
        process_group: The process group of the manager.
        sampler: Yields all samples of each update: ``UpdateSampler(..., dp_rank=0, dp_degree=1)``, with the same
            arguments on every replica.
        optimizer: Its state goes to a replica that joins.
        scheduler: Its state goes too.
        seed: Seeds the microbatches, together with their numbers.
        lighthouse: Its address, if TORCHFT_LIGHTHOUSE is not set. Without either, the death of the Lighthouse costs
            the ``quorum_timeout`` of the manager.

    Attributes:
        num_replicas: Replicas of the last quorum. 0 before the first.
        last_plan: Microbatches of the last update that was begun, on all replicas.

    Raises:
        PlanError: In `attach`, a model or an accumulator whose gradients replicas cannot sum exactly.
    """

    def __init__(
        self, manager: Any, process_group: Any, sampler: UpdateSampler, optimizer: torch.optim.Optimizer, *,
        scheduler: Any = None, seed: int = 0, lighthouse: str | None = None,
    ) -> None:  # fmt: skip
        self.num_replicas, self.last_plan = 0, Plan((), ())
        self._lighthouse = lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE", "")
        self._manager, self._group, self._seed = manager, process_group, seed
        self._sampler, self._optimizer, self._scheduler = sampler, optimizer, scheduler
        self._accumulator: Callable[[], Any] = lambda: None
        self._is_running = False  # calls come from `updates`
        self._num_made = 0  # updates since this replica has loaded a state
        self._token: int | None = None  # of the reduction that the weights come from
        self._sums: Sums | None = None  # while an update is closed
        self._forget_update()
        manager.register_state_dict_fn("megabatch", self._load_state, self._state)

    def attach(self, gradient: Any) -> None:
        model, ranks = gradient.model, gradient.ranks
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        is_sharded = isinstance(model, FSDPModule) and ranks.num_all == ranks.degree == world_size
        problem = None
        if not isinstance(model, nn.Module):
            problem = "the accumulator has several models; give it one"
        elif isinstance(model, (DistributedDataParallel, FullyShardedDataParallel, SelfWrapped)):
            problem = f"the model is a {type(model).__name__}, which sums over ranks by itself; leave it unwrapped"
        elif not ranks.is_alone and not is_sharded:
            problem = "a replica has several ranks; shard the model over all of them with fully_shard, or use one"
        elif any(parameter.device_mesh.ndim > 1 for parameter in trainable(model) if is_dtensor(parameter)):
            problem = "the model is sharded over several axes; use fully_shard over a mesh of one"
        elif is_sharded and gradient.planner.choice[0] != "every" and not ranks.is_alone:
            problem = f"sync is {gradient.planner.choice[0]!r}, which keeps gradients unreduced; leave it out"
        elif gradient.planner.stated_limits == (None, None):
            problem = "no limit that all replicas know; give micro_batch_size= or max_microbatch_tokens=, a number"
        if problem is not None:
            raise PlanError(f"Replicas and {problem}")
        self._accumulator, self._limits = weakref.ref(gradient), gradient.planner.stated_limits
        # A measured cost would differ between replicas, and with it the cut.
        self._cost = gradient.planner.cost
        self._has_same_bits = isinstance(gradient.planner, SameBitsPlanner)
        self._device = next(gradient.model.parameters()).device
        self._degree = ranks.degree  # ranks of a replica, each with a column of the microbatches
        self._column = dist.get_rank() if self._degree > 1 else 0

    def before_call(self, gradient: Any, batch: Batch, loss_fn: Any) -> None:
        self._check_is_running("forward_backward()")

    def after_finalize(self, gradient: Any, update: Update) -> None:
        self._check_is_running("finalize()")

    def _check_is_running(self, verb: str) -> None:
        if not self._is_running:
            raise PlanError(f"{verb} with Replicas would use the samples of one replica; iterate over updates()")

    def state_dict(self) -> dict[str, Any]:
        return {"torchft": self._manager.state_dict()}

    def load_state_dict(self, gradient: Any, state: dict[str, Any]) -> None:
        if "torchft" not in state:
            raise PlanError("the state has no torchft; give one that was saved with Replicas")
        self._manager.load_state_dict(state.pop("torchft"))
        self._forget_update()
        self._token, self._num_made = None, 0  # the weights come from the checkpoint

    def updates(
        self, gradient: Any, load: Load, loss_fn: LossFunction, *, num_updates: int, max_norm: float | None = None
    ) -> Generator[Update]:
        """Yield each update once its gradient is in ``p.grad``. Step optimizer and scheduler in the body.

        A replica that was away yields no update that it missed: it loads the state of another.

        Args:
            gradient: The accumulator that has this extension.
            load: Returns the batch of some sample ids. Any replica may call it for any samples of an update.
            loss_fn: A loss as for `forward_backward`, which says how its weight is counted (``weigh=``).
            num_updates: Updates of the run, with those before a checkpoint.
            max_norm: Clips each gradient to this norm.

        Raises:
            PlanError: A `JointLoss`, a loss without ``weigh``, sparse gradients, and samples, settings or weights
                other than those of the other replicas.
            MegabatchError: A forward that writes to a buffer or a parameter, such as the statistics of a batch
                norm.
            LighthouseError: The Lighthouse does not answer. No attempt can follow; weights and optimizer are whole.
        """
        if gradient is not self._accumulator():
            raise PlanError("updates() was given an accumulator without these Replicas; give them in extensions=")
        if hasattr(loss_fn, "run_call"):
            raise PlanError("Replicas and a JointLoss, which couples the samples of a call; use a loss that sums")
        if loss_hooks(loss_fn).weigh is None:
            raise PlanError("Replicas and a loss without weigh; say how its weight is counted: loss(weigh=...)")
        self._max_norm = None if max_norm is None else float(max_norm)
        while self._manager.current_step() < num_updates:
            self._is_running = True
            try:
                update = self._try_update(gradient, load, loss_fn, num_updates, max_norm)
            finally:
                self._is_running = False
            if update is not None:
                yield update

    def _try_update(
        self, gradient: Any, load: Load, loss_fn: LossFunction, num_updates: int, max_norm: float | None
    ) -> Update | None:
        """Make one attempt at the open update. Return None if it has failed, or if the run is over."""
        if gradient.open_update not in (None, self._opened):
            raise PlanError("updates() was called in an open update; discard() it before")
        self.start_quorum()
        self._number = self._manager.current_step()
        self.num_replicas = self._manager.num_participants()
        if self._number >= num_updates:
            return None
        if not self._manager.is_participating():
            raise PlanError("Replicas and a manager with spares or a quorum in a thread; give use_async_quorum=False")
        if not self._groups:
            self._draw()
        sums = self._compute_sums(gradient, load, loss_fn)
        if sums is None:
            # Others wait in the old ring until their timeout, unless this rank leaves it.
            self._group.abort()
        if not self._manager.should_commit() or sums is None:
            return None
        # The update is closed as if this replica had computed all of it.
        gradient.discard()
        gradient.open(self._column_weights(gradient))
        self._sums = sums
        try:
            gradient.forward_backward([], loss_fn)  # `surround_steps` puts the sums in
        finally:
            self._sums = None
        update = gradient.finalize(max_norm=max_norm)
        self._token, self._num_made = sums.token, self._num_made + 1
        self._forget_update()
        self._seed_by("after", self._number)
        return update

    def start_quorum(self) -> None:
        """Wait for a quorum of the live replicas. A replica that is behind loads the state of another."""
        call_while_it_answers(self._lighthouse, self._start_quorum_on_device)

    def _start_quorum_on_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.set_device_index(self._device)  # each thread has its own
        self._manager.start_quorum()

    def surround_steps(self, steps: Steps, call: Call) -> Steps:
        yield from steps
        if self._sums is None:
            return
        parameters, opened = call.wrapper.parameters, call.opened
        for index, total in self._sums.gradients.items():
            parameters[index].grad = _shaped_like(parameters[index], total)
        for name in self._sums.differentiable:
            opened.add_unseen(name, 0.0)
        for index, terms in enumerate(self._sums.terms):
            opened.add(terms, MicrobatchStep({}, index, {}, is_dummy=False))
        opened.num_samples, opened.num_microbatches = len(self._ids), len(self._groups)
        opened.num_tokens = int(self._sampler.lengths[self._ids].sum())

    def _compute_sums(self, gradient: Any, load: Load, loss_fn: LossFunction) -> Sums | None:
        """Compute this replica's share of the microbatches that nobody holds, and sum over replicas."""
        missing = self._agree_on_missing(gradient, load, loss_fn)
        if missing is None:
            return None
        before = _note_writes(gradient.model)
        if gradient.open_update is None:
            gradient.open(self._column_weights(gradient))
            self._opened = gradient.open_update
        for index in missing:
            batch = self._batch(load, index)
            self._seed_by(self._number, index, self._column)
            self._terms[index] = gradient.forward_backward(batch, loss_fn)
            del self._batches[index]
        written = _find_written(before, _note_writes(gradient.model))
        if not _on_all_ranks(gradient, not written):
            place = repr(written[0]) if written else "a tensor on another rank"
            raise MegabatchError(
                f"the forward writes to {place}, which would differ between replicas; call eval() on its module, or "
                "use another (a norm without running statistics)"
            )
        parameters = trainable(gradient.model)
        gradients = {index: parameter.grad for index, parameter in enumerate(parameters) if parameter.grad is not None}
        row = {
            "terms": {
                index: {name: (float(total), float(weight)) for name, (total, weight) in terms.items()}
                for index, terms in self._terms.items()
            },
            "differentiable": cast(Any, gradient.open_update).differentiable,
            "dtypes": {index: str(tensor.dtype).removeprefix("torch.") for index, tensor in gradients.items()},
            "token": random.SystemRandom().getrandbits(62),
        }
        rows = self._exchange(gradient, row)
        if rows is None:
            return None
        num_holders = Counter(int(index) for row in rows for index in row["terms"])
        if not _on_all_ranks(gradient, all(num_holders[index] == 1 for index in range(len(self._groups)))):
            return self._fail(f"microbatches are held {sorted(num_holders.items())} times")
        totals = self._sum_gradients(gradient, parameters, rows)
        if totals is None:
            return None
        terms_by_index = {int(index): terms for row in rows for index, terms in row["terms"].items()}
        ordered = [
            {name: Term(torch.tensor(total, dtype=torch.float64), weight) for name, (total, weight) in terms.items()}
            for _, terms in sorted(terms_by_index.items())
        ]
        names = {name for row in rows for name in row["differentiable"]}
        return Sums(totals, ordered, sorted(names), rows[0]["token"])

    def _agree_on_missing(self, gradient: Any, load: Load, loss_fn: LossFunction) -> list[int] | None:
        """Return this replica's share of the microbatches that no replica holds. None if the attempt has failed."""
        if gradient.open_update is None:
            self._terms.clear()  # after an error in a call and discard(), their gradients are gone
        rank, size = self._manager.participating_rank(), self.num_replicas
        shares = self._deal(range(len(self._groups)))  # some replica of this quorum counts each microbatch
        indices = shares[rank]
        if self._num_made == 0:  # compare data and loss with the next replica
            indices = indices + shares[(rank + 1) % size][:1]
        for index in indices:
            if index not in self._weights:
                hooks = loss_hooks(loss_fn)
                prepared = gradient.planner.prepare(self._batch(load, index), hooks)
                gradient.call_guard.check_weights(gradient.planner, prepared, hooks)
                self._weights[index] = prepared.weight_sums
        digest = digest_weights(gradient.model) if size > 1 else 0
        row = {
            "update": self._number,
            "num_made": self._num_made,
            "samples_and_settings": _checksum(self._groups, self._describe_settings(gradient)),
            "token": self._token or digest,
            "weights_and_rates": _checksum(digest, _describe_rates(self._optimizer)),
            "weights": self._weights,
            "terms": list(self._terms),
        }
        rows = self._exchange(gradient, row)
        if rows is None:
            return None
        finding, reason = self._compare(rows)
        finding = max(int(number) for (number,) in gradient.ranks.exchange_numbers([float(finding)]))
        if finding in ENDINGS:
            raise PlanError(f"update {self._number} has {ENDINGS[Finding(finding)]}")
        if finding == Finding.OUTDATED:
            self._manager.load_state_dict({**self._manager.state_dict(), "step": self._number - 1})
        if finding != Finding.SAME:
            return self._fail(reason)
        weights = {int(index): value for report in rows for index, value in report["weights"].items()}
        self._weights = dict(sorted(weights.items()))
        held: set[int] = set()
        for holder, holder_row in enumerate(rows):
            if held.isdisjoint(holder_row["terms"]):
                held |= set(holder_row["terms"])
            elif holder == rank:  # it was away while others computed its share again, and a sum gives nothing back
                self._terms.clear()
                gradient.discard()
        return self._deal([index for index in range(len(self._groups)) if index not in held])[rank]

    def _deal(self, indices: Sequence[int]) -> list[list[int]]:
        """Deal microbatches over the replicas of this quorum by cost."""
        shares = balance([self._prices[index] for index in indices], self.num_replicas)
        return [[indices[place] for place in places] for places in shares]

    def _compare(self, rows: list[Row]) -> tuple[Finding, str]:
        """Compare the rows of all replicas with that of the replica that has made the most updates."""
        local_row = rows[self._manager.participating_rank()]
        reference = max(rows, key=lambda row: row["num_made"])
        if any(row["update"] != self._number for row in rows):
            return Finding.FAILED, f"replicas are at updates {[row['update'] for row in rows]}"
        if any(row["token"] != reference["token"] for row in rows):
            # Two reductions made this step, which may differ in their last bits. One replica takes another's weights.
            is_outdated = local_row["token"] != reference["token"]
            finding = Finding.OUTDATED if is_outdated else Finding.FAILED
            return finding, "replicas have the weights of two reductions"
        values: dict[str, Any] = {}
        for row in [reference, *rows]:
            announced = {**row["weights"], "samples_and_settings": row["samples_and_settings"]}
            if any(values.setdefault(name, value) != value for name, value in announced.items()):
                finding = Finding.FOREIGN if row is local_row else Finding.FAILED
                return finding, "a replica has other samples or settings"
        diverged = [row for row in rows if row["weights_and_rates"] != reference["weights_and_rates"]]
        # A replica that has joined may lack a state. Among others, nobody knows whose weights are right.
        joined = [row for row in diverged if row["num_made"] < min(2, reference["num_made"])]
        if len(joined) < len(diverged) or local_row in joined:
            return Finding.DIVERGED, "replicas have diverged"
        if joined:
            return Finding.FAILED, "a replica that has joined has other weights"
        return Finding.SAME, "another rank of the replica has failed"

    def _sum_gradients(
        self, gradient: Any, parameters: list[nn.Parameter], rows: list[Row]
    ) -> dict[int, Tensor] | None:
        """Sum the gradients over replicas, in new memory: the local sum outlives an attempt that fails."""
        dtypes = {int(index): getattr(torch, name) for row in rows for index, name in row["dtypes"].items()}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in sorted(dtypes):
            by_dtype.setdefault(dtypes[index], []).append(index)
        flats = {
            dtype: torch.cat([_flat_gradient(parameters[index], dtype) for index in indices])
            for dtype, indices in by_dtype.items()
        }
        self._sum(*(part for flat in flats.values() for part in flat.split(MESSAGE_ELEMENTS)))
        # A replica that gets this message has the whole sum, and so has every other.
        self._sum(torch.zeros(1, dtype=torch.int64, device=self._device))
        if not self._is_well(gradient):
            return None
        sums: dict[int, Tensor] = {}
        for dtype, indices in by_dtype.items():
            sizes = [local(parameters[index]).numel() for index in indices]
            sums |= dict(zip(indices, flats[dtype].split(sizes), strict=True))
        return sums

    # The samples of the open update.

    def _describe_settings(self, gradient: Any) -> tuple[Any, ...]:
        """Return what has to be the same on all replicas, beside the samples."""
        training = [name for name, module in gradient.model.named_modules() if module.training]
        parameters = [
            (name, tuple(parameter.shape), parameter.dtype)
            for name, parameter in gradient.model.named_parameters()
            if parameter.requires_grad
        ]
        return self._limits, self._max_norm, self._seed, training, parameters

    def _forget_update(self) -> None:
        self._opened: OpenUpdate | None = None  # by `updates`
        self._ids: list[int] = []
        self._groups: list[list[tuple[int, ...]]] = []  # by microbatch: the sample ids of each column
        self._prices: list[float] = []  # by microbatch: the cost of its slowest column
        self._position: dict[str, Any] = {}  # of the sampler, before the update
        self._weights: dict[int, dict[str, float]] = {}  # by microbatch, as far as they are counted
        self._batches: dict[int, Batch] = {}  # that were loaded to count them
        self._terms: dict[int, dict[str, Term]] = {}  # of the microbatches that this replica holds

    def _draw(self) -> None:
        """Draw the samples of the next update, and cut them into microbatches."""
        self._position = self._sampler.state_dict()
        # An epoch may end with a tail that is dropped.
        self._ids = next(iter(self._sampler), []) or next(iter(self._sampler), [])
        if not self._ids or self._sampler.share(self._ids) != self._ids:
            raise PlanError("the sampler yields a share of the update; give UpdateSampler dp_rank=0 and dp_degree=1")
        self.last_plan = update = self.plan(self._sampler.lengths[self._ids].tolist())
        groups = [tuple(self._ids[item] for item in items) for items in update.microbatches]
        prices = [self._price(update.lengths, items) for items in update.microbatches]
        groups += [()] * (-len(groups) % self._degree)
        starts = range(0, len(prices), self._degree)
        self._groups = [groups[start : start + self._degree] for start in starts]
        self._prices = [max(prices[start : start + self._degree]) for start in starts]

    def plan(self, lengths: Sequence[int]) -> Plan:
        """Return the microbatches of an update on all replicas, from the costliest on.

        The number of replicas plays no part: it may change within the update, and a microbatch has one dropout mask.

        Args:
            lengths: Tokens of each sample of the update.
        """
        rows, tokens = self._limits
        if self._has_same_bits:  # one process cuts like this
            groups = fill(lengths, max_rows=rows, max_tokens=tokens)
        else:
            degree = CUT_FOR * self._degree
            shares = plan(
                lengths, dp_degree=degree, micro_batch_size=rows, max_microbatch_tokens=tokens, cost=self._cost
            )
            groups = [tuple(share.samples[row] for row in cut) for share in shares for cut in share.microbatches if cut]
        # Neighbors wait for each other in a replica of several ranks.
        groups.sort(key=lambda items: self._price(lengths, items), reverse=True)
        return Plan(tuple(groups), tuple(lengths), reason="replicas sum once an update")

    def _price(self, lengths: Sequence[int], items: Sequence[int]) -> float:
        return (self._cost or CostModel()).seconds(len(items), max(lengths[item] for item in items))

    def _batch(self, load: Load, index: int) -> Batch:
        """Return this rank's samples of a microbatch."""
        if index not in self._batches:
            ids = list(self._groups[index][self._column])
            self._seed_by("load", self._number, index, self._column)
            self._batches[index] = load(ids) if ids else []
        return self._batches[index]

    def _column_weights(self, gradient: Any) -> dict[str, float]:
        """Return the weight of this rank's column of the update, by term."""
        names = list(dict.fromkeys(name for weights in self._weights.values() for name in weights))
        # A column without samples does not know the names.
        names = next(filter(None, gradient.ranks.exchange_objects(names)), [])
        return {name: math.fsum(weights.get(name, 0.0) for weights in self._weights.values()) for name in names}

    def _seed_by(self, *key: object) -> None:
        number = _checksum(self._seed, *key)
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)

    # Messages.

    def _exchange(self, gradient: Any, row: Row) -> list[Row] | None:
        """Return the rows of all replicas. None after an error, on all ranks of this replica alike."""
        rank, size = self._manager.participating_rank(), self.num_replicas
        data = torch.frombuffer(bytearray(json.dumps(row).encode()), dtype=torch.uint8)
        sizes = torch.zeros(size, dtype=torch.int64, device=self._device)
        sizes[rank] = len(data)
        self._sum(sizes)
        table = sizes
        if self._manager.errored() is None:
            table = torch.zeros(size, int(sizes.max()), dtype=torch.uint8, device=self._device)
            table[rank, : len(data)] = data
            self._sum(table)
        if not self._is_well(gradient):
            return None
        rows = zip(table.cpu().numpy(), sizes.tolist(), strict=True)
        return [json.loads(line[:length].tobytes()) for line, length in rows]

    def _is_well(self, gradient: Any) -> bool:
        """Return True if the sums of this attempt have worked, on all ranks of this replica alike."""
        is_well = self._manager.errored() is None
        if _on_all_ranks(gradient, is_well):
            return True
        if is_well:
            self._fail("another rank of the replica has failed")
        return False

    def _sum(self, *tensors: Tensor) -> None:
        """Sum over replicas. After an error, which the manager keeps, do nothing."""
        # Keep no work: it would hold the ring of a failed attempt open, and others wait in it.
        works = [self._manager.allreduce(tensor, reduce_op=dist.ReduceOp.SUM) for tensor in tensors]
        for work in works:
            work.wait()

    def _fail(self, reason: str) -> None:
        """Fail the attempt: this replica votes no, and the next quorum has a new process group."""
        self._manager.report_error(MegabatchError(reason))

    # State.

    def _state(self) -> dict[str, Any]:
        """Return the state for a replica that joins. torchft calls this in a quorum."""
        model = self._accumulator().model
        return {
            "model": _shard(model.state_dict()),
            "buffers": _shard(dict(model.named_buffers())),  # a checkpoint may lack some
            "optimizer": _shard(self._optimizer.state_dict()),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "sampler": self._position or self._sampler.state_dict(),
            "token": self._token or digest_weights(model),
        }

    def _load_state(self, state: dict[str, Any]) -> None:
        """Load the state of another replica, and drop the local sum."""
        gradient = self._accumulator()
        gradient.discard()
        self._forget_update()
        examples = gradient.model.state_dict()
        gradient.model.load_state_dict(
            {name: _shaped_like(examples[name], value) for name, value in state["model"].items()}
        )
        for name, buffer in gradient.model.named_buffers():
            value, shard = state["buffers"].get(name), local(buffer)
            # A cache may have another shape, and an expanded buffer takes no values.
            if value is not None and value.shape == shard.shape and not torch.equal(shard, value.to(shard)):
                shard.copy_(value)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for index, values in state["optimizer"]["state"].items():
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == local(parameters[index]).shape:
                    values[name] = _shaped_like(parameters[index], value)
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._sampler.load_state_dict(state["sampler"])
        self._token, self._num_made = state["token"], 0


def _checksum(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


def _describe_rates(optimizer: torch.optim.Optimizer) -> list[tuple[str, float]]:
    """Return the numbers in the parameter groups of an optimizer, such as learning rates."""
    numbers: list[tuple[str, float]] = []
    for group in optimizer.param_groups:
        for name, value in group.items():
            values = cast(tuple[Any, ...], value) if isinstance(value, tuple) else (value,)
            numbers += [(name, float(number)) for number in values if isinstance(number, (int, float, Tensor))]
    return numbers


def digest_weights(model: nn.Module) -> int:
    """Return a number of 32 bits by this rank's bits of the model's state, whatever the number of threads."""
    sums: list[Tensor] = []
    for tensor in _tensors_of(model).values():
        integers = _as_integers(local(tensor))
        # The squares see two changes that add up to zero.
        sums += [integers.sum(dtype=torch.int64), (integers * integers).sum(dtype=torch.int64)]
    # The host waits for the device once.
    return _checksum(*torch.stack([total.to(sums[0].device) for total in sums]).tolist())


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, and the other tensors of a checkpoint."""
    named = {**dict(model.named_parameters()), **model.state_dict(keep_vars=True)}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _as_integers(tensor: Tensor) -> Tensor:
    """View the bits of a tensor as integers."""
    dtypes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.detach().contiguous().flatten().view(dtypes.get(tensor.element_size(), torch.int64))


def _on_all_ranks(gradient: Any, flag: bool) -> bool:
    """Return True if a flag is set on all ranks of this replica."""
    return all(is_set for (is_set,) in gradient.ranks.exchange_numbers([float(flag)]))


def _note_writes(model: nn.Module) -> dict[str, tuple[Tensor, int]]:
    """Return the tensors of a model, those that no checkpoint has too, and the number of writes to each."""
    tensors = {**_tensors_of(model), **dict(model.named_buffers())}
    return {name: (tensor, count_writes(tensor)) for name, tensor in tensors.items()}


def _find_written(before: dict[str, tuple[Tensor, int]], after: dict[str, tuple[Tensor, int]]) -> list[str]:
    """Return the names of tensors that were written to or replaced."""
    return [
        name
        for name, (tensor, writes) in after.items()
        if name not in before or before[name][0] is not tensor or before[name][1] != writes
    ]


def _flat_gradient(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of a gradient, zeros if there is none."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(local(parameter.detach()), dtype=dtype).flatten()
    if gradient.layout != torch.strided:
        raise PlanError("Replicas and a sparse gradient; make the embedding with sparse=False")
    return local(gradient).to(dtype).flatten()


def _shard(tree: Any) -> Any:
    """Return a tree with this rank's shard of each DTensor, which names process groups of its own replica."""
    if isinstance(tree, dict):
        return {key: _shard(value) for key, value in cast(dict[Any, Any], tree).items()}
    return local(tree) if isinstance(tree, Tensor) else tree


def _shaped_like(example: Any, value: Any) -> Any:
    """Return this rank's values in the shape of an example, as a DTensor where the example is one."""
    if not isinstance(value, Tensor):
        return value
    value = value.view(local(example).shape)
    if not is_dtensor(example):
        return value
    return DTensor.from_local(
        value, example.device_mesh, example.placements, run_check=False, shape=example.shape, stride=example.stride()
    )
