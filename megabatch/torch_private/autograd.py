"""Gradients, their hooks, and the backward that runs."""

import operator
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

count_writes: Callable[[Tensor], int] = operator.attrgetter("_version")  # in place; called for every gradient


# Hooks on a parameter's gradient, and its own attributes; asked of every parameter in every call.
own_of_parameter = operator.attrgetter("_backward_hooks", "_post_accumulate_grad_hooks", "__dict__")


def hooks_before_grad(parameter: Any) -> list[Callable[..., Any]]:
    """``Tensor._backward_hooks``: hooks that see a gradient before it is added."""
    return list((parameter._backward_hooks or {}).values())


def hooks_after_grad(parameter: Any) -> list[Callable[..., Any]]:
    """``Tensor._post_accumulate_grad_hooks``: hooks that run when a gradient was added."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())


# Where torch defines the hooks that its wrappers and its memory tracker put on parameters, and megabatch's own. torch's
# other functions are no hooks of torch: a user may register any of them.
HOMES_OF_HOOKS = (
    "megabatch.", "torch.distributed._composable.", "torch.distributed._tools.",
    "torch.distributed.fsdp.", "torch.nn.parallel.distributed.",
)  # fmt: skip


def home_of_hook(hook: Any) -> str:
    """Return the module in which a hook's code is defined; "" for an object that is called, and for code in C."""
    while True:
        if isinstance(hook, partial):
            hook = hook.func
        elif isinstance(hook, types.MethodType):
            hook = hook.__func__
        elif not isinstance(hook, types.FunctionType):
            return ""
        elif hook.__globals__.get("__name__") == "torch.utils._contextlib" and hasattr(hook, "__wrapped__"):
            hook = vars(hook)["__wrapped__"]  # torch.no_grad() as a decorator
        else:
            return str(hook.__globals__.get("__name__"))


def is_transformed() -> bool:
    """``torch._C._are_functorch_transforms_active``: whether torch.func is at work."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def keeps_graph() -> bool:
    """Return True if the running backward keeps its graph, in which case it may run again."""
    return cast(Any, torch)._C._autograd._get_current_graph_task_keep_graph()  # pyright: ignore[reportPrivateUsage]


def call_after_backward(function: Callable[[], None]) -> None:
    """``_execution_engine.queue_callback``: call a function at the end of the backward that runs."""
    cast(Any, torch.autograd.Variable)._execution_engine.queue_callback(function)


def inputs_of_node(node: Any) -> Sequence[Any]:
    """``Node._input_metadata``: shape, dtype and device of the gradients that a node of autograd is given."""
    return node._input_metadata


def class_of_function(node: torch.autograd.function.BackwardCFunction) -> type:
    """``_forward_cls``: the autograd.Function whose backward a node runs."""
    return cast(Any, type(node))._forward_cls


def is_in_backward() -> bool:
    """``torch._C._current_graph_task_id``: whether this thread runs a backward."""
    return cast(Any, torch)._C._current_graph_task_id() != -1


def backward_id() -> int:
    """``torch._C._current_graph_task_id``: the number of the backward that this thread runs."""
    return cast(Any, torch)._C._current_graph_task_id()


def is_in_function_backward() -> bool:
    """Return True inside the backward of a Python autograd function, where reentrant checkpointing begins another."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    code = torch.autograd.function.BackwardCFunction.apply.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
