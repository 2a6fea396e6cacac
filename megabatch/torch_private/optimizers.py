"""Hooks of optimizers, the clip, and the state of a GradScaler."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.torch_private.autograd import count_writes


def optimizers_in_backward(parameter: Any) -> list[Any]:
    """``_in_backward_optimizers``, an attribute that torch's _apply_optimizer_in_backward sets."""
    return getattr(parameter, "_in_backward_optimizers", [])


def scaler_state(scaler: torch.amp.GradScaler) -> tuple[Any, ...]:
    """``GradScaler._scale`` and ``_per_optimizer_states``, to compare: `unscale_`, `step` and `update` change them."""
    scale: Tensor | None = getattr(scaler, "_scale", None)
    states: dict[Any, Any] = getattr(scaler, "_per_optimizer_states", {})
    stages = {key: state["stage"] for key, state in states.items()}
    return (None if scale is None else (id(scale), count_writes(scale)), stages)


def step_hooks(optimizer: Any) -> list[Callable[..., Any]]:
    """``Optimizer._optimizer_step_pre_hooks`` and ``_optimizer_step_post_hooks``: hooks of one optimizer's step."""
    hooks_of_kinds = (getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post"))
    return [hook for hooks in hooks_of_kinds for hook in hooks.values()]


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """``step.__wrapped__``: a class's step without the hooks of every optimizer, which run in the outer one's step."""
    return cast(Any, step).__wrapped__ if getattr(step, "hooked", False) else step


def call_before_clip(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function before ``clip_grad._clip_grads_with_norm_``, the half of clip_grad_norm_ that scales gradients.

    It is a global of its module, so clip_grad_norm_ finds the replacement under every name by which it was imported.
    Returns a function that undoes the replacement.
    """
    from torch.nn.utils import clip_grad

    module = cast(Any, clip_grad)
    original = module._clip_grads_with_norm_

    def clip(*args: Any, **kwargs: Any) -> Any:
        function()
        return original(*args, **kwargs)

    module._clip_grads_with_norm_ = clip
    return lambda: setattr(module, "_clip_grads_with_norm_", original)
