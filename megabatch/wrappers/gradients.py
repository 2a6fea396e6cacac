"""The gradients in ``p.grad``: their dtype, and drop, scale, norm and clip over plain tensors and DTensors alike.

float16 is refused. The functions at the end follow autograd's graph from a loss to the leaves.
"""

import contextlib
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megabatch.errors import PlanError
from megabatch.losses.contract import accumulation_dtype
from megabatch.torch_private import class_of_function, inputs_of_node, is_dtensor, multiply_all

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
UNDERFLOW = "dividing the loss by the update's weight before backward underflows in float16; use bfloat16"


class WideGradients:
    """Adds gradients in a wider dtype than the parameters', and hands them to the optimizer in the parameters'.

    Between `begin` and `finish` every ``p.grad`` is of that dtype: a backward's own gradient is widened and freed
    parameter by parameter, and what follows is added to it in place. Without a parameter to widen nothing is done.
    FSDP2 is told to hand over what it has reduced in that dtype too; autograd hands over the parameter's.

    Args:
        parameters: Those that are trained; plain, or the shards of FSDP2.
        dtype: What to add in. None: each parameter's own.

    Raises `PlanError` for a dtype that is coarser than a parameter's.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self._widened = [each for each in parameters if dtype is not None and each.dtype != dtype]
        self._hooks: list[RemovableHandle] = []
        refuse_float16([("accumulate_dtype", dtype)])
        for parameter in self._widened:
            _require_wider(dtype, parameter.dtype)

    @property
    def widens(self) -> bool:
        """Whether there is any gradient to widen."""
        return bool(self._widened)

    def begin(self) -> None:
        """Before the first microbatch of an update, when no ``p.grad`` is left of the last."""
        self.discard()
        method = weakref.WeakMethod(self._widen)

        def widen(parameter: Tensor) -> None:
            if (alive := method()) is not None:  # an accumulator that is gone widens nothing
                alive(parameter)

        for parameter in self._widened:
            # It stays: a dtype written here would outlive model.float(), and None is what any gradient fits.
            cast(Any, parameter).grad_dtype = None
            self._hooks.append(parameter.register_post_accumulate_grad_hook(widen))

    def finish(self) -> None:
        """When nothing more is done to the gradients: ``p.grad`` is of the parameter's dtype again, rounded once."""
        self.discard()
        for parameter in self._widened:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    def discard(self) -> None:
        """Let go of the update, done or abandoned."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype of the parameter's gradient while an update is open."""
        return parameter.dtype if self.dtype is None else self.dtype

    def _widen(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype != self.dtype:
            parameter.grad = parameter.grad.to(self.dtype)


def check_reduction(
    wide: WideGradients, parameters: Sequence[nn.Parameter], dtypes: Iterable[torch.dtype | None]
) -> None:
    """Refuse a wrapper of ``parameters`` that sums in a coarser dtype than ``wide`` does; None is the parameter's."""
    own = [parameter.dtype for parameter in parameters]
    for used in {each or mine for each in dtypes for mine in own} if wide.widens else ():
        if torch.finfo(used).eps > torch.finfo(wide.dtype or used).eps:
            raise PlanError(
                f"accumulate_dtype is {wide.dtype} but FSDP2 reduces gradients in {used}; "
                f"give MixedPrecisionPolicy(reduce_dtype={wide.dtype})"
            )


def refuse_float16(dtypes: Iterable[tuple[str, torch.dtype | None]]) -> None:
    """Refuse what computes in float16, of ``(what it is, its dtype)``."""
    for what, dtype in dtypes:
        if dtype == torch.float16:
            raise PlanError(f"{what} is torch.float16; {UNDERFLOW}")


@contextlib.contextmanager
def no_float16_autocast(models: Sequence[nn.Module]) -> Generator[None]:
    """While it is open, a forward of ``models`` under an autocast to float16 is refused."""

    def look(*_: object) -> None:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                refuse_float16([("what torch.autocast computes in", torch.get_autocast_dtype(device))])

    hooks = [each.register_forward_pre_hook(look) for each in models]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _require_wider(dtype: torch.dtype | None, own: torch.dtype) -> None:
    if dtype is None or not dtype.is_floating_point or torch.finfo(dtype).eps > torch.finfo(own).eps:
        raise PlanError(
            f"accumulate_dtype is {dtype}, coarser than parameters in {own}; leave it out, or give a finer one"
        )


def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set every ``p.grad`` to None."""
    for parameter in parameters:
        parameter.grad = None


def separate_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give every gradient memory of its own: what is done to one in place would else be done to another.

    Autograd hands two parameters one tensor where a model uses their sum: ``x + (pos[None] + kind[None])``.
    """
    starts: set[int] = set()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            continue
        own = gradient.to_local() if type(gradient) is not Tensor and is_dtensor(gradient) else gradient
        start = own.data_ptr()
        if start in starts:
            parameter.grad = gradient.clone()
        elif start:
            starts.add(start)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient by ``factor``, in one pass."""
    for group in _groups(parameters):
        own = factor
        if isinstance(factor, Tensor):  # foreach takes a scalar of its own precision; float64 is for float64 alone
            is_double = group[0].dtype in (torch.float64, torch.complex128)
            own = factor.to(group[0].device, torch.float64 if is_double else torch.float32)
        multiply_all(group, own)


def total_norm(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """2-norm over the gradients of all parameters, over all shards: a scalar on the device.

    ``groups`` are of ranks that hold further parts of the gradient, which no DTensor tells of.
    """
    norms = [_full(torch.nn.utils.get_total_norm(list(map(_values, group)))) for group in _groups(parameters)]
    if not norms and not groups:
        return torch.zeros((), device=parameters[0].device)
    if not norms:
        norms = [torch.zeros((), dtype=parameters[0].dtype, device=parameters[0].device)]
    if len(norms) == 1 and not groups:
        return norms[0]
    dtype = accumulation_dtype(norms[0].device)  # one for all ranks, whatever their parameters are
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device, dtype) for each in norms]))
    for group in groups:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    return norm


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float,
    factor: float | Tensor | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Multiply every gradient by ``factor``, then clip to ``max_norm``, in one pass; returns the norm in between.

    Clipping follows torch: ``g * min(1, max_norm / (norm + 1e-6))``. ``groups`` as in `total_norm`.
    """
    norm = total_norm(parameters, groups)
    if factor is None:
        coefficient = torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0)
    else:
        norm = norm * factor
        coefficient = torch.clamp(max_norm / (norm + CLIP_EPSILON), max=1.0) * factor
    scale_gradients(parameters, coefficient)
    return norm


