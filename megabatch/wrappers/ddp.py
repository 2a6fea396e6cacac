"""DDP: one all-reduce in the last backward of an update, which sums; further ones in the same update average.

DDP reduces the whole accumulated gradient. The mean of equal gradients is the same gradient, so it may be repeated. A
sum may not, but leaves the loss as it is: multiplied by 3 ranks, float32 parts of a float64 model round otherwise.
"""

import contextlib
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.core.gradients import Gradients, drop_gradients
from megabatch.core.mesh import DataRanks
from megabatch.core.wrapper import Choice, Wrapper, stranding, trainable
from megabatch.errors import MegabatchError, PlanError
from megabatch.torch_private.ddp_reducer import (
    broadcast_buffers,
    check_reduced,
    comm_hooks,
    is_joining,
    num_reduced,
    rebuild_buckets,
    settle_buckets,
    summing,
)
from megabatch.torch_private.operations import is_fake
from megabatch.torch_private.process_groups import num_begun
from megabatch.wrappers.rank_sums import sum_gradients, zeros_of

# torch's own hooks that average over the ranks as DDP does. The float16 hook is left out: a loss that is divided by its
# weight has small gradients, which float16 rounds to zero.
HOME_OF_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
AVERAGING_HOOKS = ("allreduce_hook", "bf16_compress_hook")
# Key in the metadata of an autograd node.
_KEPT = "megabatch: kept"


