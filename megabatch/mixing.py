"""What mixes the samples of a microbatch, or cannot do without the others: modules, and terms made of routers."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megabatch.contract import LossFunction, differentiable, terms_of

TOLERANCE = 1e-6  # relative; the shape of a batch changes the last bits of a matrix product


def mixing_module(model: nn.Module, loss_fn: LossFunction, batch: dict[str, Any], num_rows: int) -> str | None:
    """Name of the first module whose output for a row depends on the rows beside it, or that does not run without them.

    Runs ``batch`` (samples in dim 0 of each tensor) whole and row by row, and compares what each module returned.
    Rows that are only in another order, as those that experts are given, are right again in what is around them.
    """
    together = _outputs(model, loss_fn, batch)
    for row in range(num_rows):
        one = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in batch.items()}
        try:
            alone = _outputs(model, loss_fn, one)
        except Exception:  # a batch norm of one vector each, say
            return failing_module(model, loss_fn, [one])
        both = [name for name in together if name in alone]
        differs = {name: _differs(together[name], alone[name], row, num_rows) for name in both}
        for name, mixes in differs.items():
            if mixes and not any(differs.get(each) is False for each in _around(name)):
                return name
    return None


def _around(name: str) -> list[str]:
    """Names of the modules that a module is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def failing_module(model: nn.Module, loss_fn: LossFunction, microbatches: list[Any]) -> str | None:
    """Name of the innermost module that was running when a microbatch raised; None where none was."""
    entered: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: entered.append(name)

    def leave(*_: Any) -> None:
        entered.pop()

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_pre_hook(enter(name)) for name, module in named]
    handles += [module.register_forward_hook(leave) for _, module in named]
    try:
        for microbatch in microbatches:
            loss_fn(model, microbatch)
    except Exception:  # whatever it was, the caller has seen it
        return entered[-1] if entered else None
    finally:
        for handle in handles:
            handle.remove()
    return None


def terms_of_routers(model: nn.Module, loss_fn: LossFunction, microbatch: Any) -> set[str]:
    """Names of the loss's terms that are made of what the model tells of its routers: their logits, or their loss.

    That a router works on the hidden states does not count: `aux_loss` and `router_logits` of an output are looked at.
    """
    told: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        loss, logits = getattr(output, "aux_loss", None), getattr(output, "router_logits", None)
        told.extend(each for each in [loss] if isinstance(each, Tensor) and each.requires_grad)
        if isinstance(logits, tuple | list) and all(isinstance(each, Tensor) for each in logits):
            # As tensors of their own, which the layers above have not used.
            output.router_logits = tuple(cast(Tensor, each).view_as(each) for each in logits)
            told.extend(each for each in output.router_logits if each.requires_grad)

    handles = [module.register_forward_hook(note) for module in model.modules()]
    try:
        terms = terms_of(loss_fn(model, microbatch))
    finally:
        for handle in handles:
            handle.remove()
    return {name for name in differentiable(terms) if _reaches(terms[name].total, told)}


def _reaches(total: Tensor, told: list[Tensor]) -> bool:
    found = torch.autograd.grad(total, told, retain_graph=True, materialize_grads=True) if told else ()
    return any(bool(each.any()) for each in found)


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


def _differs(together: Tensor, alone: Tensor, row: int, num_rows: int) -> bool | None:
    if together.ndim == 0 or len(alone) * num_rows != len(together):
        return None  # not a tensor of rows
    mine = together[row * len(alone) : (row + 1) * len(alone)]
    return mine.shape != alone.shape or float((mine - alone).norm()) > TOLERANCE * float(alone.norm())
