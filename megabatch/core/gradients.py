"""The gradients in ``p.grad``: dtype, drop, scale, norm and clip, for plain tensors and DTensors.

float16 is refused.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megabatch.core.contract import accumulation_dtype
from megabatch.errors import PlanError
from megabatch.torch_private.classes import is_dtensor, local_tensor
from megabatch.torch_private.foreach import multiply_all

# As in torch.nn.utils.clip_grad_norm_.
CLIP_EPSILON = 1e-6
DEVICES = ("cpu", "cuda", "mps", "xpu")
UNDERFLOW = "dividing the loss by the update's weight before backward underflows in float16; use bfloat16"


class Gradients:
    """The gradients of an update in the parameters' dtypes. Subclasses add them up otherwise.

    Attributes:
        dtype: Of all gradients while an update is open. None is the dtype of each parameter.
        widens: True if gradients have another dtype than their parameters.
    """

    dtype: torch.dtype | None = None
    widens = False

    def begin(self) -> None:
        """Prepare for the first microbatch of an update, when every old ``p.grad`` is None."""

    def finish(self) -> None:
        """Give every ``p.grad`` its parameter's dtype, when the gradients are complete."""

    def discard(self) -> None:
        """Undo `begin`, after an update that was finished or abandoned."""

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Return the dtype of the parameter's gradient while an update is open."""
        return parameter.dtype

    def norm(
        self, parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup],
        uncounted: Sequence[nn.Parameter],
    ) -> Tensor:  # fmt: skip
        """Return the 2-norm of the gradients, see `total_norm`."""
        return total_norm(parameters, groups, uncounted)


def refuse_float16(dtypes: Iterable[tuple[str, torch.dtype | None]]) -> None:
    """Raise `PlanError` for the first float16 in the pairs ``(name for the error, dtype)``."""
    for name, dtype in dtypes:
        if dtype == torch.float16:
            raise PlanError(f"{name} is torch.float16; {UNDERFLOW}")


@contextlib.contextmanager
def no_float16_autocast(models: Sequence[nn.Module]) -> Generator[None]:
    """Refuse forwards of ``models`` under an autocast to float16 on CPU or CUDA, while this context is open."""

    def look(*_: object) -> None:
        if autocasts_to_float16():
            refuse_float16([("what torch.autocast computes in", torch.float16)])

    # autocast is entered inside the loss, so only a forward can see it.
    hooks = [model.register_forward_pre_hook(look) for model in models]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def autocasts_to_float16() -> bool:
    """Return True if autocast is on for a device, and computes in float16."""
    enabled = filter(torch.is_autocast_enabled, DEVICES)
    return torch.float16 in map(torch.get_autocast_dtype, enabled)


def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set every ``p.grad`` to None."""
    for parameter in parameters:
        parameter.grad = None


def separate_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Give every gradient its own memory, since an in-place change of shared memory would change both gradients.

    Autograd gives two parameters one gradient tensor if a model uses their sum: ``x + (pos[None] + kind[None])``.

    Returns:
        True if every parameter has a gradient. A later microbatch then adds to these, and this needs no repetition.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    # Addresses, not storages: views of DDP's buckets share a storage and no element.
    starts: set[int] = set()
    for parameter in with_gradient:
        gradient: Any = parameter.grad
        if gradient.layout != torch.strided:
            continue
        start = local_tensor(gradient).data_ptr()
        if start in starts:
            parameter.grad = gradient.clone()
        elif start:
            starts.add(start)
    return len(with_gradient) == len(parameters)


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply every gradient by ``factor``, in one pass."""
    # foreach takes tensors of one device, dtype and mesh.
    for group in _groups(parameters):
        multiply_all(group, _cast_factor(factor, group[0]) if isinstance(factor, Tensor) else factor)


def _cast_factor(factor: Tensor, gradient: Tensor) -> Tensor:
    # foreach needs a scalar of matching precision: float64 for float64 alone.
    is_double = gradient.dtype in (torch.float64, torch.complex128)
    return factor.to(gradient.device, torch.float64 if is_double else torch.float32)


def total_norm(
    parameters: Sequence[nn.Parameter], groups: Sequence[dist.ProcessGroup] = (),
    uncounted: Sequence[nn.Parameter] = (),
) -> Tensor:  # fmt: skip
    """Return the 2-norm of the gradients of all parameters, over all shards, as a scalar on the device.

    ``groups`` are process groups whose ranks hold further parts of the gradient that no DTensor describes, and also
    the gradients of ``uncounted`` parameters.
    """
    uncounted_ids = set(map(id, uncounted))
    counted = [parameter for parameter in parameters if id(parameter) not in uncounted_ids]
    # Without a gradient, the norm is 0.
    norms = list(map(_norm_of, _groups(counted))) or [torch.zeros((), device=parameters[0].device)]
    if len(norms) == 1 and not groups:
        return norms[0]
    # Ranks of a group take part in its all-reduce with or without a gradient, and whatever their parameters' dtypes.
    device = norms[0].device
    dtype = accumulation_dtype(device)
    norm = torch.linalg.vector_norm(torch.stack([norm.to(device, dtype) for norm in norms]))
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
    *,
    norm_of: Callable[..., Tensor] | None = None,
    uncounted: Sequence[nn.Parameter] = (),
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Multiply every gradient by ``factor``, then clip to ``max_norm``, in one pass. Return the norm before the clip.

    Clipping follows torch: ``g * min(1, max_norm / (norm + 1e-6))``. ``groups`` and ``uncounted`` as in `total_norm`.
    ``norm_of`` computes the norm in place of `total_norm`. ``scale`` is the factor that a GradScaler has put into the
    gradients. Neither ``max_norm`` nor the returned norm contains it.
    """
    limit, epsilon = max_norm * scale, CLIP_EPSILON * scale
    # The factor is applied to the norm instead of the gradients, which saves a pass.
    norm = (norm_of or total_norm)(parameters, groups, uncounted)
    if factor is None:
        coefficient = torch.clamp(limit / (norm + epsilon), max=1.0)
    else:
        norm = norm * factor
        coefficient = torch.clamp(limit / (norm + epsilon), max=1.0) * factor
    scale_gradients(parameters, coefficient)
    return norm / scale


def _groups(parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """Group the gradients by mesh, device and dtype, so that one foreach call can take each group."""
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            # Only a DTensor has a mesh.
            kind = getattr(gradient, "device_mesh", None), gradient.device, gradient.dtype
            groups.setdefault(kind, []).append(gradient)
    return list(groups.values())


def _norm_of(gradients: list[Tensor]) -> Tensor:
    # A sparse gradient may have an element in several parts, until it is coalesced.
    values = [
        gradient.coalesce().values() if gradient.layout == torch.sparse_coo else gradient for gradient in gradients
    ]
    return _full(torch.nn.utils.get_total_norm(values))


def _full(norm: Tensor) -> Tensor:
    if not is_dtensor(norm):
        return norm
    # With CPU offload the norm is on the CPU, from which NCCL sends nothing.
    if norm.device.type != norm.device_mesh.device_type:
        moved: Any = type(norm).from_local(norm.to_local(), norm.device_mesh, norm.placements, run_check=False)
        return moved.full_tensor()
    return norm.full_tensor()
