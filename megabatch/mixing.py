"""Which module mixes the samples of a microbatch, or cannot do without the others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megabatch.contract import LossFunction

TOLERANCE = 1e-6  # relative; the shape of a batch changes the last bits of a matrix product


def mixing_module(model: nn.Module, loss_fn: LossFunction, batch: dict[str, Tensor], num_rows: int) -> str | None:
    """Name of the first module whose output for a row depends on the rows beside it.

    Runs ``batch`` (samples in dim 0 of each tensor) whole and row by row, and compares what each module returned.
    """
    together = _outputs(model, loss_fn, batch)
    for row in range(num_rows):
        alone = _outputs(model, loss_fn, {name: value[row : row + 1] for name, value in batch.items()})
        for name, output in together.items():
            if name in alone and _differs(output, alone[name], row, num_rows):
                return name
    return None


def failing_module(model: nn.Module, loss_fn: LossFunction, microbatches: list[Any]) -> str | None:
    """Name of the module that was entered last before a microbatch raised."""
    entered: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: entered.append(name)

    handles = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        for microbatch in microbatches:
            loss_fn(model, microbatch)
    except Exception:  # whatever it was, the caller has seen it
        return entered[-1] if entered else None
    finally:
        for handle in handles:
            handle.remove()
    return None


def _outputs(model: nn.Module, loss_fn: LossFunction, microbatch: Any) -> dict[str, Tensor]:
    """First tensor that each module returned in its first call, innermost and earliest first."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if tensors and name not in outputs and tensors[0].is_floating_point():
                outputs[name] = tensors[0].detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss_fn(model, microbatch)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _differs(together: Tensor, alone: Tensor, row: int, num_rows: int) -> bool:
    if together.ndim == 0 or len(alone) * num_rows != len(together):
        return False  # not a tensor of rows
    mine = together[row * len(alone) : (row + 1) * len(alone)]
    return mine.shape != alone.shape or float((mine - alone).norm()) > TOLERANCE * float(alone.norm())
