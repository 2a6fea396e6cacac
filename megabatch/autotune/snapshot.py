"""What measured updates may move besides gradients of the model, kept and put back."""

import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.torch_private import buffers_of, is_flat_parameter, is_fsdp1, transient_buffers
from megabatch.wrappers.base import local
from megabatch.wrappers.gradients import graph_leaves

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}  # its tables of parameters, buffers, modules and hooks
OF_TORCH = "__composable_api"  # where fully_shard and replicate keep their own, in the user's modules
# Hooks by which a model of transformers returns router_logits stay; without this flag they would be laid twice.
OF_HOOKS = "_output_capturing_hooks_installed"
CONTAINERS = (dict, OrderedDict, defaultdict, Counter, set, list)


class ModuleSnapshot:
    """What a forward may move in a module: its mode, its buffers, and attributes of its own.

    Attributes are kept as they are, with the numbers of a tensor and the entries of a dictionary or list. Those that
    carry a gradient are let be: wrappers lay parameters there.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._is_training = module, module.training
        self._transient = transient_buffers(module).copy()
        self._buffers = [(name, each, _copied(each)) for name, each in buffers_of(module).items()]
        self._own = [(name, each, _copied(each)) for name, each in _own(module).items()]
        self._syncs = module.require_forward_param_sync if isinstance(module, DistributedDataParallel) else None

    def put_back(self) -> None:
        self._module.training = self._is_training
        buffers_of(self._module).clear()
        for name, each, copied in self._buffers:
            buffers_of(self._module)[name] = _as_it_was(each, copied)
        transient_buffers(self._module).clear()
        transient_buffers(self._module).update(self._transient)
        for name in _own(self._module).keys() - {name for name, _, _ in self._own}:
            del vars(self._module)[name]
        for name, each, copied in self._own:
            vars(self._module)[name] = _as_it_was(each, copied)
        if self._syncs is not None:
            cast(DistributedDataParallel, self._module).require_forward_param_sync = self._syncs


class ExternalGrads:
    """Gradients of trainable tensors that a loss reaches and that are not the model's."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._known = set(map(id, parameters))
        self._noted: dict[int, tuple[Tensor, Tensor | None, Any]] = {}

    def note(self, totals: Sequence[Tensor]) -> None:
        """Before a backward from ``totals``."""
        for leaf in graph_leaves(totals):
            if id(leaf) not in self._known | self._noted.keys() and not is_flat_parameter(leaf):
                self._noted[id(leaf)] = leaf, leaf.grad, _copied(leaf.grad)

    def put_back(self) -> None:
        for leaf, found, copied in self._noted.values():
            leaf.grad = _as_it_was(found, copied)


@torch.no_grad()
def norms(parameters: Iterable[nn.Parameter]) -> list[bytes]:
    """Of what this rank holds of each, its norm: others where that has moved, even one that is not a number."""
    found = [float(torch.linalg.vector_norm(local(each.data).detach().float())) for each in parameters]
    return [struct.pack("d", math.nan if math.isnan(each) else each) for each in found]


def _own(module: nn.Module) -> dict[str, Any]:
    """The attributes that a forward may set."""
    if isinstance(module, DistributedDataParallel) or is_fsdp1(module):  # their attributes say what they have reduced
        return {}
    return {
        name: each
        for name, each in vars(module).items()
        if name not in OF_EVERY_MODULE
        and name != OF_HOOKS
        and not name.startswith(OF_TORCH)
        and not (isinstance(each, Tensor) and each.requires_grad)
    }


def _copied(value: Any) -> Any:
    """What may be written to in place, by itself; None for what may not."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in CONTAINERS else None


@torch.no_grad()
def _as_it_was(value: Any, copied: Any) -> Any:
    """The same object, holding what it held; a tensor that was not written to is not touched."""
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
