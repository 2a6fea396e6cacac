"""Classes of torch that are imported only where a model needs them."""

import sys
from typing import Any, TypeGuard

from torch import Tensor


# Importing DTensor or FSDP takes 0.7 s, so a check for one of their classes does not: where nobody has imported the
# module of a class, nothing is an instance of it.
def is_instance_of(value: object, module: str, *names: str) -> bool:
    """Return True for an instance of a class of a module, by their names."""
    loaded = sys.modules.get(module)
    return loaded is not None and any(isinstance(value, getattr(loaded, name, ())) for name in names)


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Return True for a DTensor."""
    return is_instance_of(value, "torch.distributed.tensor", "DTensor")


def is_partial(placement: object) -> bool:
    """Return True for the placement Partial, under which each rank has a part of a sum."""
    return is_instance_of(placement, "torch.distributed.tensor", "Partial")


def is_fsdp1(module: object) -> TypeGuard[Any]:
    """Return True for a module that FSDP1 has wrapped."""
    return is_instance_of(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def is_fsdp2(module: object) -> TypeGuard[Any]:
    """Return True for a module that was given to fully_shard, or to the replicate built on it."""
    return is_instance_of(module, "torch.distributed.fsdp", "FSDPModule")


def is_flat_parameter(value: object) -> bool:
    """Return True for a flat parameter of FSDP1, which holds the parameters of several modules."""
    return is_instance_of(value, "torch.distributed.fsdp._flat_param", "FlatParameter")


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the shard of a DTensor, outside of autograd. Return any other tensor unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def is_replicate_module(module: object) -> bool:
    """Return True for a module that was given to the replicate built on FSDP2, which has no public name."""
    return is_instance_of(module, "torch.distributed._composable.replicate_with_fsdp", "ReplicateModule")
