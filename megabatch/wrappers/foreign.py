"""Models that another library has prepared: which are refused, and why.

Accelerate's are not: what it prepares is a plain model, DDP, FSDP1 or FSDP2, with a forward that casts. Its own
gradient accumulation is done in ``accelerator.backward``, which is not called. A DataLoader that it has prepared
deals batches to ranks once more and repeats samples to fill the last: give it none that `UpdateSampler` serves.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import nn

from megabatch.errors import PlanError

# Packages that put hooks of their own on a model, which reduce or divide its gradients.
REDUCING = {
    "deepspeed": "DeepSpeed reduces gradients and divides them by its own gradient_accumulation_steps; give a model "
    "that deepspeed.initialize has not seen, wrapped with fully_shard or DistributedDataParallel",
    "apex": "apex reduces gradients in every backward; give the model that it wraps, in torch's "
    "DistributedDataParallel",
}


def refuse_foreign(model: nn.Module) -> None:
    """Raise `PlanError` for a model, or a part of one, on whose gradients another library works. Imports none."""
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        for kind in type(module).__mro__:
            if (package := kind.__module__.partition(".")[0]) in REDUCING and _wraps(module):
                raise PlanError(f"{where} is a {kind.__name__} of {package}; {REDUCING[package]}")
        for hook in _hooks(module):
            package = str(getattr(hook, "__module__", None)).partition(".")[0]
            if package in REDUCING:
                raise PlanError(f"{where} has hooks of {package}; {REDUCING[package]}")


def _wraps(module: nn.Module) -> bool:
    """A wrapper, not a layer of that library."""
    return isinstance(getattr(module, "module", None), nn.Module)


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """What runs before a module's forward, and when a parameter of its own has its gradient."""
    yield from cast(Any, module)._forward_pre_hooks.values()
    for parameter in module.parameters(recurse=False):
        yield from (cast(Any, parameter)._post_accumulate_grad_hooks or {}).values()
