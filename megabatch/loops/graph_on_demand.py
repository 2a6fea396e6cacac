"""Forwards of a call without a backward: without a graph, and with one for a loss that takes derivatives."""

import contextlib
import copy
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from megabatch.core.gradients import drop_gradients
from megabatch.core.samples import Microbatch
from megabatch.core.wrapper import Wrapper
from megabatch.inspection import random_state
from megabatch.inspection.tree import each_leaf


class GraphOnDemand:
    """Runs functions in the forwards of a call without a backward: without a graph, unless one takes derivatives.

    Torch raises where a loss needs a graph, for forces or an inner gradient step. Its microbatch runs a second time,
    with a graph that is freed with the microbatch, and so do the later ones of the call. Gradients that the function
    leaves in parameters are dropped.

    Where ranks wait for each other in forwards, they agree in the first microbatch: all run it a second time, or none.
    """

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._needs_graph = False
        self._may_change = True

    def run(self, function: Callable[[Any, Microbatch], Any], model: Any, microbatch: Microbatch) -> Any:
        """Return what ``function(model, microbatch)`` returns, without a graph."""
        if not self._needs_graph:
            random, returned = random_state.note(self._wrapper.device), None
            try:
                # A copy, since the function may take keys out of it.
                returned = function(model, copy.copy(microbatch))
            except RuntimeError as error:
                if "grad" not in str(error) or not self._may_change:
                    raise
                self._needs_graph = True
            # After the except clause, which keeps the failed forward's tensors.
            self._agree()
            if not self._needs_graph:
                return returned
            random_state.put_back(random)
        with torch.enable_grad(), self._wrapper.without_reduction(), self._keeping_gradients():
            returned = function(model, microbatch)
        return each_leaf(returned, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)

    def _agree(self) -> None:
        """Run with a graph on all ranks if one of them needs it, where ranks wait for each other in forwards."""
        if self._wrapper.forwards_meet and self._may_change:
            answers = self._wrapper.ranks.exchange_numbers([float(self._needs_graph)])
            self._needs_graph = any(needs_graph for (needs_graph,) in answers)
            self._may_change = False

    @contextlib.contextmanager
    def _keeping_gradients(self) -> Generator[None]:
        """Put the gradients of an open update aside."""
        parameters = self._wrapper.accumulating
        gradients = [parameter.grad for parameter in parameters]
        drop_gradients(parameters)
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
