"""Gradients in a wider dtype than their parameters."""

import weakref
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megabatch.core.gradients import Gradients, refuse_float16
from megabatch.errors import PlanError


class WideGradients(Gradients):
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
        self._widened = [parameter for parameter in parameters if dtype not in (None, parameter.dtype)]
        self._hooks: list[RemovableHandle] = []
        self.widens = bool(self._widened)
        refuse_float16([("accumulate_dtype", dtype)])
        for parameter in self._widened:
            if not cast(torch.dtype, dtype).is_floating_point or is_coarser(dtype, [parameter.dtype]):
                raise PlanError(
                    f"accumulate_dtype is {dtype}, coarser than parameters in {parameter.dtype}; leave it out, or give "
                    "a finer one"
                )

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
        return self.dtype or parameter.dtype

    def _widen(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.dtype != self.dtype:
            parameter.grad = parameter.grad.to(self.dtype)


def is_coarser(dtype: torch.dtype | None, dtypes: Collection[torch.dtype]) -> bool:
    """Return True if a dtype rounds more than any of the others. None is no dtype of its own."""
    return dtype is not None and any(torch.finfo(dtype).eps > torch.finfo(finer).eps for finer in dtypes)
