"""Passes: a loss's forward and its backward, as they are seen from outside of the library and of any wrapper."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable

from megabatch.losses import LossFunction, loss_hooks


def in_place_of(loss_fn: LossFunction, watched: Callable[[Any, Any], Any]) -> LossFunction:
    """``watched``, which says of its data what the loss says, and by `inspect.unwrap` what it stands for."""
    for name, hook in {**loss_hooks(loss_fn)._asdict(), "__wrapped__": loss_fn}.items():
        setattr(watched, name, hook)
    return watched


def around_backward(total: Tensor, begins: Callable[[], object], ends: Callable[[], object]) -> None:
    """Call ``begins`` and ``ends`` at the two ends of the total's backward.

    A wrapper queues its own wait later, so ``ends`` comes before it.
    """

    def begin(_: Tensor) -> None:
        begins()
        cast(Any, Variable)._execution_engine.queue_callback(ends)

    total.register_hook(begin)


def now(device: torch.device) -> Any:
    """Return the host's time, or an event on the GPU's stream. Nothing waits for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def total_of(returned: Any) -> Tensor | None:
    """Return the first total with a gradient of a loss's result, or None. The library refuses a wrong result."""
    pairs = list(cast(Mapping[str, Any], returned).values()) if isinstance(returned, Mapping) else [returned]
    totals = [cast(Sequence[Any], pair)[0] for pair in pairs if isinstance(pair, tuple | list) and pair]
    return next((each for each in totals if isinstance(each, Tensor) and each.requires_grad), None)
