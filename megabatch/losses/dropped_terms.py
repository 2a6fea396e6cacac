"""Refuse a model whose own loss has more than the next-token cross-entropy, which `losses.next_token` would drop.

The model runs once on a few tokens with ``labels``: its loss must be the cross-entropy of its own logits. It does not
run where the answer is known: the causal models of transformers add nothing unless their config has a coefficient.
"""

import contextlib
import inspect
from collections.abc import Generator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.errors import LossContractError
from megabatch.inspection.model_facts import IDS, MASK, POSITIONS
from megabatch.torch_private.classes import is_dtensor, is_fsdp2
from megabatch.torch_private.module_members import original_of
from megabatch.torch_private.operations import is_fake

MAX_TOKENS = 16
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-5}  # relative, by the dtype of the model's loss
TOLERANCE = 2e-2  # of other dtypes
ROUTER_LOSSES = ("aux_loss", "router_")  # parts of names: these losses are seen in the output


def refuse_dropped_terms(model: Any, inner: Any, microbatch: Mapping[str, Any]) -> bool:
    """Compare the model's own loss with the next-token cross-entropy.

    Every rank runs the model equally often, since ranks may wait for each other inside it.

    Args:
        model: What the loss gets.
        inner: The model inside of its wrappers and its adapter.
        microbatch: What the loss gets.

    Returns:
        True unless this microbatch has nothing to compare.

    Raises:
        LossContractError: The model's own loss differs.
    """
    ids = microbatch.get(IDS)
    if not isinstance(inner, nn.Module) or "labels" not in microbatch:
        return False
    if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel() or is_fake(ids) or ids.is_meta:
        return False
    if _is_plain(inner) or "labels" not in inspect.signature(inner.forward).parameters:
        return True
    pair = _compute_losses(model, inner, microbatch)
    if pair is None:
        return True
    tolerance = TOLERANCES.get(pair[0].dtype, TOLERANCE)
    model_loss, mean = map(float, pair)
    total = mean * (_num_tokens(ids) - 1)
    if min(abs(model_loss / mean - 1), abs(model_loss / total - 1)) > tolerance:
        raise LossContractError(
            f"the own loss of {type(inner).__name__} is {model_loss:.6g} on a few tokens and their next-token "
            f"cross-entropy is {mean:.6g}: next_token would drop the rest{_coefficients(inner)}; set its coefficient "
            "to 0, or give a loss of your own that adds it"
        )
    return True


def _is_plain(inner: nn.Module) -> bool:
    """Return True for a model of transformers whose loss is known to be the cross-entropy alone."""
    forward = inspect.unwrap(inner.forward)
    return (
        getattr(forward, "__module__", "").startswith("transformers.models.")
        and _is_cross_entropy(inner)
        and not _coefficients(inner)
    )


def _is_cross_entropy(inner: nn.Module) -> bool:
    """Return True if the function with which a model of transformers computes its loss is the cross-entropy."""
    # The property `loss_function` takes the cross-entropy for a class such as GPT2LMHeadModel, and prints a warning.
    if getattr(inner, "loss_type", "") is None and not hasattr(inner, "_loss_function"):
        return True
    loss_function = getattr(inner, "loss_function", None)
    is_of_transformers = getattr(loss_function, "__module__", "").startswith("transformers.")
    return is_of_transformers and getattr(loss_function, "__name__", "") == "ForCausalLMLoss"


def _coefficients(inner: nn.Module) -> str:
    """Return the coefficients of losses that the config names, as text for a message; none for an empty string."""
    config: Any = getattr(inner, "config", None)
    settings: list[str] = []
    for name, value in getattr(config, "__dict__", {}).items():
        is_number = type(value) in (int, float) and value
        if is_number and "loss" in name and not any(part in name for part in ROUTER_LOSSES):
            settings.append(f"{name}={value}")
    return f" ({', '.join(settings)})" if settings else ""


def _num_tokens(ids: Tensor) -> int:
    return max(2, min(MAX_TOKENS, ids.shape[1]))


def _compute_losses(model: Any, inner: nn.Module, microbatch: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Return the model's own loss of a few tokens and their cross-entropy by its logits; None if it does not tell."""
    ids = microbatch[IDS][:1, :1].repeat(1, _num_tokens(microbatch[IDS]))  # [1, T]
    inputs: dict[str, Any] = {IDS: ids, "labels": ids}
    if MASK in microbatch:
        inputs[MASK] = torch.ones_like(ids)
    if POSITIONS in microbatch:
        inputs[POSITIONS] = torch.arange(ids.shape[1], device=ids.device)[None]
    if hasattr(getattr(inner, "config", None), "output_router_logits"):
        inputs["output_router_logits"] = False  # whose loss is seen in the output of the run itself
    runner = model.module if isinstance(model, DistributedDataParallel) else original_of(model)
    with _without_traces(runner, inner, ids.device):
        try:
            output: Any = runner(**inputs)
        except Exception:  # of a model that wants other inputs
            return None
    fields: Mapping[str, Any] = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    loss, logits = fields.get("loss"), fields.get("logits")
    if not isinstance(loss, Tensor) or not isinstance(logits, Tensor) or loss.numel() != 1:
        return None
    loss, logits = (tensor.full_tensor() if is_dtensor(tensor) else tensor for tensor in (loss, logits))
    if logits.shape[:2] != ids.shape:
        return None
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return loss, F.cross_entropy(wide[0, :-1], ids[0, 1:])


@contextlib.contextmanager
def _without_traces(model: nn.Module, inner: nn.Module, device: torch.device) -> Generator[None]:
    """Run a model without gradients, dropout, statistics, compiler and draws, and leave its modes unchanged.

    The causal model itself stays in training: it may add a term then only.
    """
    modes = {module: module.training for module in model.modules()}
    devices = [] if device.type == "cpu" else [device]
    model.eval()
    inner.training = modes[inner]
    try:
        with (
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
            torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"),
        ):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
            if is_fsdp2(module):
                module.reshard()  # a forward without gradients may leave it gathered
