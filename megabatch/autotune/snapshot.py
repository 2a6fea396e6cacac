"""Snapshots of what a forward changes in a module, to be put back."""

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.core.wrapper import local
from megabatch.torch_private.classes import is_fsdp1
from megabatch.torch_private.module_members import buffers_of, transient_buffers

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}  # tables of parameters, buffers, modules and hooks
OF_TORCH = "__composable_api"  # attributes of fully_shard and replicate in the user's modules
# Hooks with which a transformers model returns router_logits stay; without this flag it would install them twice.
OF_HOOKS = "_output_capturing_hooks_installed"
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, set, list)


class ModuleSnapshot:
    """A copy of what a forward may change in a module, without its submodules: mode, buffers, attributes of its own.

    It keeps each attribute, with the numbers of a tensor and the entries of a dictionary, set or list. It skips tensors
    that require a gradient, since wrappers store parameters there.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._is_training = module, module.training
        self._transient = transient_buffers(module).copy()
        self._buffers = [(name, buffer, _copy(buffer)) for name, buffer in buffers_of(module).items()]
        self._own = [(name, attribute, _copy(attribute)) for name, attribute in _own_attributes(module).items()]
        self._syncs = module.require_forward_param_sync if isinstance(module, DistributedDataParallel) else None

    def put_back(self) -> None:
        """Set the module to what it was, in place."""
        self._module.training = self._is_training
        buffers_of(self._module).clear()
        for name, buffer, copied in self._buffers:
            buffers_of(self._module)[name] = _restore(buffer, copied)
        transient_buffers(self._module).clear()
        transient_buffers(self._module).update(self._transient)
        for name in _own_attributes(self._module).keys() - {name for name, _, _ in self._own}:
            del vars(self._module)[name]
        for name, attribute, copied in self._own:
            vars(self._module)[name] = _restore(attribute, copied)
        if self._syncs is not None:
            cast(DistributedDataParallel, self._module).require_forward_param_sync = self._syncs


@torch.no_grad()
def parameter_norms(parameters: Iterable[nn.Parameter]) -> list[bytes]:
    """Return the norm of each local parameter as bytes, which differ after a change, even for NaN."""
    norms = [float(torch.linalg.vector_norm(local(parameter.data).detach().float())) for parameter in parameters]
    return [struct.pack("d", math.nan if math.isnan(norm) else norm) for norm in norms]


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a forward may set; those of DDP and FSDP1 record past reductions."""
    if isinstance(module, DistributedDataParallel) or is_fsdp1(module):
        return {}
    return {
        name: attribute
        for name, attribute in vars(module).items()
        if name not in OF_EVERY_MODULE
        and name != OF_HOOKS
        and not name.startswith(OF_TORCH)
        and not (isinstance(attribute, Tensor) and attribute.requires_grad)
    }


def _copy(value: Any) -> Any:
    """Copy a value that can change in place; None for others."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in CONTAINERS else None


@torch.no_grad()
def _restore(value: Any, copied: Any) -> Any:
    """Return the same object with its old contents; an unchanged tensor is not written."""
    if isinstance(value, Tensor):
        if not _same(local(value), local(copied)):
            value.copy_(copied)
    elif type(value) is list:
        value[:] = copied
    elif type(value) in CONTAINERS:
        value.clear()
        value.update(copied)
    return value


def _same(now: Tensor, before: Tensor) -> bool:
    if now.is_meta:
        return True
    return now.layout == before.layout == torch.strided and now.shape == before.shape and torch.equal(now, before)
