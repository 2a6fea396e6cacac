"""Search for modules, padding and router terms that make a sample depend on its neighbors in a microbatch."""

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megabatch.core.contract import differentiable, terms_of
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.operations import pytree

TOLERANCE = 1e-6  # relative; the shape of a batch changes the last bits of a matrix product
Run = Callable[[Any], Any]  # computes the loss of a microbatch, or its representations, with the model


def find_mixing_module(model: nn.Module, run: Run, batch: dict[str, Any], num_rows: int) -> str | None:
    """Return the first module whose output for a row depends on the rows beside it, or that does not run without them.

    This runs ``batch`` (samples in dim 0 of each tensor) whole and row by row, and compares the outputs of each module.
    A module whose rows are only reordered (experts) does not count: the output of a module around it is equal.
    """
    together = _record_outputs(model, run, batch)
    for row in range(num_rows):
        sample = {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in batch.items()}
        try:
            alone = _record_outputs(model, run, sample)
        except Exception:  # for example a batch norm of one vector
            return find_failing_module(model, run, [sample])
        both = [name for name in together if name in alone]
        differs = {name: _differs(together[name], alone[name], row, num_rows) for name in both}
        for name, mixes in differs.items():
            if mixes and not any(differs.get(enclosing) is False for enclosing in _enclosing(name)):
                return name
    return None


def _enclosing(name: str) -> list[str]:
    """Return the names of the modules around a module."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def find_failing_module(model: nn.Module, run: Run, microbatches: list[Any]) -> str | None:
    """Return the innermost module that was running when a microbatch raised; None if none was."""
    entered: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: entered.append(name)

    def leave(*_: Any) -> None:
        entered.pop()

    named = [(name, module) for name, module in model.named_modules() if name]
    handles = [module.register_forward_pre_hook(enter(name)) for name, module in named]
    handles += [module.register_forward_hook(leave) for _, module in named]
    with _removing(handles):
        try:
            for microbatch in microbatches:
                run(microbatch)
        except Exception:  # the caller has seen the error
            return entered[-1] if entered else None
    return None


def explain_padding(
    run: Run, result: str, alone: Mapping[str, Any], padded: Mapping[str, Any], pad_token: int | None
) -> str:
    """Explain why a sample has another result with padding; return "" if the result is the same.

    Args:
        run: Computes the result.
        result: The word for it: "loss" or "representation".
        alone: A microbatch of one sample.
        padded: The same sample, padded to the length of a longer one.
        pad_token: The pad token of the model's config.
    """
    result_alone, result_padded = (pytree.tree_leaves(run(dict(microbatch))) for microbatch in (alone, padded))
    if all(map(_near, result_alone, result_padded)):
        return ""
    grown = {
        name: value
        for name, value in padded.items()
        if isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] > cast(Tensor, alone[name]).shape[1]
    }
    if not grown:
        return ""
    fillings = ", ".join(f"{name!r} with {_filling(value)}" for name, value in grown.items())
    lengths = next((cast(Tensor, alone[name]).shape[1], value.shape[1]) for name, value in grown.items())
    hints: list[str] = []
    if "input_ids" in padded and pad_token is not None and _filling(padded["input_ids"]) != pad_token:
        hints.append(f"the model's pad token is {pad_token}: pad 'input_ids' with it")
    targets = [name for name, value in grown.items() if "label" in name and _filling(value) != IGNORED_LABEL]
    hints += [f"{name!r} counts as targets where it is not {IGNORED_LABEL}" for name in targets]
    if "input_ids" in padded and "attention_mask" not in padded and not hints:
        hints.append("the microbatch has no 'attention_mask', and the model looks at padding: give one")
    change = "; ".join(hints) or "leave padding out of the loss, or pad with what it ignores (collate=)"
    return (
        f"padding changes the {result} of a sample: one of length {lengths[0]} has another when it is padded to "
        f"{lengths[1]} ({fillings}); {change}"
    )


def _filling(padded: Tensor) -> float | int:
    return padded[0, -1].flatten()[-1].item()


def _near(first_result: Any, second_result: Any) -> bool:
    """Return true for numbers or tensors that differ by rounding, and for tensors that cannot be compared."""
    first, second = (torch.as_tensor(value).detach().double() for value in (first_result, second_result))
    if first.shape != second.shape:
        return True
    return float((first - second).norm()) <= 1e-9 * max(float(first.norm()), float(second.norm()))


def find_router_terms(model: nn.Module, run: Run, microbatch: Any) -> set[str]:
    """Return the names of the loss's terms that use the routers' logits or loss.

    It looks at `aux_loss` and `router_logits` of outputs, since every term depends on routers by the hidden states.
    """
    router_outputs: list[Tensor] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        loss, logits = getattr(output, "aux_loss", None), getattr(output, "router_logits", None)
        if isinstance(loss, Tensor) and loss.requires_grad:
            router_outputs.append(loss)
        if isinstance(logits, tuple | list) and all(isinstance(logit, Tensor) for logit in logits):
            # Views, which no layer above has used.
            output.router_logits = tuple(cast(Tensor, logit).view_as(logit) for logit in logits)
            router_outputs.extend(logit for logit in output.router_logits if logit.requires_grad)

    with _removing([module.register_forward_hook(note) for module in model.modules()]):
        terms = terms_of(run(microbatch))
    return {name for name in differentiable(terms) if _reaches(terms[name].total, router_outputs)}


def _reaches(total: Tensor, router_outputs: list[Tensor]) -> bool:
    if not router_outputs:
        return False
    gradients = torch.autograd.grad(total, router_outputs, retain_graph=True, materialize_grads=True)
    return any(bool(gradient.any()) for gradient in gradients)


def _record_outputs(model: nn.Module, run: Run, microbatch: Any) -> dict[str, Tensor]:
    """Return the first tensor of each module's first call, innermost and earliest first."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
            if tensors and name not in outputs and tensors[0].is_floating_point():
                outputs[name] = tensors[0].detach()

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    # The graph is kept until the run ends: a loss may take derivatives.
    with _removing(handles):
        run(microbatch)
    return outputs


@contextlib.contextmanager
def _removing(handles: list[RemovableHandle]) -> Generator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _differs(together: Tensor, alone: Tensor, row: int, num_rows: int) -> bool | None:
    if together.ndim == 0 or len(alone) * num_rows != len(together):
        return None  # not a tensor of rows
    beside_others = together[row * len(alone) : (row + 1) * len(alone)]
    return beside_others.shape != alone.shape or float((beside_others - alone).norm()) > TOLERANCE * float(alone.norm())
