"""Detection of foreign changes: an open update is lost if other code changes its gradients between two calls.

All checks run on the host. They compare identities and write counts of tensors, never values. The first call with a
loss also checks what that loss does.
"""

import contextlib
import gc
import operator
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

from torch import Tensor, nn

from megabatch.batching.tree import each_leaf
from megabatch.engine.guards.attached_tensors import AttachedTensors
from megabatch.engine.guards.learning_modules import LearningModules
from megabatch.errors import LossContractError, MegabatchError
from megabatch.losses.contract import Term, differentiable, takes_divisor
from megabatch.losses.loss_graph import find_functions, graph_leaves, is_linear, name_of_function
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.classes import is_flat_parameter
from megabatch.wrappers.base import REQUIRES_GRAD, Wrapper, refuse_hooks

MAX_SEARCHED = 100_000  # objects of a batch, for a tensor that the loss has made trainable
NOT_SEARCHED = (type, nn.Module, types.FunctionType, types.MethodType, types.ModuleType, types.FrameType)
GRAD = operator.attrgetter("grad")  # of many parameters in every call
Value = TypeVar("Value")
DIVIDE = (
    "Return the sum itself, or take the divisor, loss(model, microbatch, divisor), and divide by it before that "
    "backward (see megabatch.loss)"
)


class Receipt(NamedTuple):
    """A snapshot of gradients: the tensors, and the number of writes to each."""

    parameters: Sequence[nn.Parameter]
    gradients: list[Tensor | None]
    writes: list[int]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> "Receipt":
        """Take a snapshot of the current gradients."""
        # References keep the tensors alive, so that their identity cannot be reused.
        gradients = list(map(GRAD, parameters))
        return cls(parameters, gradients, _num_writes(gradients))

    def holds(self, accumulating: Sequence[nn.Parameter], *, exact: bool) -> bool:
        """Return True if no gradient of ``accumulating`` appeared, was replaced or written to since.

        Without ``exact``, check only which are None. FSDP2 creates some parameters in the first forward.
        """
        now = list(map(GRAD, self.parameters))
        if exact:
            are_same = all(map(operator.is_, self.gradients, now)) and self.writes == _num_writes(now)
        else:
            are_same = [gradient is None for gradient in self.gradients] == [gradient is None for gradient in now]
        if not are_same or accumulating is self.parameters:
            return are_same
        # Parameters that FSDP2 has created since the snapshot may not hold a gradient either.
        known = set(map(id, self.parameters))
        return all(parameter.grad is None for parameter in accumulating if id(parameter) not in known)


class Leftover(NamedTuple):
    """The state of gradients and parameters at the end of a call."""

    gradients: Receipt
    parameter_writes: list[int]
    are_trained: list[bool]


class ByLoss(Generic[Value]):
    """Values by loss, kept as long as the loss lives, or its object if the loss is a method.

    A loss that cannot be a weak key keeps no value.
    """

    def __init__(self) -> None:
        self._found: weakref.WeakKeyDictionary[Any, dict[Any, Value]] = weakref.WeakKeyDictionary()

    def get(self, loss_fn: Any) -> Value | None:
        with contextlib.suppress(TypeError):  # it cannot be a key
            return self._found.get(getattr(loss_fn, "__self__", loss_fn), {}).get(getattr(loss_fn, "__func__", None))
        return None

    def set(self, loss_fn: Any, value: Value) -> None:
        with contextlib.suppress(TypeError):
            values = self._found.setdefault(getattr(loss_fn, "__self__", loss_fn), {})
            values[getattr(loss_fn, "__func__", None)] = value


