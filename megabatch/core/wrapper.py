"""The base class of wrappers, which also serves a model without one: gradients are summed once per update.

A `Wrapper` object is the interface through which the library uses DDP, FSDP and the like. Its ``loss_factor`` undoes
the wrapper's own division. Gradients are therefore sums over data and context ranks, under every sync policy.
"""

import contextlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megabatch.core.gradients import WideGradients, refuse_float16
from megabatch.core.mesh import DataRanks
from megabatch.errors import MegabatchError, PlanError
from megabatch.torch_private.autograd import (
    HOMES_OF_HOOKS,
    home_of_hook,
    hooks_after_grad,
    hooks_before_grad,
    own_of_parameter,
)
from megabatch.torch_private.classes import is_dtensor
from megabatch.torch_private.module_members import members_of_module
from megabatch.torch_private.optimizers import optimizers_in_backward

DTYPE, REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")
Choice = tuple[str, str]  # a policy, "last", "every", "gather_once" or "replica_last", and why
MAX_COMPARED_CALLS = 8  # in which ranks compare each collective: a loss made anew for each call is always new
END = -1  # in place of the number of a collective
CHANGED = (
    "parameters were frozen, unfrozen, added or replaced since the GradientAccumulator was made; make a new one "
    "(and wrap the model anew) after such a change"
)


@dataclass
class CollectiveOrder:
    """A hash of the collectives of an update in their order, which ranks compare."""

    digest: int = 0
    wants_comparison: bool = False  # this rank has a new loss in the call that ranks agree on
    is_compared: bool = False  # ranks compare each collective before it begins, not only the hash at the end
    num_compared_calls: int = 0

    def want_comparison(self, *, is_new: bool) -> None:
        """Ask to compare each collective of the next call, which has a new loss."""
        self.wants_comparison = is_new and self.num_compared_calls < MAX_COMPARED_CALLS

    def begin_call(self, *, is_compared: bool) -> None:
        """Compare each collective until the call ends, if any rank has asked for it."""
        self.is_compared = is_compared
        self.num_compared_calls += is_compared

    def note(self, number: int) -> None:
        """Mix in one gather or reduction."""
        self.digest = zlib.crc32(number.to_bytes(8), self.digest)

    def reset(self) -> None:
        """Begin another update."""
        self.digest = 0


