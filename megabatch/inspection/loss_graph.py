"""Autograd's graph, from the totals of a loss to the leaves: read in the first call of a loss."""

from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from megabatch.torch_private.autograd import class_of_function, inputs_of_node
from megabatch.torch_private.operations import pytree


def graph_leaves(totals: Sequence[Tensor]) -> Generator[Tensor]:
    """Yield every leaf in the graph of the totals that carries a gradient."""
    yield from (leaf for node in graph_nodes(totals) if (leaf := _leaf(node)) is not None)


def graph_nodes(totals: Sequence[Tensor]) -> dict[Any, list[Any]]:
    """Return every node that the totals depend on, mapped to the nodes of its inputs."""
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(total).node for total in totals]
    graph: dict[Any, list[Any]] = {}
    while pending:
        node = pending.pop()
        if node not in graph:
            graph[node] = _inputs(node)
            pending += graph[node]
    return graph


def find_functions(totals: Sequence[Tensor]) -> list[Any]:
    """Return the nodes of user-written autograd functions near the totals, which return scalars or vectors."""
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(total).node for total in totals]
    visited: set[Any] = set()
    functions: list[Any] = []
    while pending:
        node = pending.pop()
        if node in visited or any(len(edge.shape) > 1 for edge in inputs_of_node(node)):
            continue
        visited.add(node)
        pending += _inputs(node)
        is_written = isinstance(node, torch.autograd.function.BackwardCFunction)
        if is_written and not f"{class_of_function(node).__module__}.".startswith(("torch.", "megabatch.")):
            functions.append(node)
    return functions


def name_of_function(node: Any) -> str:
    """Return the name of an autograd function written in Python."""
    return class_of_function(node).__name__


@torch.no_grad()
def is_linear(node: Any) -> bool | None:
    """Return True if the backward of a function uses the gradient that it is given. None if it returns only zeros.

    The backward runs for two scales of the gradient, which uses up its graph.
    """
    # Powers of two scale without rounding, so equal results mean that the scale was ignored.
    results: list[list[Tensor]] = []
    for scale in (2.0, 0.5):
        gradients = [
            torch.full(edge.shape, scale, dtype=edge.dtype, device=edge.device) for edge in inputs_of_node(node)
        ]
        # The first backward has freed the saved tensors.
        try:
            back = node.apply(*gradients)
        except Exception:
            return True
        leaves = pytree.tree_leaves(back)
        results.append([leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)])
    pairs = list(zip(*results, strict=True))
    if not any(bool(doubled.any()) for doubled, _ in pairs):
        return None
    return not any(bool(doubled.any()) and torch.equal(doubled, halved) for doubled, halved in pairs)


def find_functions_beside(totals: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[str]:
    """Return the names of Python autograd functions that a backward for ``wanted`` alone does not run."""
    graph, ids = graph_nodes(totals), set(map(id, wanted))
    # Autograd's graph points from outputs to inputs; this is the other direction.
    users: dict[Any, list[Any]] = {}
    for node, inputs in graph.items():
        for edge in inputs:
            users.setdefault(edge, []).append(node)
    pending = [node for node in graph if id(_leaf(node)) in ids]
    reached = set(pending)
    while pending:
        new = set(users.get(pending.pop(), ())) - reached
        reached |= new
        pending.extend(new)
    beside: set[Any] = graph.keys() - reached
    return sorted(type(node).__name__ for node in beside if isinstance(node, torch.autograd.function.BackwardCFunction))


def _inputs(node: Any) -> list[Any]:
    return [before for before, _ in node.next_functions if before is not None]


def _leaf(node: Any) -> Tensor | None:
    return getattr(node, "variable", None)