def _groups(parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """Gradients that one foreach call can take: of one kind and dtype, on one device and mesh."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if is_dtensor(gradient) else None
            groups.setdefault((mesh, gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())


def _values(gradient: Tensor) -> Tensor:
    """What is not zero in a sparse gradient, each element once; a dense one as it is."""
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm


def graph_leaves(totals: Sequence[Tensor]) -> Generator[Tensor]:
    """Every leaf that carries a gradient and that a total depends on, as far as the graph tells."""
    for node in _graph(totals):
        if (leaf := _leaf(node)) is not None:
            yield leaf


def find_functions(totals: Sequence[Tensor]) -> list[Any]:
    """Nodes of the user's own functions that return scalars or vectors, as losses do, on the way to totals."""
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(total).node for total in totals]
    seen: set[Any] = set()
    found: list[Any] = []
    while pending:
        node = pending.pop()
        if node in seen or any(len(each.shape) > 1 for each in inputs_of_node(node)):
            continue
        seen.add(node)
        pending.extend(before for before, _ in node.next_functions if before is not None)
        is_written = isinstance(node, torch.autograd.function.BackwardCFunction)
        home = class_of_function(node).__module__ if is_written else "torch"
        if home.partition(".")[0] not in ("torch", "megabatch"):
            found.append(node)
    return found


def name_of_function(node: Any) -> str:
    """The name of a function written in Python."""
    return class_of_function(node).__name__


@torch.no_grad()
def is_linear(node: Any) -> bool | None:
    """Whether the backward of a function looks at the gradient that it is given; None where it gives nothing.

    It runs for twice and for half of a gradient, so that its graph is used up.
    """
    found: list[list[Tensor]] = []
    for scale in (2.0, 0.5):
        given = [torch.full(each.shape, scale, dtype=each.dtype, device=each.device) for each in inputs_of_node(node)]
        try:
            back = node.apply(*given)
        except Exception:  # a second backward that the first has left nothing to
            return True
        tensors = [back] if isinstance(back, Tensor) else [each for each in back if isinstance(each, Tensor)]
        found.append([each.detach().clone() for each in tensors])
    moved = [(one, other) for one, other in zip(*found, strict=True) if bool(one.any())]
    return not any(torch.equal(one, other) for one, other in moved) if moved else None


def find_functions_beside(totals: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[str]:
    """Names of the functions written in Python that a backward for ``wanted`` alone does not come to."""
    graph, ids = _graph(totals), set(map(id, wanted))
    users: dict[Any, list[Any]] = {}
    for node, inputs in graph.items():
        for each in inputs:
            users.setdefault(each, []).append(node)
    pending = [node for node in graph if id(_leaf(node)) in ids]
    reached = set(pending)
    while pending:
        new = set(users.get(pending.pop(), ())) - reached
        reached |= new
        pending.extend(new)
    beside: set[Any] = graph.keys() - reached
    return sorted(type(node).__name__ for node in beside if isinstance(node, torch.autograd.function.BackwardCFunction))


def _graph(totals: Sequence[Tensor]) -> dict[Any, list[Any]]:
    """Every node that totals depend on, with those of its inputs."""
    pending: list[Any] = [torch.autograd.graph.get_gradient_edge(total).node for total in totals]
    graph: dict[Any, list[Any]] = {}
    while pending:
        node = pending.pop()
        if node not in graph:
            graph[node] = [before for before, _ in node.next_functions if before is not None]
            pending.extend(graph[node])
    return graph


def _leaf(node: Any) -> Tensor | None:
    return getattr(node, "variable", None)
