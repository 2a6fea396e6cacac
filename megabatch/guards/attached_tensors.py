"""Detection of per-sample gradients, which other code computes in the backward and attaches to the model.

Opacus and BackPACK have hooks that read the gradient of each sample. Before its backward, a total is divided by the
weight of the update, so these gradients are as much too small. Only host-side identities and write counts are compared.
"""

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from megabatch.core.wrapper import Wrapper
from megabatch.errors import LossContractError
from megabatch.torch_private.autograd import count_writes
from megabatch.torch_private.module_members import has_backward_hooks

# Attributes of a module with its tensors.
MEMBERS = ("_parameters", "_buffers", "_modules")


class Attachment(NamedTuple):
    """A tensor in an attribute of a parameter or of a module with backward hooks."""

    holder: nn.Parameter | nn.Module
    name: str
    tensor: Tensor


class AttachedTensors:
    """Compares the tensors that are attached to the model before a call with those after it."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper
        self._modules: list[nn.Module] = []
        self._writes: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def note(self, *, looks_at_modules: bool) -> None:
        """Note the tensors before a call. ``looks_at_modules`` is True for the first call of a loss."""
        self._modules = []
        if looks_at_modules:
            for model in self._wrapper.models:
                self._modules.extend(module for module in model.modules() if has_backward_hooks(module))
        self._writes = {}
        for attachment in self._attachments():
            tensor = attachment.tensor
            self._writes[id(tensor)] = weakref.ref(tensor), count_writes(tensor)

    def check(self, total_factor: float) -> None:
        """Raise `LossContractError` for a new tensor, if totals were multiplied by another factor than 1."""
        if total_factor == 1.0:
            return
        for holder, name, tensor in self._attachments():
            reference, writes = self._writes.get(id(tensor), (None, 0))
            is_known = reference is not None and reference() is tensor
            if is_known and writes == count_writes(tensor):
                continue
            kind = "parameter" if isinstance(holder, nn.Parameter) else type(holder).__name__
            raise LossContractError(
                f"a hook left {name!r} of shape {tuple(tensor.shape)} on a {kind} while the backward ran, where "
                f"megabatch had multiplied the loss by {total_factor:.4g}: gradients of samples are off by that; "
                "give a loss without weigh=, and a model without DistributedDataParallel, or remove the hook"
            )

    def _attachments(self) -> Iterator[Attachment]:
        """Yield the attached tensors, without scalars, which may be statistics for a log."""
        holders: list[nn.Parameter | nn.Module] = [*self._wrapper.accumulating, *self._modules]
        # Most parameters have no attribute, and calls look at all of them.
        for holder in filter(vars, holders):
            for name, value in vars(holder).items():
                tensors = () if name in MEMBERS else _tensors_in(value)
                for tensor in tensors:
                    if tensor.ndim:
                        yield Attachment(holder, name, tensor)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors of a list, tuple or mapping."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from chain.from_iterable(map(_tensors_in, value))
    elif isinstance(value, dict):
        yield from chain.from_iterable(map(_tensors_in, value.values()))
