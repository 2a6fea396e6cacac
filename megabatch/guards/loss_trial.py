"""The trial of a loss in its first call: what the loss does beside returning its terms.

A trial looks at the graph of each microbatch's totals, at the modules that learn in their forward, and at the tensors
that the loss trains. Later calls with the loss skip it.
"""

import gc
import types
import weakref
from collections.abc import Mapping
from typing import Any, TypeGuard, cast

from torch import Tensor, nn

from megabatch.core.call import MicrobatchStep
from megabatch.core.contract import ByLoss, LossFunction, Term, differentiable, takes_divisor
from megabatch.core.extension import Call
from megabatch.core.samples import Pad
from megabatch.core.wrapper import Wrapper, refuse_hooks
from megabatch.errors import LossContractError
from megabatch.guards.divided_loss import LossRun
from megabatch.guards.learning_modules import LearningModules
from megabatch.guards.padded_targets import check_totals
from megabatch.guards.receipts import DIVIDE, Receipt, check_unmoved
from megabatch.inspection import random_state
from megabatch.inspection.loss_graph import find_functions, graph_leaves, graph_nodes, is_linear, name_of_function
from megabatch.inspection.tree import each_leaf
from megabatch.torch_private.classes import is_flat_parameter

MAX_SEARCHED_OBJECTS = 100_000
NOT_SEARCHED = (type, nn.Module, types.FunctionType, types.MethodType, types.ModuleType, types.FrameType)


