"""Layers as torch.compile runs them, on fake tensors: what they keep for the backward, and kernels that are fused.

AOTAutograd traces a layer, and the partitioner of torch.compile (min cut) decides which tensors are kept and which are
computed again. No kernel is made. Pointwise operations, reductions and copies fuse as far as they can: those with no
other operation between them, such as a matrix product, are one kernel. It reads what others have written and writes
what others need. The compiler fuses less than that at times. A layer that torch.compile would cut into several graphs
is traced as one, or refused.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from megabatch.errors import PlanError, in_one_line
from megabatch.simulate.devices import tensors_in
from megabatch.simulate.ledger import Ledger
from megabatch.torch_private.autograd import is_in_backward
from megabatch.torch_private.operations import NEEDS_DATA, packet_of, partitioned, pytree, without_modes

aten = torch.ops.aten
FUSED = {  # operations that are part of a kernel, besides pointwise ones
    aten.sum, aten.mean, aten.amax, aten.amin, aten.var, aten.var_mean, aten.cat, aten.clone, aten.copy, aten.full,
    aten.slice_scatter, aten.select_scatter, aten.constant_pad_nd,
}  # fmt: skip
RECOMPUTES = "forward_with_checkpointing"  # of transformers, around the forward of a layer
Weights = tuple[dict[str, Tensor], dict[str, Tensor]]  # parameters and buffers of a layer, by name


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Let `simulate` run layers as compiled ones. They are alike but for their weights, and share graphs."""
    graphs = LayerGraphs(layers[0])
    for layer in layers:
        layer.forward = CompiledForward(layer, graphs)


class CompiledForward:
    """The forward of a layer, by the graphs of its kind."""

    def __init__(self, layer: nn.Module, graphs: "LayerGraphs") -> None:
        self._layer: Any = layer
        self.graphs = graphs

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self._layer.training and getattr(self._layer, "gradient_checkpointing", False):  # a layer of transformers
            return self._layer._gradient_checkpointing_func(partial(self._run, **named), *args)
        return self._run(*args, **named)

    def _run(self, *args: Any, **named: Any) -> Any:
        weights = dict(self._layer.named_parameters()), dict(self._layer.named_buffers())
        return self.graphs.run(weights, args, named)


class LayerGraphs:
    """Graphs of one kind of layer, by the kinds of its inputs."""

    ledger: Ledger | None = None  # counts memory and work
    num_results = 0  # of a forward

    def __init__(self, layer: nn.Module) -> None:
        self._plain = _Plain(layer)
        self._traced: dict[object, Any] = {}

    def run(self, weights: Weights, args: Any, named: Any) -> Any:
        """Run the graphs for these inputs. They are traced once."""
        values, structure = pytree.tree_flatten((args, named))
        tensors = [value for value in values if isinstance(value, Tensor)]
        inputs = (*values, *(weight for part in weights for weight in part.values()))
        key = (
            str(structure), *map(_kind, inputs),
            torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
        )  # fmt: skip
        if key not in self._traced:
            self._traced[key] = self._trace(values, structure, weights, tensors)
        return self._traced[key](weights, tensors)

    def _trace(self, values: list[Any], structure: Any, weights: Weights, tensors: list[Tensor]) -> Any:
        constants = [None if isinstance(value, Tensor) else value for value in values]
        places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]

        def call(weights: Weights, tensors: list[Tensor]) -> Any:
            filled = list(constants)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            args, named = pytree.tree_unflatten(filled, structure)
            layer_weights = tuple({f"layer.{name}": weight for name, weight in part.items()} for part in weights)
            results = torch.func.functional_call(self._plain, layer_weights, args, named)
            self.num_results = len(pytree.tree_leaves(results))
            return results

        traced = partitioned(call, partial(_FusedForward, self), partial(_FusedGraph, self))
        try:
            with without_modes(), saved_tensors_hooks(_same, _same):  # the first call traces, and keeps its inputs
                traced(*pytree.tree_map_only(Tensor, _like, (weights, tensors)))
        except NEEDS_DATA:
            raise
        except Exception as error:  # whatever a tracer raises
            raise PlanError(
                f"a {type(self._plain.layer).__name__} cannot be traced as one graph ({in_one_line(error)}), so that "
                "what a compiler fuses cannot be simulated; leave compile out"
            ) from error
        return traced