class Ownership:
    """Checks that gradients stay unchanged between calls, and that a loss trains only tensors that are reduced."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._is_exact = not wrapper.replaces_gradients
        self._left: Leftover | None = None
        self.tried: ByLoss[bool] = ByLoss()  # losses that have run a call -> whether they take the divisor
        self._scaling: set[type] = set()  # functions whose backward is known to use its gradient
        self._trying: Any = None  # the loss that this call checks; None if the check must be repeated
        self._passing: list[weakref.ref[Tensor]] = []  # unknown leaves; each must die with its microbatch's graph
        self._attached, self._learning = AttachedTensors(wrapper), LearningModules(wrapper)

    def enter(self, *, is_new: bool) -> None:
        """Forget the state after the last call, and note the state of the model before this one.

        ``is_new`` is True for the first call of a loss.
        """
        self.release()
        self._attached.note(looks_at_modules=is_new)
        if is_new:
            self._learning.note()

    def leave(self, total_factor: float = 1.0) -> None:
        """Record the state after a call. Raises `LossContractError` if the loss trains a tensor outside the model.

        ``total_factor`` is the factor of the totals that were differentiated.
        """
        self._attached.check(total_factor)
        self._learning.check()
        if self._passing:
            self._check_passing()
        if self._trying is not None:
            self.tried.set(self._trying, takes_divisor(self._trying))
            self._trying = None
        parameters = self._wrapper.parameters
        trained = list(map(REQUIRES_GRAD, parameters))
        self._left = Leftover(Receipt.of(parameters), _num_writes(parameters), trained)

    def _check_passing(self) -> None:
        passing, self._passing = self._passing, []
        # A tensor made inside the loss dies with its graph; one that lives on belongs to somebody.
        if any(_is_trained(reference()) for reference in passing):
            # Only the collector frees a graph that a cycle keeps alive.
            gc.collect()
        for leaf in (reference() for reference in passing):
            if leaf is not None and _is_trained(leaf):
                leaf.grad = None
                raise _not_the_models(leaf)

    def release(self) -> None:
        """Forget the state after the last call."""
        self._left, self._trying, self._passing = None, None, []
        self._learning.forget()

    def check(self) -> None:
        """Raise `MegabatchError` if gradients or parameters have changed since the last call."""
        snapshot, self._left = self._left, None
        if snapshot is None:
            return
        parameters, change = self._wrapper.parameters, None
        if snapshot.are_trained != list(map(REQUIRES_GRAD, parameters)):
            change = "parameters were frozen or unfrozen"
        elif self._is_exact and snapshot.parameter_writes != _num_writes(parameters):
            change = "parameters were written to, as optimizer.step() does,"
        elif not snapshot.gradients.holds(parameters, exact=self._is_exact):
            change = "gradients were dropped, replaced or written to, as zero_grad() and another accumulator do,"
        if change is not None:
            lost = MegabatchError(
                f"{change} between two calls of an update, which is lost; an update is open from its first "
                "forward_backward() to finalize(), so do that before or after, or discard() the update"
            )
            lost.loses_update = True
            raise lost
        self._left = snapshot

    def check_unmoved(self, before: Receipt) -> None:
        """Raise `LossContractError` if a loss that does not take the divisor has changed a gradient."""
        if not before.holds(self._wrapper.accumulating, exact=self._is_exact):
            raise LossContractError(f"gradients changed while the loss ran: it runs its own backward. {DIVIDE}")

    def uses_up(self, loss_fn: object, terms: Mapping[str, Term]) -> bool:
        """Check new user-written autograd functions. Return True if there were any: the check uses up the graph.

        Raises `LossContractError` for a function whose backward ignores the gradient that it is given.
        """
        functions = find_functions([terms[name].total for name in differentiable(terms)])
        # A function type is tried once: its backward is code, which does not change.
        new = [node for node in functions if type(node) not in self._scaling]
        if not new or _takes_divisor(loss_fn):
            return False
        before = Receipt.of(self._wrapper.accumulating)
        for node in new:
            looks = is_linear(node)
            if looks is False or not before.holds(self._wrapper.accumulating, exact=self._is_exact):
                raise LossContractError(
                    f"the backward of {name_of_function(node)} gives the same gradient whatever its total is "
                    f"multiplied by, or adds to gradients itself. {DIVIDE}"
                )
            # A backward that returned no gradient says nothing, so that the next call checks again.
            if looks is None and not self._wrapper.forwards_meet:
                self._trying = None
            else:  # where forwards meet, all ranks must run the same number of them
                self._scaling.add(type(node))
        return True

    def check_reach(self, loss_fn: object, before: Receipt, terms: Mapping[str, Term], inputs: object) -> None:
        """Record the trainable tensors outside of the model that a loss reaches, for `leave` to look at.

        Call this after the first forward of a loss. ``inputs`` are the microbatch and its batch, whose tensors may
        carry a gradient. Raises `LossContractError` for a loss that takes the divisor and reaches no parameter of the
        model.
        """
        # The loss may have registered a hook in its first forward.
        refuse_hooks(self._wrapper.accumulating)
        # Ids, since tensors compare by element.
        known, reached = set(map(id, self._wrapper.accumulating)), False
        for leaf in graph_leaves([terms[name].total for name in differentiable(terms)]):
            if id(leaf) in known or is_flat_parameter(leaf):
                reached = True
            elif not _holds(inputs, leaf):
                self._passing.append(weakref.ref(leaf))
        runs_none = _takes_divisor(loss_fn) and before.holds(self._wrapper.accumulating, exact=self._is_exact)
        if runs_none and not reached:
            raise LossContractError(
                "the totals of the loss do not depend on a parameter of the model; compute them from its output, "
                "undetached"
            )
        self._trying = loss_fn


def _takes_divisor(loss_fn: object) -> bool:
    return loss_fn is not None and takes_divisor(cast(Any, loss_fn))


def _not_the_models(leaf: Tensor) -> LossContractError:
    return LossContractError(
        f"the loss reaches a trainable tensor of shape {tuple(leaf.shape)} that is not the model's, whose gradient "
        "nobody would drop, divide or reduce; give [model, head] with the module that holds it, and the loss gets that "
        "list, or freeze it"
    )


def _is_trained(leaf: Tensor | None) -> bool:
    return leaf is not None and leaf.grad is not None


def _holds(inputs: object, leaf: Tensor) -> bool:
    """Return True if a leaf is one of the tensors that the loss was given, in containers of any kind.

    A parameter counts only in mappings, lists and tuples: an object may refer to a module that nobody gave.
    """
    is_among_leaves = False
    opaque: list[Any] = []

    def look(value: Any) -> Any:
        nonlocal is_among_leaves
        is_among_leaves = is_among_leaves or value is leaf
        if not isinstance(value, Tensor):
            opaque.append(value)
        return value

    each_leaf(inputs, look)
    return is_among_leaves or (not isinstance(leaf, nn.Parameter) and _is_within(opaque, leaf))


def _is_within(objects: list[Any], leaf: Tensor) -> bool:
    """Return True if objects of classes that pytree does not know, such as graphs, refer to a tensor."""
    pending, visited = objects, set[int]()
    while pending and len(visited) < MAX_SEARCHED:
        value = pending.pop()
        if value is leaf:
            return True
        if id(value) in visited or isinstance(value, NOT_SEARCHED):
            continue
        visited.add(id(value))
        pending.extend(gc.get_referents(value))
    return False


def _num_writes(tensors: Sequence[Tensor | None]) -> list[int]:
    try:
        return [count_writes(tensor) for tensor in tensors if tensor is not None]
    except RuntimeError:  # tensors made in inference mode count no writes
        return [0 if tensor.is_inference() else count_writes(tensor) for tensor in tensors if tensor is not None]
