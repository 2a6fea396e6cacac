"""The gradients in ``p.grad``: dtype, drop, scale, norm and clip, for plain tensors and DTensors.

float16 is refused. The functions at the end of the file follow autograd's graph from a loss to the leaves.
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
    """Adds gradients in a wider dtype than the parameters', and rounds them for the optimizer at the end.

    Between `begin` and `finish` every ``p.grad`` has that dtype. The first backward of a parameter creates a gradient
    in the parameter's dtype, which is widened and freed. Later backwards add to the wide gradient in place. FSDP2
    returns its reduced gradients in the wide dtype directly. Without a parameter to widen, nothing happens.

    Args:
        parameters: The trained parameters, plain or shards of FSDP2.
        dtype: The dtype to add in. None uses each parameter's own.

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
        """True if there is any gradient to widen."""
        return bool(self._widened)

    def begin(self) -> None:
        """Start to widen, before the first microbatch of an update, when every old ``p.grad`` is None."""
        self.discard()
        method = weakref.WeakMethod(self._widen)

        def widen(parameter: Tensor) -> None:
            if (alive := method()) is not None:  # a deleted accumulator widens nothing
                alive(parameter)

        for parameter in self._widened:
            # None accepts any dtype. This stays after the update; a dtype here would be wrong after model.float().
            cast(Any, parameter).grad_dtype = None
            self._hooks.append(parameter.register_post_accumulate_grad_hook(widen))

    def finish(self) -> None:
        """Round every ``p.grad`` to the parameter's dtype, once, when the gradients are complete."""
        self.discard()
        for parameter in self._widened:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(parameter.dtype)

    def discard(self) -> None:
        """Remove the hooks, after an update that was finished or abandoned."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of the parameter's gradient while an update is open."""
        return parameter.dtype if self.dtype is None else self.dtype

    def _widen(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype != self.dtype:
            parameter.grad = parameter.grad.to(self.dtype)


def check_reduction(
    wide: WideGradients, parameters: Sequence[nn.Parameter], dtypes: Iterable[torch.dtype | None]
) -> None:
    """Refuse a wrapper that reduces in a coarser dtype than ``wide``. None in ``dtypes`` is the parameter's own."""
    own = [parameter.dtype for parameter in parameters]
    for used in {each or mine for each in dtypes for mine in own} if wide.widens else ():
        if torch.finfo(used).eps > torch.finfo(wide.dtype or used).eps:
            raise PlanError(
                f"accumulate_dtype is {wide.dtype} but FSDP2 reduces gradients in {used}; "
                f"give MixedPrecisionPolicy(reduce_dtype={wide.dtype})"
            )


def refuse_float16(dtypes: Iterable[tuple[str, torch.dtype | None]]) -> None:
    """Raise `PlanError` for every float16 in the pairs ``(name for the error, dtype)``."""
    for what, dtype in dtypes:
        if dtype == torch.float16:
            raise PlanError(f"{what} is torch.float16; {UNDERFLOW}")


@contextlib.contextmanager
def no_float16_autocast(models: Sequence[nn.Module]) -> Generator[None]:
    """Refuse forwards of ``models`` under an autocast to float16, while this context is open."""

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
    """Give every gradient its own memory, since an in-place change of shared memory would change both gradients.

    Autograd gives two parameters one gradient tensor if a model uses their sum: ``x + (pos[None] + kind[None])``.
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
        if isinstance(factor, Tensor):  # foreach needs a scalar of matching precision: float64 only for float64
            is_double = group[0].dtype in (torch.float64, torch.complex128)
            own = factor.to(group[0].device, torch.float64 if is_double else torch.float32)
        multiply_all(group, own)


def total_norm(parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup] = ()) -> Tensor:
    """Return the 2-norm of the gradients of all parameters, over all shards, as a scalar on the device.

    ``groups`` are process groups whose ranks hold further parts of the gradient that no DTensor describes.
    """
    norms = [_full(torch.nn.utils.get_total_norm(list(map(_values, group)))) for group in _groups(parameters)]
    if not norms and not groups:
        return torch.zeros((), device=parameters[0].device)
    if not norms:
        norms = [torch.zeros((), dtype=parameters[0].dtype, device=parameters[0].device)]
    if len(norms) == 1 and not groups:
        return norms[0]
    dtype = accumulation_dtype(norms[0].device)  # the same on all ranks, whatever their parameters' dtypes
    norm = torch.linalg.vector_norm(torch.stack([each.to(norms[0].device, dtype) for each in norms]))
    for group in groups:
        square = norm.square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    return norm


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    max_norm: float | Tensor,
    factor: float | Tensor | None = None,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Tensor:
    """Multiply every gradient by ``factor``, then clip to ``max_norm``, in one pass. Return the norm before the clip.

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
    """Group the gradients by mesh, device and dtype, so that one foreach call can take each group."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if is_dtensor(gradient) else None
            groups.setdefault((mesh, gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())


def _values(gradient: Tensor) -> Tensor:
    """Return the values of a sparse gradient, each element once. Return a dense gradient unchanged."""
    return gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if is_dtensor(norm) else norm


def graph_leaves(totals: Sequence[Tensor]) -> Generator[Tensor]:
    """Yield every leaf in the graph of the totals that carries a gradient."""
    for node in _graph(totals):
        if (leaf := _leaf(node)) is not None:
            yield leaf


def find_functions(totals: Sequence[Tensor]) -> list[Any]:
    """Return the nodes of user-written autograd functions near the totals, which return scalars or vectors."""
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
    """Return the name of an autograd function written in Python."""
    return class_of_function(node).__name__


@torch.no_grad()
def is_linear(node: Any) -> bool | None:
    """Return True if the backward of a function uses the gradient that it is given. None if it returns only zeros.

    The backward runs for two scales of the gradient, which uses up its graph.
    """
    found: list[list[Tensor]] = []
    for scale in (2.0, 0.5):
        given = [torch.full(each.shape, scale, dtype=each.dtype, device=each.device) for each in inputs_of_node(node)]
        try:
            back = node.apply(*given)
        except Exception:  # the first backward has freed the saved tensors
            return True
        tensors = [back] if isinstance(back, Tensor) else [each for each in back if isinstance(each, Tensor)]
        found.append([each.detach().clone() for each in tensors])
    moved = [(one, other) for one, other in zip(*found, strict=True) if bool(one.any())]
    return not any(torch.equal(one, other) for one, other in moved) if moved else None


def find_functions_beside(totals: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[str]:
    """Return the names of Python autograd functions that a backward for ``wanted`` alone does not run."""
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
    """Return every node that the totals depend on, mapped to the nodes of its inputs."""
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