class _Plain(nn.Module):
    """A layer by its own forward, without the hooks that others have put on it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, compute = layer, type(layer).forward
        while compute.__code__.co_name == RECOMPUTES:
            compute = cast(Any, compute).__wrapped__
        self._compute = compute

    def forward(self, *args: Any, **named: Any) -> Any:
        return self._compute(self.layer, *args, **named)


class Kernels(NamedTuple):
    """The fused kernels of a graph."""

    written: dict[fx.Node, bool]  # by fused operation: true if its result is in memory
    num_bytes: int  # that all kernels read and write
    num: int


def find_kernels(graph: fx.Graph) -> Kernels:
    """Return the kernels that fuse the operations of a graph."""
    source: dict[fx.Node, fx.Node] = {}  # of a view: what it is a view of
    depth: dict[fx.Node, int] = {}  # operations that are no part of a kernel, on the longest way to a node
    users: dict[fx.Node, list[fx.Node]] = {}
    read: set[tuple[int, fx.Node]] = set()
    kernel_of: dict[fx.Node, fx.Node] = {}

    def first_of(node: fx.Node) -> fx.Node:
        while kernel_of[node] is not node:
            node = kernel_of[node]
        return node

    for node in graph.nodes:
        inputs = [source[input_node] for input_node in node.all_input_nodes]
        depth[node] = max((depth[input_node] + _ends_kernel(input_node) for input_node in inputs), default=0)
        source[node] = inputs[0] if _is_view(node) and inputs else node
        if source[node] is not node:
            continue
        for input_node in inputs:
            users.setdefault(input_node, []).append(node)
        if not _is_fused(node):
            continue
        kernel_of[node] = node
        for input_node in inputs:
            if input_node in kernel_of and depth[input_node] == depth[node]:
                kernel_of[first_of(input_node)] = first_of(node)
            else:
                read.add((depth[node], input_node))
    written = {
        node: any(user not in kernel_of or depth[user] != depth[node] for user in users.get(node, ()))
        for node in kernel_of
    }
    results = [node for node, is_written in written.items() if is_written]
    moved = [*(node for _, node in read), *results]
    num_bytes = sum(map(_bytes_of, moved))
    return Kernels(written, num_bytes, sum(first is node for node, first in kernel_of.items()))


class _FusedGraph(fx.Interpreter):
    """Runs a graph. What is only inside of a kernel takes no memory."""

    _boxed_call = True  # it empties the list of its arguments

    def __init__(self, owner: LayerGraphs, module: fx.GraphModule, _: Sequence[Any]) -> None:
        super().__init__(module)
        self._owner, self._kernels = owner, find_kernels(module.graph)

    def __call__(self, args: list[Any]) -> Any:
        if self._owner.ledger is not None:
            self._owner.ledger.add_kernels(self._kernels.num, self._kernels.num_bytes)
        try:
            return self.boxed_run(args)
        finally:
            self.env = {}  # it would keep the results

    def run_node(self, n: fx.Node) -> Any:
        is_written, ledger = self._kernels.written.get(n), self._owner.ledger
        if is_written is None or ledger is None:
            return super().run_node(n)
        with ledger.in_kernel(is_written=is_written):
            return super().run_node(n)


class _FusedForward(_FusedGraph):
    """Runs the graph of a forward. One that is run again in a backward computes only what is kept."""

    def __init__(self, owner: LayerGraphs, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(owner, module, inputs)
        (*_, output) = module.graph.nodes
        results = output.args[0][owner.num_results :]
        waiting = [result for result in results if isinstance(result, fx.Node)]
        self._needed: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node not in self._needed:
                self._needed.add(node)
                waiting += node.all_input_nodes

    def run_node(self, n: fx.Node) -> Any:
        ledger = self._owner.ledger
        if n.op != "call_function" or n in self._needed or ledger is None or not is_in_backward():
            return super().run_node(n)
        with ledger.muted():
            return super().run_node(n)


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "is_view", True)  # or an element of a tuple


def _is_fused(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", None)  # of an operation
    return tags is not None and (torch.Tag.pointwise in tags or packet_of(node.target) in FUSED)


def _ends_kernel(node: fx.Node) -> bool:
    return node.op == "call_function" and not _is_view(node) and not _is_fused(node)


def _bytes_of(node: fx.Node) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((node.meta.get("val"),)))


def _kind(value: Any) -> object:
    """Return what a graph depends on of an input."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if isinstance(value, int | float | str | bool | None) else id(value)


def _like(tensor: Tensor) -> Tensor:
    return tensor.new_empty_strided(tensor.shape, tensor.stride()).requires_grad_(tensor.requires_grad)


def _same(tensor: Tensor) -> Tensor:
    return tensor