class DDPWrapper(Wrapper):
    """All-reduces in the last backward of each call, overlapping it."""

    kind_name = "DistributedDataParallel"

    def __init__(self, model: nn.Module, ddp: DistributedDataParallel, ranks: DataRanks) -> None:
        super().__init__(model, ranks)
        check_ddp_precision(ddp)
        _check_comm_hooks(ddp)
        _check_buckets(ddp, self.parameters)
        self.ddp, self._hooks = ddp, comm_hooks(ddp)
        # The next reduction is the only one of its update.
        self._sums = False
        # DDP adds in an order that depends on a gradient's place among the others, if there are more than two ranks.
        may_rebuild = not (ddp.static_graph or ddp.find_unused_parameters or is_fake(self.parameters[0]))
        self._is_settled = ranks.num_weighing < 3 or not may_rebuild
        self._first_of_static_graph = bool(ddp.static_graph)
        self._went_through_ddp = False
        # While DDP prepares its forward, the model's has not begun.
        self._is_reducing = self._is_preparing = False
        # DDP's buckets are too narrow for the gradients, which stay on their rank until the update ends.
        self._is_local = False
        ddp.register_forward_pre_hook(_noting(self._note_forward))
        ddp.module.register_forward_pre_hook(_noting(self._note_inside))

    def accumulate_in(self, wide: Gradients) -> None:
        """Add gradients in a wider dtype. DDP's buckets have the parameters' dtype, so `finish_update` sums here."""
        super().accumulate_in(wide)
        if not wide.widens:
            return
        if self.ddp.static_graph or self._hooks:
            raise PlanError(
                f"accumulate_dtype is {wide.dtype}, and DDP with static_graph=True or a communication hook cannot "
                "reduce after the last backward; leave both of these, or accumulate_dtype, out"
            )
        self._is_local = True

    @property
    def loss_factor(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The number of ranks where DDP averages. 1 where DDP, or `finish_update`, sums."""
        return 1.0 if self._sums or self._waits else float(self.ranks.num_weighing)

    @property
    def _waits(self) -> bool:
        """True if gradients stay on their rank until `finish_update` sums them."""
        return self._is_local or self.is_held

    def check_unchanged(self) -> None:
        super().check_unchanged()
        if comm_hooks(self.ddp) != self._hooks:
            _check_comm_hooks(self.ddp)
            self._hooks = comm_hooks(self.ddp)
            self.accumulate_in(self._wide)
        if is_joining(self.ddp):
            raise PlanError(
                "DDP.join() is open, in which ranks that are out of data add zeros for what they had accumulated; "
                "leave it out: ranks may have any number of samples, none too"
            )

    def _note_forward(self, *_: object) -> None:
        self._is_preparing = True
        # Without gradients, DDP prepares no reduction.
        self._went_through_ddp |= torch.is_grad_enabled()

    def _note_inside(self, *_: object) -> None:
        self._is_preparing = False

    @property
    def writes_buffers(self) -> bool:
        return self.ddp.broadcast_buffers

    @property
    def is_microbatch_local(self) -> bool:
        return not (self._is_reducing or self._is_preparing) and super().is_microbatch_local

    def choose(self, policy: str) -> Choice:
        self._refuse_sharded_policy(policy)
        if self._is_local:
            return "last", "DDP reduces in the parameters' dtype: the wider gradient is summed once per update"
        if policy == "every":
            return "every", "as asked: DDP all-reduces the whole gradient with each microbatch"
        return "last", "DDP keeps the whole gradient anyway: one all-reduce, overlapping the last backward"

    def begin_call(self, policy: str) -> None:
        """Sum if the call begins an update and reduces once. Before the first, lay the buckets out for good."""
        begins_update = all(parameter.grad is None for parameter in self.parameters)
        repeats = policy == "every" or self._first_of_static_graph
        self._sums = begins_update and not (repeats or self._hooks or is_fake(self.parameters[0]))
        if begins_update and not (self._is_settled or self._waits):
            self._settle()

    def _settle(self) -> None:
        """Give DDP the buckets that it keeps. Collective.

        DDP lays its buckets out anew after its first reduction, by the order in which gradients came. A resumed process
        would then add its first gradients in another order than the process that was never stopped.
        """
        self._is_settled = True
        sparse = _sparse_parameters(self.ddp)
        zeros = (
            (parameter, zeros_of(parameter, int(parameter in sparse), parameter.dtype))
            for parameter in reversed(self.parameters)
        )
        settle_buckets(self.ddp, zeros)
        drop_gradients(self.parameters)

    def average(self) -> None:
        """Average in the call that begins, as a model beside this one has to."""
        self._sums = False

    @contextlib.contextmanager
    def microbatch(self, policy: str, *, last: bool) -> Generator[None]:
        # A static graph is recorded in the first backward, which must be a reducing one.
        records_graph, self._first_of_static_graph = self._first_of_static_graph, False
        self._is_reducing = records_graph or ((last or policy == "every") and not self._waits)
        self._is_preparing = self._went_through_ddp = False
        if not self._is_reducing:
            with self.ddp.no_sync():
                yield
            return
        with summing(self.ddp) if self._sums else contextlib.nullcontext():
            yield
        self._sums = False
        if self.ddp.gradient_as_bucket_view:
            # The next forward would rebuild buckets and views. If something is unreduced, _check_reduced says so.
            with contextlib.suppress(RuntimeError):
                rebuild_buckets(self.ddp)
        if last or self._went_through_ddp:
            self._check_reduced("the last" if last else "a")

    def without_reduction(self) -> contextlib.AbstractContextManager[None]:
        # DDP would wait for the gradients of the forward.
        return self.ddp.no_sync()

    def _check_reduced(self, which: str) -> None:
        """Raise `MegabatchError`, after a backward that reduces, if DDP did not reduce every gradient."""
        if not self._went_through_ddp:
            raise stranding(
                MegabatchError(
                    "the loss did not call the DDP model with gradients on, so no gradient was reduced; call the "
                    "model that it is given, not model.module"
                )
            )
        # A bucket with a parameter that the last microbatch did not use is never reduced, without any error.
        try:
            check_reduced(self.ddp)
        except RuntimeError:
            raise stranding(
                MegabatchError(
                    "DDP left gradients unreduced: a parameter that requires a gradient was not used in "
                    f"{which} microbatch, or backward(inputs=) left it out; wrap the model anew, which DDP needs after "
                    "this, with DistributedDataParallel(..., find_unused_parameters=True)"
                )
            ) from None

    def hold_reduction(self, policy: str) -> None:
        """Keep gradients on their rank, undivided, unless a communication hook is to see them."""
        # If the first microbatch of a static graph is averaged, the sum of equal averages is still the sum.
        if policy == "last" and not self._hooks and not self._is_local:
            self.is_held = True

    def finish_update(self) -> None:
        """Sum the gradients that DDP has not reduced, being wider than its buckets or held back."""
        if self._waits:
            with torch.no_grad():
                sum_gradients(self.parameters, self.ranks, self._wide)
            # no_sync leaves buffers as they are.
            broadcast_buffers(self.ddp)
        self.release_reduction()

    def discard(self) -> None:
        self._sums = False
        self.release_reduction()

    def release_reduction(self) -> None:
        """Take `hold_reduction` back."""
        self.is_held = False


@contextlib.contextmanager
def noting_launches(ddps: Sequence[DistributedDataParallel], note: Callable[[int], None]) -> Generator[None]:
    """While it is open, call ``note`` with a model's index for each collective that it begins.

    Torch pairs the collectives of a process group by their order alone. Where ranks call models in another order,
    DDP adds the gradient of one to that of another. A model with a process group of its own is not noted.
    """
    by_group: dict[Any, dict[int, DistributedDataParallel]] = {}
    for index, ddp in enumerate(ddps):
        by_group.setdefault(ddp.process_group, {})[index] = ddp
    with contextlib.ExitStack() as stack:
        for group, numbered in by_group.items():
            if len(numbered) > 1:
                stack.enter_context(_noting_group(group, numbered, note))
        yield


@contextlib.contextmanager
def _noting_group(
    group: dist.ProcessGroup, ddps: dict[int, DistributedDataParallel], note: Callable[[int], None]
) -> Generator[None]:
    """Count what the group has begun whenever another model may begin more: what came since is the former model's."""
    try:
        num_noted = num_begun(group)
    except RuntimeError:
        # The backend of the group does not count.
        yield
        return
    running = 0

    def turn_to(index: int, *_: object) -> None:
        nonlocal running, num_noted
        now = num_begun(group)
        for _begun in range(now - num_noted):
            note(running)
        running, num_noted = index, now

    # A model broadcasts its buffers in its forward, and reduces right after a gradient was accumulated.
    with contextlib.ExitStack() as hooks:
        for index, ddp in ddps.items():
            turn = partial(turn_to, index)
            hooks.enter_context(ddp.register_forward_pre_hook(turn))
            for parameter in trainable(ddp):
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(turn))
        try:
            yield
        finally:
            turn_to(running)