class Wrapper:
    """Sums the whole gradient in `finish_update`; one rank needs no reduction."""

    kind_name = "no wrapper"
    loss_factor = 1.0
    is_pipeline = False  # the microbatches of a call run together
    run_call: Any = None  # runs the microbatches of a call in place of the accumulator, and returns this rank's sums
    new_planner: Any = None  # makes the planner of calls, where the wrapper splits samples by a rule of its own
    forwards_meet = False  # ranks wait for each other in every module that is called
    writes_buffers = False  # the wrapper itself writes buffers in a forward
    replaces_gradients = False  # the wrapper itself sets ``p.grad`` to other views
    shows_gathered = False  # the modules show other parameters for now, gathered from the shards
    is_held = False  # the reduction of the open update waits for `finish_update`, see `hold_reduction`
    accumulating = property(attrgetter("parameters"), doc="The parameters whose ``grad`` autograd adds to.")
    uncounted: Sequence[nn.Parameter] = ()  # parameters whose gradient other ranks count in the norm
    is_counting: bool | None = None  # the microbatch that runs: False for a dummy microbatch

    def __init__(self, model: nn.Module, ranks: DataRanks) -> None:
        self.ranks = ranks
        self.parameters = trainable(model)
        self.collective_order = CollectiveOrder()
        self.index = 0  # among the models of a list, which share one order
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        # Tensor parallelism leaves parts of sums in DTensors, on one data rank too.
        self._has_dtensors = any(map(is_dtensor, self.parameters))
        self.device = next(model.parameters()).device  # where the model expects its inputs
        self.norm_groups: list[dist.ProcessGroup] = []  # ranks with further parts of the gradient, not in a DTensor
        self._wide = WideGradients(self.parameters, None)
        self._model = model
        # Of the last walk over the model: its dicts of parameters and children, what is in them, and all parameters.
        self._empty_dicts: list[dict[str, Any]] = []
        self._filled_dicts: list[dict[str, Any]] = []
        self._members: list[object] = []
        self._walked_by = 0  # id of the wrapper; a copy walks its own model
        self._all_parameters: list[nn.Parameter] = []
        self.models = [model]  # the models that the loss calls
        refuse_float16((f"parameter {name!r}", each.dtype) for name, each in model.named_parameters())

    def note_collective(self, number: int) -> None:
        """Mix one gather or reduction into the hash that ranks compare."""
        self.collective_order.note(self.index << 32 | number)

    def meet(self, number: int) -> None:
        """Note a collective that all ranks are to begin next; `END` is the end of a microbatch.

        While a new loss runs, this sends a message between hosts, and raises `PlanError` on all ranks if they differ.
        Without it, ranks wait for each other in different collectives until the backend gives up.
        """
        if self.collective_order.is_compared:
            seen = [int(row[0]) for row in self.ranks.exchange_numbers([self.index << 32 | number])]
            if len(set(seen)) > 1:
                self.collective_order.is_compared = False
                one, other = seen[0], next(each for each in seen if each != seen[0])
                raise PlanError(
                    f"ranks call other submodules in one microbatch: some {self.describe_collective(one)}, others "
                    f"{self.describe_collective(other)}, and {self.kind_name} would wait forever; call every wrapped "
                    "submodule on all ranks, with zeros where a rank has nothing for it, or shard the root alone"
                )
        if number != END:
            self.note_collective(number)

    def describe_collective(self, number: int) -> str:
        """Return the words for a number that `meet` was given on any rank."""
        what = "reduce gradients" if number % 2 else "gather parameters"
        return "end it" if number < 0 else what

    def accumulate_in(self, wide: WideGradients) -> None:
        """Add gradients in a wider dtype. Raises `PlanError` if the wrapper would round them before."""
        self._wide = wide

    def check_unchanged(self) -> None:
        """Raise `PlanError` if parameters were frozen, unfrozen, added, replaced or cast since the constructor.

        Hooks on parameters are refused, too: they would see the gradients of single microbatches.
        """
        members = [*chain.from_iterable(map(dict.values, self._filled_dicts))]
        is_known = len(members) == len(self._members) and all(map(is_, members, self._members))
        if not is_known or any(self._empty_dicts) or self._walked_by != id(self):
            self._walk()
        every = self._all_parameters
        now = self.parameters if self.shows_gathered else list(compress(every, map(REQUIRES_GRAD, every)))
        if len(now) != len(self.parameters) or not all(map(is_, now, self.parameters)):
            raise PlanError(CHANGED)
        dtypes = list(map(DTYPE, self.parameters))
        if dtypes != self._dtypes:
            was, now = next((was, now) for was, now in zip(self._dtypes, dtypes, strict=True) if was != now)
            raise PlanError(
                f"parameters were cast from {was} to {now} since the GradientAccumulator was made; make a new one "
                "after such a change"
            )
        refuse_hooks(self.parameters)

    @property
    def is_microbatch_local(self) -> bool:
        """True if the running microbatch needs no other rank, so that it can run again in parts."""
        return self.ranks.num_all == self.ranks.degree

    def choose(self, policy: str) -> Choice:
        """Return the sync policy and its reason. Raises `PlanError` for a policy that this wrapper does not support."""
        self._refuse_sharded_policy(policy)
        if self.ranks.num_weighing == 1:
            return "last", "one rank, nothing to reduce"
        return "last", "no wrapper: every rank keeps its whole gradient, summed once per update"

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        """Surround the forward and backward of one microbatch. ``last`` is True for the last of its call.

        Raises `MegabatchError` after the last backward of a call that left a gradient unreduced.
        """
        yield

    def without_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Surround a forward with a graph that no backward follows."""
        return contextlib.nullcontext()

    def before_agreement(self, *, is_new: bool) -> None:
        """Prepare for the message by which ranks agree on a call.

        ``is_new`` is True for a loss that no call had before, and whose microbatches run one by one.
        """

    def begin_call(self, policy: str) -> None:
        """Prepare for the microbatches of a call. ``loss_factor`` is then the same for all of them. Collective."""

    def hold_reduction(self, policy: str) -> None:
        """Reduce the open update once in `finish_update`, however many calls it has. `discard` takes this back.

        Call this before each call. A wrapper or a policy that cannot hold a reduction back does nothing: it then
        reduces as often as without, to the same gradient.
        """

    def reshard(self) -> None:
        """Free parameters that a forward without a backward has left gathered."""

    def finish_update(self) -> None:
        """Sum the gradients over ranks, after the last call of an update."""
        if self.ranks.is_alone and not self._has_dtensors:
            return
        from megabatch.wrappers.rank_sums import sum_gradients

        with torch.no_grad():
            sum_gradients(self.parameters, self.ranks, self._wide)

    def discard(self) -> None:
        """Drop the state outside of ``p.grad`` that an update which failed half-way has left."""

    def _walk(self) -> None:
        """Note the members of every module. The next check then reads these dicts, and no module."""
        dicts = [*chain.from_iterable(map(members_of_module, self._model.modules()))]
        self._empty_dicts, self._filled_dicts = [each for each in dicts if not each], list(filter(None, dicts))
        self._members = [*chain.from_iterable(map(dict.values, self._filled_dicts))]
        self._all_parameters, self._walked_by = list(self._model.parameters()), id(self)

    def _refuse_sharded_policy(self, policy: str) -> None:
        if policy == "replica_last":
            raise PlanError(
                f"sync is 'replica_last', which is for HSDP, and the model has {self.kind_name}; leave sync out, or "
                "shard with fully_shard over a mesh of two axes (dp_replicate, dp_shard)"
            )
        if policy == "gather_once":
            raise PlanError(
                f"sync is {policy!r}, which is for FSDP2, and the model has {self.kind_name}; leave sync out, or "
                "shard with fully_shard"
            )


def policies_of_call(policy: str, num_microbatches: int) -> list[str]:
    """Return the policy of each microbatch of a call. Under "every:K" it is "every" for each K-th, and else "last"."""
    name, _, period = policy.partition(":")
    if not period:
        return [policy] * num_microbatches
    return ["last" if number % int(period) else name for number in range(1, num_microbatches + 1)]


class SelfWrapped(nn.Module, ABC):
    """A model that makes its own wrapper, since its modules need more than the wrapper of each."""

    @abstractmethod
    def make_wrapper(self, mesh: DeviceMesh | None) -> Wrapper:
        """Return the wrapper that sums the gradients. Raises `PlanError` for a mesh that is not the model's."""


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def refuse_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Raise `PlanError` for a hook on a parameter's gradient that belongs neither to torch's wrappers nor to ours."""
    for parameter in compress(parameters, map(any, map(own_of_parameter, parameters))):
        if names := foreign_hooks(parameter):
            raise PlanError(
                f"a parameter of shape {tuple(parameter.shape)} has the hook {names[0]}, which would see the "
                "gradients of single microbatches; remove it, and work on p.grad after finalize()"
            )


def stranding(error: MegabatchError) -> MegabatchError:
    """Mark an error of one rank for which other ranks may wait in a collective: it is broadcast."""
    error.strands_others = True
    return error


def foreign_hooks(parameter: nn.Parameter) -> list[str]:
    """Return the names of hooks on a parameter's gradient that belong neither to torch's wrappers nor to ours."""
    hooks = [*hooks_before_grad(parameter), *hooks_after_grad(parameter)]
    foreign = [hook for hook in hooks if not f"{home_of_hook(hook)}.".startswith(HOMES_OF_HOOKS)]
    foreign += optimizers_in_backward(parameter)
    return [repr(getattr(hook, "__qualname__", type(hook).__name__)) for hook in foreign]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, on the same memory."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
