"""Arithmetic of many tensors in one pass."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megabatch.torch_private.classes import local_tensor


def multiply_all(tensors: Sequence[Tensor], factor: float | Tensor) -> None:
    """``torch._foreach_mul_``: multiply tensors of one kind in place, in one pass. Of DTensors, the local ones."""
    # DTensor would find out anew how each list of other tensors is sharded.
    cast(Any, torch)._foreach_mul_(list(map(local_tensor, tensors)), factor)
