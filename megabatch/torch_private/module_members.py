"""A module's members, hooks and compilation."""

import operator
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as of_every_module

# A module's dicts of its own parameters and children. torch changes these dicts and never replaces them.
members_of_module = operator.attrgetter("_parameters", "_modules")

WRAPPED_NAMES = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def original_of(module: nn.Module) -> Any:
    """``_orig_mod``: what torch.compile(module) was made of; the module itself where it is not compiled."""
    return getattr(module, "_orig_mod", module)


def name_without_wrappers(name: str) -> str:
    """Return the path of a module or parameter without what compilation, checkpointing and FSDP1 add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED_NAMES)


def is_compiled(module: Any) -> bool:
    """``Module._compiled_call_impl``, set by ``module.compile()``."""
    return module._compiled_call_impl is not None


def has_compiled(model: nn.Module) -> bool:
    """True if the model or a module of it is compiled."""
    return any(is_compiled(module) or original_of(module) is not module for module in model.modules())


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """``Module._forward_hooks``."""
    return module._forward_hooks  # pyright: ignore[reportPrivateUsage]


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """``Module._forward_pre_hooks``."""
    return module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]


def has_backward_hooks(module: Any) -> bool:
    """``Module._backward_hooks`` and ``_backward_pre_hooks``."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_global_forward_hooks() -> bool:
    """``_global_forward_hooks`` of torch.nn.modules.module."""
    return bool(cast(Any, of_every_module)._global_forward_hooks)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """``Module._parameters``, without those of submodules and with those that are None."""
    return module._parameters  # pyright: ignore[reportPrivateUsage]


def apply_to_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """``Module._apply``: replace each parameter and buffer by what ``change`` returns for it."""
    module._apply(change)  # pyright: ignore[reportPrivateUsage]


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """``Module._buffers``, with those that are None."""
    return module._buffers  # pyright: ignore[reportPrivateUsage]


def transient_buffers(module: nn.Module) -> set[str]:
    """``Module._non_persistent_buffers_set``: names of the buffers that a state_dict leaves out."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]


def is_given_to_replicate(module: nn.Module) -> bool:
    """Return True if ``replicate`` was called on a module, by the registry of torch.distributed._composable."""
    from torch.distributed._composable.contract import _get_registry  # pyright: ignore[reportPrivateUsage]

    return "replicate" in (_get_registry(module) or {})
