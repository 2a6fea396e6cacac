"""Search for modules, padding and router terms that make a sample depend on its neighbors in a microbatch."""

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megabatch.core.contract import differentiable, terms_of
from megabatch.torch_private.loss_nodes import IGNORED_LABEL
from megabatch.torch_private.operations import pytree

# Relative; the shape of a batch changes the last bits of a matrix product.
TOLERANCE = 1e-6
# Computes the loss of a microbatch, or its representations, with the model.
Run = Callable[[Any], Any]


def find_mixing_module(model: nn.Module, run: Run, batch: dict[str, Any], num_rows: int) -> str | None:
    """Return the first module whose output for a row depends on the rows beside it, or that does not run without them.

    This runs ``batch`` (samples in dim 0 of each tensor) whole and row by row, and compares the outputs of each module.
    A module whose rows are only reordered (experts) does not count: the output of a module around it is equal.
    """
    together = _record_outputs(model, run, batch)
    for row in range(num_rows):
        sample = take_rows(batch, slice(row, row + 1))
        try:
            alone = _record_outputs(model, run, sample)
        except Exception:
            return find_failing_module(model, run, [sample])
        mixes: dict[str, bool] = {}
        for name in filter(alone.__contains__, together):
            outputs, output = together[name], alone[name]
            # The others are no tensors of rows.
            if outputs.ndim and len(output) * num_rows == len(outputs):
                mixes[name] = _differ(outputs[row * len(output) : (row + 1) * len(output)], output)
        inside_of_equal = tuple(f"{name}." for name in mixes if not mixes[name])
        for name in mixes:
            if mixes[name] and not name.startswith(inside_of_equal):
                return name
    return None


def _differ(beside_others: Tensor, alone: Tensor) -> bool:
    if beside_others.shape != alone.shape:
        return True
    return float((beside_others - alone).norm()) > TOLERANCE * float(alone.norm())


def take_rows(batch: Mapping[str, Any], rows: slice) -> dict[str, Any]:
    """Return some samples of a batch whose tensors have samples in dim 0."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor[rows], dict(batch))


def find_failing_module(model: nn.Module, run: Run, microbatches: list[Any]) -> str | None:
    """Return the innermost module that was running when a microbatch raised; None if none was."""
    running = [""]

    def enter(name: str, *_: Any) -> None:
        running.append(name)

    def leave(*_: Any) -> None:
        running.pop()

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name)))
            hooks.enter_context(module.register_forward_hook(leave))
        with contextlib.suppress(Exception):
            for microbatch in microbatches:
                run(microbatch)
    return running[-1] or None


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
    result_alone, result_padded = pytree.tree_leaves(run(dict(alone))), pytree.tree_leaves(run(dict(padded)))
    grown: dict[str, Tensor] = {}
    for name, value in padded.items():
        if isinstance(value, Tensor) and value.shape[1:2] > alone[name].shape[1:2]:
            grown[name] = value
    if not grown or all(map(_are_near, result_alone, result_padded)):
        return ""
    fillings = {name: value[0, -1].flatten()[-1].item() for name, value in grown.items()}
    hints: list[str] = []
    if pad_token not in (None, fillings.get("input_ids", pad_token)):
        hints.append(f"the model's pad token is {pad_token}: pad 'input_ids' with it")
    for name, filling in fillings.items():
        if "label" in name and filling != IGNORED_LABEL:
            hints.append(f"{name!r} counts as targets where it is not {IGNORED_LABEL}")
    if "input_ids" in padded and "attention_mask" not in padded and not hints:
        hints.append("the microbatch has no 'attention_mask', and the model looks at padding: give one")
    change = "; ".join(hints) or "leave padding out of the loss, or pad with what it ignores (collate=)"
    name = next(iter(grown))
    shown = ", ".join(f"{name!r} with {filling}" for name, filling in fillings.items())
    return (
        f"padding changes the {result} of a sample: one of length {alone[name].shape[1]} has another when it is padded "
        f"to {grown[name].shape[1]} ({shown}); {change}"
    )


def _are_near(first_result: Any, second_result: Any) -> bool:
    """Return true for numbers or tensors that differ by rounding, and for tensors that cannot be compared."""
    first, second = torch.as_tensor(first_result).detach().double(), torch.as_tensor(second_result).detach().double()
    if first.shape != second.shape:
        return True
    return float((first - second).norm()) <= 1e-9 * max(float(first.norm()), float(second.norm()))


def find_router_terms(model: nn.Module, run: Run, microbatch: Any) -> set[str]:
    """Return the names of the loss's terms that use the routers' logits or loss.

    It looks at `aux_loss` and `router_logits` of outputs, since every term depends on routers by the hidden states.
    """
    router_outputs: list[Any] = []

    def note(_module: nn.Module, _inputs: Any, output: Any) -> None:
        logits = getattr(output, "router_logits", None)
        if isinstance(logits, tuple | list):
            # Views, which no layer above has used.
            output.router_logits = pytree.tree_map_only(Tensor, lambda logit: logit.view_as(logit), tuple(logits))
            router_outputs.extend(pytree.tree_leaves(output.router_logits))
        router_outputs.append(getattr(output, "aux_loss", None))

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_hook(note))
        terms = terms_of(run(microbatch))
    inputs = [output for output in router_outputs if isinstance(output, Tensor) and output.requires_grad]
    if not inputs:
        return set()
    names: set[str] = set()
    for name in differentiable(terms):
        gradients = torch.autograd.grad(terms[name].total, inputs, retain_graph=True, materialize_grads=True)
        if any(map(torch.any, gradients)):
            names.add(name)
    return names


def _record_outputs(model: nn.Module, run: Run, microbatch: Any) -> dict[str, Tensor]:
    """Return the first tensor of each module's first call, innermost and earliest first."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        first = next((leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)), None)
        if first is not None and first.is_floating_point():
            outputs.setdefault(name, first.detach())

    # The graph is kept until the run ends: a loss may take derivatives.
    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(keep, name)))
        run(microbatch)
    outputs.pop("", None)
    return outputs
