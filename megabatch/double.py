"""A model in float64 that stays there, so that what differs between two ways is not rounding."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from megabatch.batch import Microbatch
from megabatch.errors import PlanError
from megabatch.leaves import each_leaf, to_device
from megabatch.stages import Pipeline

LOW_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


class Float64WithoutDropout(TorchFunctionMode):
    """Inside, dropout passes its input on and a float64 tensor is never cast to a lower precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name and "attention" not in name and args:
            return args[0] if name != "native_dropout" else (args[0], torch.ones_like(args[0], dtype=torch.bool))
        if name == "scaled_dot_product_attention":
            kwargs["dropout_p"] = 0.0
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if name in ("float", "half", "bfloat16"):
                return args[0]
            if name == "_grouped_mm" and args[0].ndim == 2 and kwargs.get("offs") is not None:
                return _grouped_mm(args[0], args[1], kwargs["offs"])
            args = tuple(_kept(value) for value in args)
            kwargs = {key: _kept(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _grouped_mm(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """[n, k] by [experts, k, m]: each expert's weights for the rows up to its offset. Torch has none in float64."""
    ends = offsets.tolist()
    found = [rows[start:end] @ weight for start, end, weight in zip([0, *ends], ends, weights, strict=False)]
    return torch.cat([*found, rows.new_zeros(len(rows) - ends[-1], weights.shape[-1])])  # [n, m]


def _kept(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW_PRECISION else value


def float64_copy(model: nn.Module) -> nn.Module:
    """The model without its wrapper, in training. Raises `PlanError` for one that is sharded."""
    model = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)
    sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    if sharded or isinstance(model, Pipeline) or any(isinstance(each, DTensor) for each in model.parameters()):
        raise PlanError("verify was given a model that is sharded or cut into stages; verify it before that is done")
    double = copy.deepcopy(model).double()
    return double if model.training else double.train()  # in training, what was frozen by eval() stays so


def in_float64(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch on ``device``, what is floating in float64."""

    def to_float64(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return each_leaf(to_device(microbatch, device), to_float64)
