"""What a forward may move in a module besides its gradients, kept and put back."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.plain import local


class Kept:
    """What a forward may move in a module besides parameters: buffers, training or not, and what DDP notes."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._is_training = module, module.training
        self._buffers = {
            name: (each, None if each is None else each.detach().clone())
            for name, each in module._buffers.items()  # pyright: ignore[reportPrivateUsage]
        }
        self._syncs = module.require_forward_param_sync if isinstance(module, DistributedDataParallel) else None

    @torch.no_grad()
    def put_back(self) -> None:
        self._module.training = self._is_training
        for name, (buffer, before) in self._buffers.items():
            if buffer is not None and before is not None:
                buffer.copy_(before)
            setattr(self._module, name, buffer)
        if self._syncs is not None:
            cast(DistributedDataParallel, self._module).require_forward_param_sync = self._syncs


@torch.no_grad()
def norms(parameters: Iterable[nn.Parameter]) -> list[float]:
    """A number for each that differs where what this rank holds of it does."""
    return [float(torch.linalg.vector_norm(local(each.data).detach().float())) for each in parameters]
