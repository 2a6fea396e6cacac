"""Whose gradient it is: an open update is lost where anything but its own calls moves what they have left.

Everything here is on the host: identities and counts of writes, no numbers.
"""

import gc
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.distributed.fsdp._flat_param import FlatParameter

from megabatch import gradient
from megabatch.contract import Term, differentiable, takes_divisor
from megabatch.errors import LossContractError, MegabatchError
from megabatch.leaves import each_leaf
from megabatch.plain import PlainReducer
from megabatch.share import Share

DIVIDE = (
    "Return the sum itself, or take the divisor, loss(model, microbatch, divisor), and divide by it before that "
    "backward (see megabatch.loss)"
)


class Receipt(NamedTuple):
    """How gradients and parameters stood: what they were, and the number of writes to each."""

    parameters: Sequence[nn.Parameter]
    gradients: list[Tensor | None]
    gradient_writes: list[int]
    parameter_writes: list[int]
    are_trained: list[bool]

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> "Receipt":
        """As they stand now."""
        gradients = [each.grad for each in parameters]
        return cls(
            parameters,
            gradients,
            _num_writes([each for each in gradients if each is not None]),
            _num_writes(parameters),
            [each.requires_grad for each in parameters],
        )

    def has_same_gradients(self, now: "Receipt") -> bool:
        """Whether no gradient was replaced or written to since."""
        return all(map(operator.is_, self.gradients, now.gradients)) and self.gradient_writes == now.gradient_writes


class Ownership:
    """Holds what calls leave against what the next one finds, and what a loss reaches against what is reduced."""

    def __init__(self, reducer: PlainReducer) -> None:
        self._reducer = reducer
        self._left: Receipt | None = None
        self._tried: weakref.WeakSet[Any] = weakref.WeakSet()  # losses
        self._passing: list[weakref.ref[Tensor]] = []  # leaves that are to go with the graph of their microbatch

    def leave(self) -> None:
        """Note what a call has left. Raises `LossContractError` where the loss reached a tensor that others train."""
        passing, self._passing = self._passing, []
        if any(_is_trained(each()) for each in passing):
            gc.collect()  # a cycle keeps a graph alive
        for leaf in (each() for each in passing):
            if _is_trained(leaf):
                raise _not_the_models(cast(Tensor, leaf))
        self._left = Receipt.of(self._reducer.parameters)

    def release(self) -> None:
        """Nothing is left to be looked after."""
        self._left, self._passing = None, []

    def check(self) -> None:
        """Raise `MegabatchError` where gradients or parameters are not as the last call has left them."""
        left, self._left = self._left, None
        if left is None:
            return
        now = Receipt.of(self._reducer.parameters)
        what = None
        if left.are_trained != now.are_trained:
            what = "parameters were frozen or unfrozen"
        elif left.parameter_writes != now.parameter_writes:
            what = "parameters were written to, as optimizer.step() does,"
        elif not left.has_same_gradients(now):
            what = "gradients were dropped, replaced or written to, as zero_grad() and another accumulator do,"
        if what is not None:
            raise MegabatchError(
                f"{what} between two calls of an update, which is lost; an update is open from its first "
                "forward_backward() to finalize(), so do that before or after, or discard() the update"
            )
        self._left = left

    def is_new(self, loss_fn: object) -> bool:
        """Whether a loss was not tried yet."""
        return identity_of(loss_fn) not in self._tried

    def receipt(self, loss_fn: object) -> Receipt | None:
        """What to hold a loss against that runs for the first time; None for any other."""
        return Receipt.of(self._reducer.accumulating) if self.is_new(loss_fn) else None

    def check_loss(self, loss_fn: object, before: Receipt, terms: Mapping[str, Term], share: Share) -> None:
        """Raise `LossContractError` for a loss whose gradient is not what autograd gives of its total.

        After the first forward of a loss, before its backward; ``loss_fn`` is None for the body of an open loop.
        """
        totals = [terms[name].total for name in differentiable(terms)]
        is_divided = loss_fn is not None and takes_divisor(cast(Any, loss_fn))
        if not is_divided:
            if self._has_moved(before):
                raise LossContractError(f"gradients changed while the loss ran: it runs its own backward. {DIVIDE}")
            if (name := gradient.unscaled_function(totals)) is not None:
                raise LossContractError(
                    f"the backward of {name} gives the same gradient whatever its total is multiplied by. {DIVIDE}"
                )
        known, reached = set(map(id, self._reducer.accumulating)), list(gradient.leaves(totals))
        is_own = any(id(leaf) in known or isinstance(leaf, FlatParameter) for leaf in reached)
        if is_divided and not is_own and not self._has_moved(before):
            raise LossContractError(
                "the totals of the loss do not depend on a parameter of the model; compute them from its output, "
                "undetached"
            )
        for leaf in reached:
            if id(leaf) in known or isinstance(leaf, FlatParameter):
                continue
            if isinstance(leaf, nn.Parameter):
                raise _not_the_models(leaf)
            if not _holds(share, leaf):
                self._passing.append(weakref.ref(leaf))
        if loss_fn is not None:
            self._tried.add(identity_of(loss_fn))

    def _has_moved(self, before: Receipt) -> bool:
        """Whether a gradient came or changed; FSDP2 makes some parameters in the first forward."""
        made = set(map(id, self._reducer.accumulating)) - set(map(id, before.parameters))
        new = any(each.grad is not None for each in self._reducer.accumulating if id(each) in made)
        return new or not before.has_same_gradients(Receipt.of(before.parameters))


def _not_the_models(leaf: Tensor) -> LossContractError:
    return LossContractError(
        f"the loss reaches a trainable tensor of shape {tuple(leaf.shape)} that is not the model's, whose gradient "
        "nobody would drop, divide or reduce; give [model, head] with the module that holds it, and the loss gets that "
        "list, or freeze it"
    )


def _is_trained(leaf: Tensor | None) -> bool:
    return leaf is not None and leaf.grad is not None


def _holds(share: Share, leaf: Tensor) -> bool:
    """Whether a leaf is the user's batch's own, as inputs are that carry a gradient."""
    found = False

    def look(each: Any) -> Any:
        nonlocal found
        found = found or each is leaf
        return each

    each_leaf([share.samples.held(), share.collated], look)
    return found


def identity_of(loss_fn: Any) -> Any:
    """What stays of a loss from call to call: a method is made anew wherever it is asked for."""
    found: Any = getattr(loss_fn, "__func__", loss_fn)
    try:
        hash(found)
        weakref.ref(found)
    except TypeError:
        return cast(Callable[..., Any], type(found))
    return found


def _num_writes(tensors: Sequence[Tensor]) -> list[int]:
    try:
        return [each._version for each in tensors]
    except RuntimeError:  # one that was made in inference mode counts none
        return [0 if each.is_inference() else each._version for each in tensors]
