"""The base class of wrappers, which also serves a model without one on a single rank.

A `Wrapper` object is the interface through which the library uses DDP, FSDP and the like. Its ``loss_factor`` undoes
the wrapper's own division. Gradients are therefore sums over data and context ranks, under every sync policy.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from itertools import chain, compress, filterfalse
from operator import attrgetter, is_, ne
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megabatch.core.gradients import Gradients, refuse_float16
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
# A policy, "last", "every", "every:K", "gather_once" or "replica_last", and the reason for it.
Choice = tuple[str, str]
CHANGED = (
    "parameters were frozen, unfrozen, added or replaced since the GradientAccumulator was made; make a new one "
    "(and wrap the model anew) after such a change"
)


class Wrapper:
    """Knows how the gradients of a model are summed over ranks, and when. One rank needs no reduction.

    Attributes:
        kind_name: Name of the wrapper in errors.
        loss_factor: Factor of every total, the number of ranks where the wrapper averages over them.
        is_pipeline: True if the microbatches of a call run together.
        run_call: Runs the microbatches of a call in place of the accumulator, and returns this rank's sums.
        new_planner: Makes the planner of calls, where the wrapper splits samples by a rule of its own.
        forwards_meet: True if ranks wait for each other in every module that is called.
        writes_buffers: True if the wrapper itself writes buffers in a forward.
        replaces_gradients: True if the wrapper itself sets ``p.grad`` to other views.
        shows_gathered: True while the modules show other parameters, gathered from the shards.
        is_held: True while the reduction of the open update waits for `finish_update`, see `hold_reduction`.
        uncounted: Parameters whose gradient other ranks count in the norm.
        wants_comparison: True if this rank has a new loss, whose collectives ranks are to compare.
        collectives_digest: Hash of the collectives of the update in their order, which ranks compare.
        is_counting: True while a microbatch runs, False while a dummy microbatch runs, else None.
        parameters: The trained parameters.
        device: Where the model expects its inputs.
        norm_groups: Groups of ranks with further parts of the gradient that no DTensor describes.
        models: The models that the loss calls.
    """

    kind_name = "no wrapper"
    loss_factor = 1.0
    is_pipeline = False
    run_call: Any = None
    new_planner: Any = None
    forwards_meet = False
    writes_buffers = False
    replaces_gradients = False
    shows_gathered = False
    is_held = False
    accumulating = property(attrgetter("parameters"), doc="The parameters whose ``grad`` autograd adds to.")
    uncounted: Sequence[nn.Parameter] = ()
    wants_comparison = False
    collectives_digest = 0
    is_counting: bool | None = None

    def __init__(self, model: nn.Module, ranks: DataRanks) -> None:
        self.ranks = ranks
        self.parameters = trainable(model)
        self._dtypes = [parameter.dtype for parameter in self.parameters]
        self.device = next(model.parameters()).device
        self.norm_groups: list[dist.ProcessGroup] = []
        self._wide = Gradients()
        self._model = model
        # Of the last walk over the model: its dicts of parameters and children, what is in them, and all parameters.
        self._empty_dicts: list[dict[str, Any]] = []
        self._filled_dicts: list[dict[str, Any]] = []
        self._members: list[object] = []
        # Id of the wrapper that walked. A copy has another, and walks its own model.
        self._walked_by = 0
        self._all_parameters: list[nn.Parameter] = []
        self.models = [model]
        named = model.named_parameters()
        refuse_float16((f"parameter {name!r}", parameter.dtype) for name, parameter in named)

    def accumulate_in(self, wide: Gradients) -> None:
        """Add gradients in a wider dtype. Raises `PlanError` if the wrapper would round them before."""
        self._wide = wide

    def check_unchanged(self) -> None:
        """Raise `PlanError` if parameters were frozen, unfrozen, added, replaced or cast since the constructor.

        Hooks on parameters are refused, too: they would see the gradients of single microbatches.
        """
        members = [*chain.from_iterable(map(dict.values, self._filled_dicts))]
        is_known = self._walked_by == id(self) and _are_same(members, self._members)
        if not is_known or any(self._empty_dicts):
            self._walk()
        trained = list(compress(self._all_parameters, map(REQUIRES_GRAD, self._all_parameters)))
        if not self.shows_gathered and not _are_same(trained, self.parameters):
            raise PlanError(CHANGED)
        dtypes = list(map(DTYPE, self.parameters))
        if dtypes != self._dtypes:
            changed = list(map(ne, self._dtypes, dtypes)).index(True)
            raise PlanError(
                f"parameters were cast from {self._dtypes[changed]} to {dtypes[changed]} since the "
                "GradientAccumulator was made; make a new one after such a change"
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

    def surround_call(self, agreement: Any) -> contextlib.AbstractContextManager[None]:
        """Surround the microbatches of a call on which the ranks have agreed."""
        return contextlib.nullcontext()

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
        """Reduce what is not reduced yet, after the last call of an update."""

    def discard(self) -> None:
        """Drop the state outside of ``p.grad`` that an update which failed half-way has left."""

    def _walk(self) -> None:
        """Note the members of every module. The next check then reads these dicts, and no module."""
        dicts = [*chain.from_iterable(map(members_of_module, self._model.modules()))]
        self._empty_dicts, self._filled_dicts = list(filterfalse(None, dicts)), list(filter(None, dicts))
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


def _are_same(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return True if two sequences have the same objects, in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


def policies_of_call(policy: str, num_microbatches: int) -> list[str]:
    """Return the policy of each microbatch of a call. Under "every:K" it is "every" for each K-th, and else "last"."""
    name, _, period = policy.partition(":")
    if not period:
        return [policy] * num_microbatches
    return ["last" if number % int(period) else name for number in range(1, num_microbatches + 1)]


class SelfWrapped(nn.Module, ABC):
    """A model that makes its own wrapper, since its modules need more than the wrapper of each."""

    @abstractmethod
    def make_wrapper(self, mesh: DeviceMesh | None, wrap_stages: Callable[..., Wrapper]) -> Wrapper:
        """Return the wrapper that sums the gradients. Raises `PlanError` for a mesh that is not the model's.

        ``wrap_stages(self, mesh)`` makes it of the model's ``stages``, over the mesh of the ranks that hold the same.
        """


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient."""
    return list(filter(REQUIRES_GRAD, model.parameters()))


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
