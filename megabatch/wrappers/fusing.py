"""Weight gradients of linear layers, added where they are kept by the product that computes them.

Autograd writes a weight's gradient, then reads it and the sum so far, and writes their sum: for few tokens this takes
as long as the product. ``grad.addmm_(output_gradients.T, inputs)`` reads the sum and writes it, once.
"""

import contextlib
import types
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.hooks import RemovableHandle

from megabatch.errors import PlanError

DTYPES = (torch.float32, torch.float64)  # in a coarser one a product may round before it adds
# A float32 layer, forward and backward on one thread of a CPU, is 0.87 times as fast at 724 x 724, 1.24 at 1024 x 1024,
# 1.44 at 1448 x 1448 for 16 tokens; 0.93, 1.03 and 1.10 for 64; 1.00 to 1.05 for 256. Elsewhere it is not measured.
MIN_ELEMENTS = 1 << 20


class Fusing:
    """Puts another forward into linear layers while a call runs: the same numbers, and a backward that adds.

    An exact `torch.nn.Linear` alone is taken, with a large weight that no other module has. It goes the plain way where
    its gradient is looked at on its way (hooks, autograd.grad, create_graph, forward mode), and under autocast,
    torch.compile and torch.func. A product and a sum are rounded together here, one after the other there.

    Args:
        models: Those that are called.
        parameters: Whose whole gradient is in ``p.grad`` from microbatch to microbatch.
        may_add: Whether, in the microbatch that runs, only autograd waits for a gradient to be added.

    Raises `PlanError` where there is no such layer.
    """

    def __init__(
        self, models: Sequence[nn.Module], parameters: Sequence[nn.Parameter], may_add: Callable[[], bool]
    ) -> None:
        self._layers, self._may_add = _layers(models, parameters), may_add
        self._is_open = False
        self._begun: dict[int, RemovableHandle] = {}  # weights to which a backward adds, by id, until it is done
        if not self._layers:
            raise PlanError(
                f"fuse_accumulation finds no torch.nn.Linear of {MIN_ELEMENTS} or more elements in float32 or float64 "
                "that keeps the whole gradient of a weight of its own from microbatch to microbatch; leave it out, or "
                "for shards give sync='last'"
            )

    @property
    def is_half_added(self) -> bool:
        """Whether a backward that failed has added a part of some weight's gradient, and not the rest."""
        return bool(self._begun)

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Surrounds a call."""
        layers = [each for each in self._layers if type(each) is nn.Linear and "forward" not in vars(each)]
        for layer in layers:  # a method, so that a copy of the layer has a method of its own
            layer.forward = types.MethodType(self._forward, layer)
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False
            self._begun.clear()
            for layer in layers:
                vars(layer).pop("forward", None)

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Until it ends, all layers go the plain way."""
        was_open, self._is_open = self._is_open, False
        try:
            yield
        finally:
            self._is_open = was_open

    def _forward(self, layer: nn.Linear, inputs: Tensor) -> Tensor:
        if not (self._is_open and self._may_add() and _is_plain(layer.weight, inputs)):
            return nn.Linear.forward(layer, inputs)
        # By rows, since autograd does not let a function's output be a view that is written to.
        outputs = _Linear.apply(inputs.flatten(0, -2), layer.weight, layer.bias, self)  # [R, out]
        return outputs.view(*inputs.shape[:-1], layer.out_features)

    def add(self, weight: nn.Parameter, node: Any, gradients: Tensor, inputs: Tensor) -> bool:
        """Add ``gradients.T @ inputs`` to the weight's gradient, if autograd would; ``node`` is where it would."""
        total = weight.grad
        if total is None or torch.is_grad_enabled() or not self._may_add():
            return False
        if not _takes(total, weight) or _has_hooks(weight) or not _runs(node):
            return False
        if id(weight) not in self._begun:
            self._begun[id(weight)] = node.register_hook(partial(self._done, id(weight)))
        total.addmm_(gradients.T, inputs)
        return True

    def _done(self, weight_id: int, *_: object) -> None:
        if (handle := self._begun.pop(weight_id, None)) is not None:
            handle.remove()


class _Linear(torch.autograd.Function):
    """``inputs @ weight.T + bias``; its backward adds the weight's gradient itself, or returns it."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: nn.Parameter, bias: Tensor | None, fusing: Fusing) -> Tensor:
        ctx.save_for_backward(inputs, weight)  # which may come back as a copy
        ctx.weight, ctx.fusing = weight, fusing
        return F.linear(inputs, weight, bias)  # [R, out]

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradients,) = outputs  # [R, out]
        inputs, weight = ctx.saved_tensors  # [R, in], [out, in]
        of_inputs = gradients @ weight if ctx.needs_input_grad[0] else None
        of_bias = gradients.sum(0) if ctx.needs_input_grad[2] else None
        # Last, so that a failure of the others leaves the sum as it was.
        added = ctx.fusing.add(ctx.weight, ctx.next_functions[1][0], gradients, inputs)
        return of_inputs, None if added else gradients.T @ inputs, of_bias, None


def _layers(models: Sequence[nn.Module], parameters: Sequence[nn.Parameter]) -> list[nn.Linear]:
    """Large linear layers whose weight is one of ``parameters`` and in no other module."""
    modules = {id(module): module for model in models for module in _uncompiled(model)}.values()
    owners: dict[int, int] = {}
    for model in models:
        for module in model.modules():
            for each in {id(each) for each in module.parameters(recurse=False)}:
                owners[each] = owners.get(each, 0) + 1
    large = [each for each in parameters if each.numel() >= MIN_ELEMENTS and each.dtype in DTYPES]
    own = {id(each) for each in large if owners.get(id(each)) == 1}
    return [each for each in modules if type(each) is nn.Linear and id(each.weight) in own]


def _uncompiled(module: nn.Module) -> Generator[nn.Module]:
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
        return
    yield module
    for child in module.children():
        yield from _uncompiled(child)


def _is_plain(weight: Tensor, inputs: Tensor) -> bool:
    """Whether a forward is one that autograd alone would differentiate, now and computed again."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_transformed():
        return False
    if type(weight) is not nn.Parameter or not weight.requires_grad or _has_hooks(weight):
        return False
    if type(inputs) not in (Tensor, nn.Parameter) or inputs.layout != torch.strided or inputs.ndim < 2:
        return False
    return inputs.dtype == weight.dtype in DTYPES and not torch.is_autocast_enabled(inputs.device.type)


def _is_transformed() -> bool:
    """Whether torch.func or forward mode is at work, which this function has no rules for."""
    transforms = torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]
    return transforms or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def _has_hooks(weight: Tensor) -> bool:
    known = cast(Any, weight)
    return bool(known._backward_hooks or known._post_accumulate_grad_hooks)


def _takes(total: Tensor, weight: Tensor) -> bool:
    """Whether a gradient is as autograd makes it for this weight, so that a product can be added to it."""
    alike = total.dtype == weight.dtype and total.shape == weight.shape and total.device == weight.device
    return alike and type(total) is Tensor and not total.requires_grad and total.is_contiguous()


def _runs(node: Any) -> bool:
    """Whether the backward that runs adds to the leaf whose node this is."""
    try:
        return torch._C._will_engine_execute_node(node)  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:  # torch.autograd.grad was asked for this very leaf
        return False