def _sparse_parameters(ddp: DistributedDataParallel) -> set[Tensor]:
    """Return the parameters whose gradients DDP expects to be sparse."""
    return {
        module.weight
        for module in ddp.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def _noting(method: Callable[..., None]) -> Callable[..., None]:
    """Return the method as a hook with a weak reference, so that a copy of the module does not copy the wrapper."""
    reference = weakref.WeakMethod(method)

    def note(*_: object) -> None:
        if (alive := reference()) is not None:
            alive()

    return note


def _check_comm_hooks(ddp: DistributedDataParallel) -> None:
    """Refuse a communication hook unless it is one of torch's averaging hooks over DDP's own ranks."""
    for hook, state in comm_hooks(ddp):
        name = getattr(hook, "__name__", type(hook).__name__)
        is_known = name in AVERAGING_HOOKS and hook.__module__ == HOME_OF_HOOKS
        if not is_known or not isinstance(state, dist.ProcessGroup | None):
            raise PlanError(
                f"DDP has the communication hook {name!r}, which is not known to average over its ranks; leave it out, "
                f"or register {' or '.join(AVERAGING_HOOKS)} of {HOME_OF_HOOKS}"
            )
        reduction_group = cast(dist.ProcessGroup, ddp.process_group)
        # A state of None is the world.
        if set(dist.get_process_group_ranks(state)) != set(dist.get_process_group_ranks(reduction_group)):
            raise PlanError(
                f"DDP has the communication hook {name!r}, which reduces over other ranks than DDP does; register it "
                "with ddp.process_group as its state"
            )


def _check_buckets(ddp: DistributedDataParallel, trained: Sequence[nn.Parameter]) -> None:
    """Refuse a model whose trained parameters are not exactly those that DDP reduces. Equal numbers do not suffice."""
    if (number := num_reduced(ddp)) != len(trained):
        raise PlanError(
            f"{len(trained)} parameters require a gradient but DDP reduces {number}; freeze and unfreeze before "
            "DistributedDataParallel(model), and let it ignore none that is trained"
        )
    if not all(map(_is_reduced, trained)):
        raise PlanError(
            "a parameter that requires a gradient did not when the model was wrapped, and DDP does not reduce it; "
            "freeze and unfreeze before DistributedDataParallel(model), and let it ignore none that is trained"
        )


def _is_reduced(parameter: nn.Parameter) -> bool:
    """Return True if DDP has a hook on the node that accumulates the parameter's gradient.

    DDP does not say which parameters it was given. Its hook keeps the node alive, which otherwise ends with its graph.
    Metadata on the node therefore persists only with DDP's hook.
    """
    # A simulated model has no real DDP.
    if is_fake(parameter):
        return True
    _node_of(parameter).metadata[_KEPT] = True
    return _KEPT in _node_of(parameter).metadata


def _node_of(parameter: nn.Parameter) -> Any:
    """Return the autograd node that accumulates the parameter's gradient."""
    with torch.enable_grad():
        return cast(Any, parameter.view_as(parameter)).grad_fn.next_functions[0][0]


def check_ddp_precision(ddp: DistributedDataParallel) -> None:
    """Refuse what makes DDP reduce in another dtype than the parameter's."""
    if cast(Any, ddp).mixed_precision is not None:
        raise PlanError(
            "DDP's mixed_precision is not supported; use torch.autocast in the loss, or bfloat16 parameters"
        )
