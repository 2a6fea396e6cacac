"""A warning about modules that learn in their forward, which sees a microbatch and not the update.

Batch norm, a codebook with moving averages and a queue of negatives are such modules. Buffers on the CPU are compared
by value, others by their write counts, so that nothing waits for a device.
"""

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.core.contract import REFUSES_MEANS
from megabatch.core.wrapper import Wrapper
from megabatch.inspection.error_kinds import rank_of_process
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.classes import is_dtensor
from megabatch.torch_private.module_members import name_without_wrappers, transient_buffers
from megabatch.torch_private.operations import is_fake

BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Their statistics do not enter the outputs in training mode.
HARMLESS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
# Calls with new losses whose modules are looked at.
MAX_CALLS = 8
# Names in one warning.
MAX_NAMES = 4
MAX_COMPARED_ELEMENTS = 1 << 22


class State(NamedTuple):
    """The tensor ``key`` of a module before a call. ``values`` is a copy, or None where write counts decide."""

    name: str
    module: nn.Module
    key: str
    tensor: Tensor
    writes: int
    values: Tensor | None


class LearningModules:
    """Warns once of each module that learns in the forwards of a call."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._states: list[State] = []
        self._named: set[str] = set()
        self._num_calls = 0

    def note(self) -> None:
        """Note the state of the modules in training mode, before a call with a new loss."""
        self._states = []
        # `verify` measures what these modules change.
        if self._num_calls == MAX_CALLS or not REFUSES_MEANS.get():
            return
        self._num_calls += 1
        for index, model in enumerate(self._wrapper.models):
            place = f"model {index}'s " if len(self._wrapper.models) > 1 else ""
            inner = model.module if isinstance(model, DistributedDataParallel) else model
            for name, module in inner.named_modules():
                if module.training and not isinstance(module, HARMLESS):
                    path = name_without_wrappers(name)
                    self._states.extend(self._states_of(place + repr(path), module))

    def forget(self) -> None:
        """Forget the state, after a call that failed."""
        self._states = []

    def check(self) -> None:
        """Warn of the modules whose state has changed."""
        states, self._states = self._states, []
        unnamed = [state for state in states if state.name not in self._named]
        learning = {state.name: state.module for state in filter(self._has_changed, unnamed)}
        self._named.update(learning)
        if not learning or rank_of_process() != 0:
            return
        names = [f"{name} ({type(module).__name__})" for name, module in learning.items()]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        warnings.warn(
            f"modules learn in their forward: {', '.join(names[:MAX_NAMES])}{more}. A forward sees a microbatch and "
            "not the update, so the gradient depends on how the update is cut; freeze their statistics (eval() of "
            "these modules), use GroupNorm for batch norm, or change buffers after finalize(). verify() measures the "
            "difference",
            stacklevel=2,
        )

    def _states_of(self, name: str, module: nn.Module) -> Iterator[State]:
        """Yield the tensors of a module that its forward may change."""
        if isinstance(module, BATCH_NORM):
            # Without a count of batches it has no statistics but those of the microbatch.
            counter = module.num_batches_tracked
            if counter is None:
                yield State(name, module, "", torch.empty(0, device="cpu"), -1, None)
            else:
                yield State(name, module, "num_batches_tracked", counter, count_writes(counter), None)
            return
        transient = transient_buffers(module)
        for key, buffer in module.named_buffers(recurse=False):
            # A number of steps or batches is a count, and a buffer that is not saved is a cache.
            is_count = buffer.numel() == 1 and not buffer.is_floating_point()
            if not (is_count or key in transient or buffer.is_inference()):
                values = buffer.clone() if _is_comparable(buffer) else None
                yield State(name, module, key, buffer, count_writes(buffer), values)
        if not self._wrapper.forwards_meet:
            for key, parameter in module.named_parameters(recurse=False):
                if not (parameter.requires_grad or parameter.is_inference()):
                    yield State(name, module, key, parameter, count_writes(parameter), None)

    def _has_changed(self, state: State) -> bool:
        tensor = getattr(state.module, state.key, None) if state.key else state.tensor
        if not isinstance(tensor, Tensor):
            return False
        if state.values is not None:
            return not _are_equal(tensor, state.values)
        # DDP writes the buffers of one rank to the others before a forward.
        is_written_by_wrapper = self._wrapper.writes_buffers and not isinstance(state.module, BATCH_NORM)
        return not is_written_by_wrapper and (tensor is not state.tensor or count_writes(tensor) != state.writes)


def _is_comparable(buffer: Tensor) -> bool:
    """Return True for a buffer whose values may be read without waiting."""
    is_plain = buffer.layout == torch.strided and not is_dtensor(buffer) and not is_fake(buffer)
    return is_plain and buffer.device.type == "cpu" and buffer.numel() <= MAX_COMPARED_ELEMENTS


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors have the same values; NaN is NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