class NewLossTrial:
    """Checks the losses that no call had before."""

    # True from the beginning of a call with a new loss to its end.
    is_open = False

    def __init__(self, wrapper: Wrapper, padding: Pad) -> None:
        self._wrapper, self._padding = wrapper, padding
        self._is_exact = not wrapper.replaces_gradients
        # For each loss that has run a call, True if it takes the divisor.
        self.tried: ByLoss[bool] = ByLoss()
        # Functions whose backward is known to use its gradient.
        self._scaling: set[type] = set()
        # The loss that this call checks; None if the check must be repeated.
        self._trying: Any = None
        # Unknown leaves; each must die with its microbatch's graph.
        self._passing: list[weakref.ref[Tensor]] = []
        self._learning = LearningModules(wrapper)

    def begin(self) -> None:
        """Note the state of the model before a call with a new loss."""
        self.is_open = True
        self._learning.note()

    def forget(self) -> None:
        """End the trial of a call that failed."""
        self.is_open = False
        self._trying, self._passing = None, []
        self._learning.forget()

    def end(self) -> None:
        """Look at what the call has left. Raises `LossContractError` if the loss trains a tensor outside the model."""
        self._learning.check()
        self._check_passing()
        if self._trying is not None:
            self.tried.set(self._trying, takes_divisor(self._trying))
        self.is_open, self._trying = False, None

    def compute_terms(self, call: Call, step: MicrobatchStep) -> dict[str, Term]:
        """Run a loss that is new or takes the divisor, and check its side effects on gradients."""
        wrapper, loss_fn = self._wrapper, call.loss_fn
        run = LossRun(call.opened.divisors, wrapper, cast(LossFunction, loss_fn), call.model)
        if not call.is_new:
            return run.terms_of(step)
        run.check_divided(step)
        random = random_state.note(wrapper.device)
        before = Receipt.of(wrapper.accumulating)
        # The loss may pop its labels.
        microbatch_before = dict(step.microbatch) if isinstance(step.microbatch, Mapping) else {}
        terms = run.terms_of(step)
        if not call.takes_divisor:
            check_unmoved(wrapper, before)
        self._check_reach(call, before, terms, [step.microbatch, *call.given])
        totals = [term.total for term in terms.values() if term.total.requires_grad]
        check_totals(self._padding.running_lengths, microbatch_before, graph_nodes(totals))
        # The receipt would keep gradients that a wrapper frees in its backward.
        del before
        if self._uses_up(call, terms):
            random_state.put_back(random)
            terms = run.terms_of(step)
        return terms

    def _check_reach(self, call: Call, before: Receipt, terms: Mapping[str, Term], inputs: object) -> None:
        """Record the trainable tensors outside of the model that a loss reaches, for `end` to look at.

        ``inputs`` are the microbatch and its batch, whose tensors may carry a gradient. Raises `LossContractError` for
        a loss that takes the divisor and reaches no parameter of the model.
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
        runs_none = call.takes_divisor and before.holds(self._wrapper.accumulating, exact=self._is_exact)
        if runs_none and not reached:
            raise LossContractError(
                "the totals of the loss do not depend on a parameter of the model; compute them from its output, "
                "undetached"
            )
        self._trying = call.loss_fn

    def _check_passing(self) -> None:
        passing, self._passing = self._passing, []
        # A tensor made inside the loss dies with its graph; one that lives on belongs to somebody.
        if any(_is_trained(reference()) for reference in passing):
            # Only the collector frees a graph that a cycle keeps alive.
            gc.collect()
        for reference in passing:
            leaf = reference()
            if _is_trained(leaf):
                leaf.grad = None
                raise LossContractError(
                    f"the loss reaches a trainable tensor of shape {tuple(leaf.shape)} that is not the model's, whose "
                    "gradient nobody would drop, divide or reduce; give [model, head] with the module that holds it, "
                    "and the loss gets that list, or freeze it"
                )

    def _uses_up(self, call: Call, terms: Mapping[str, Term]) -> bool:
        """Check new user-written autograd functions. Return True if there were any: the check uses up the graph.

        Raises `LossContractError` for a function whose backward ignores the gradient that it is given.
        """
        functions = find_functions([terms[name].total for name in differentiable(terms)])
        # A function type is tried once: its backward is code, which does not change.
        new = [node for node in functions if type(node) not in self._scaling]
        if not new or call.takes_divisor:
            return False
        before = Receipt.of(self._wrapper.accumulating)
        for node in new:
            looks = is_linear(node)
            if looks is False or not before.holds(self._wrapper.accumulating, exact=self._is_exact):
                raise LossContractError(
                    f"the backward of {name_of_function(node)} gives the same gradient whatever its total is "
                    f"multiplied by, or adds to gradients itself. {DIVIDE}"
                )
            # A backward that returned no gradient says nothing, so that the next call checks again. Where forwards
            # meet, all ranks must run the same number of them.
            if looks is None and not self._wrapper.forwards_meet:
                self._trying = None
            else:
                self._scaling.add(type(node))
        return True


def _is_trained(leaf: Tensor | None) -> TypeGuard[Tensor]:
    return leaf is not None and leaf.grad is not None


def _holds(inputs: object, leaf: Tensor) -> bool:
    """Return True if a leaf is one of the tensors that the loss was given, in containers of any kind.

    A parameter counts only in mappings, lists and tuples: an object may refer to a module that nobody gave.
    """
    leaves: list[Any] = []

    def note(value: Any) -> Any:
        leaves.append(value)
        return value

    each_leaf(inputs, note)
    # Tensors compare by element.
    if id(leaf) in map(id, leaves):
        return True
    opaque = [value for value in leaves if not isinstance(value, Tensor)]
    return not isinstance(leaf, nn.Parameter) and _is_within(opaque, leaf)


def _is_within(objects: list[Any], leaf: Tensor) -> bool:
    """Return True if objects of classes that pytree does not know, such as graphs, refer to a tensor."""
    pending, visited = objects, set[int]()
    while pending and len(visited) < MAX_SEARCHED_OBJECTS:
        value = pending.pop()
        if value is leaf:
            return True
        if id(value) in visited or isinstance(value, NOT_SEARCHED):
            continue
        visited.add(id(value))
        pending.extend(gc.get_referents(value))
    return False
