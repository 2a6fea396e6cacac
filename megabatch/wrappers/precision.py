"""The dtype of gradients: wider than the parameters' where that is asked for, float16 never."""

import contextlib
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megabatch.errors import PlanError

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
