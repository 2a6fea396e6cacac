"""What mixes the samples of a microbatch, or cannot do without the others: modules, padding, and terms of routers."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from megabatch.batching.samples import IGNORED_LABEL
from megabatch.losses.contract import differentiable, terms_of

TOLERANCE = 1e-6  # relative; the shape of a batch changes the last bits of a matrix product
Run = Callable[[Any], Any]  # the loss of a microbatch, by the model that is looked at


def mixing_module(model: nn.Module, run: Run, batch: dict[str, Any], num_rows: int) -> str | None:
    """Name of the first module whose output for a row depends on the rows beside it, or that does not run without them.

    Runs ``batch`` (samples in dim 0 of each tensor) whole and row by row, and compares what each module returned.
    Rows that are only in another order, as those that experts are given, are right again in what is around them.
    """
    together = _outputs(model, run, batch)
    for row in range(num_rows):
        one = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in batch.items()}
        try:
            alone = _outputs(model, run, one)
        except Exception:  # a batch norm of one vector each, say
            return failing_module(model, run, [one])
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


def failing_module(model: nn.Module, run: Run, microbatches: list[Any]) -> str | None:
    """Name of the innermost module that was running when a microbatch raised; None where none was."""
    entered: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: entered.append(name)

    def leave(*_: Any) -> None:
        entered.pop()

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_pre_hook(enter(name)) for name, module in named]
    handles += [module.register_forward_hook(leave) for _, module in named]
    with _removed(handles):
        try:
            for microbatch in microbatches:
                run(microbatch)
        except Exception:  # whatever it was, the caller has seen it
            return entered[-1] if entered else None
    return None


def padding_that_counts(run: Run, alone: Mapping[str, Any], padded: Mapping[str, Any], pad_token: int | None) -> str:
    """Why a sample has another loss with padding beside it, in words; empty where it has the same.

    ``alone`` is a microbatch of one sample, ``padded`` is the same where it lies beside a longer one.
    """
    one, other = (terms_of(run(dict(each))) for each in (alone, padded))
    if all(_near(a, b) for name in one for a, b in zip(one[name], other.get(name, one[name]), strict=True)):
        return ""
    grown = {
        name: value
        for name, value in padded.items()
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] > cast(Tensor, alone[name]).shape[1]
    }
    if not grown:
        return ""
    found = ", ".join(f"{name!r} with {_filling(value)}" for name, value in grown.items())
    lengths = next((cast(Tensor, alone[name]).shape[1], value.shape[1]) for name, value in grown.items())
    hints = []
    if "input_ids" in padded and pad_token is not None and _filling(padded["input_ids"]) != pad_token:
        hints.append(f"the model's pad token is {pad_token}: pad 'input_ids' with it")
    targets = [name for name, value in grown.items() if "label" in name and _filling(value) != IGNORED_LABEL]
    hints += [f"{name!r} counts as targets where it is not {IGNORED_LABEL}" for name in targets]
    if "input_ids" in padded and "attention_mask" not in padded and not hints:
        hints.append("the microbatch has no 'attention_mask', and the model looks at padding: give one")
    change = "; ".join(hints) or "leave padding out of the loss, or pad with what it ignores (collate=)"
    return (
        f"padding changes the loss of a sample: one of length {lengths[0]} has another when it is padded to "
        f"{lengths[1]} ({found}); {change}"
    )


def _filling(padded: Tensor) -> float | int:
    return padded[0, -1].flatten()[-1].item()


def _near(one: Any, other: Any) -> bool:
    return abs(float(one) - float(other)) <= 1e-9 * max(abs(float(one)), abs(float(other)))


def terms_of_routers(model: nn.Module, run: Run, microbatch: Any) -> set[str]:
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

    with _removed([module.register_forward_hook(note) for module in model.modules()]):
        terms = terms_of(run(microbatch))
    return {name for name in differentiable(terms) if _reaches(terms[name].total, told)}


def _reaches(total: Tensor, told: list[Tensor]) -> bool:
    found = torch.autograd.grad(total, told, retain_graph=True, materialize_grads=True) if told else ()
    return any(bool(each.any()) for each in found)


def _outputs(model: nn.Module, run: Run, microbatch: Any) -> dict[str, Tensor]:
    """First tensor that each module returned in its first call, innermost and earliest first."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if tensors and name not in outputs and tensors[0].is_floating_point():
                outputs[name] = tensors[0].detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    with _removed(handles), torch.no_grad():
        run(microbatch)
    return outputs


@contextlib.contextmanager
def _removed(handles: list[RemovableHandle]) -> Generator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differs(together: Tensor, alone: Tensor, row: int, num_rows: int) -> bool | None:
    if together.ndim == 0 or len(alone) * num_rows != len(together):
        return None  # not a tensor of rows
    mine = together[row * len(alone) : (row + 1) * len(alone)]
    return mine.shape != alone.shape or float((mine - alone).norm()) > TOLERANCE * float(alone.norm())
