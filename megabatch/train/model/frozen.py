"""The frozen base of adapters: in four bits if the recipe says so, identified by its bits, and in no checkpoint.

transformers puts a base's linear layers into bitsandbytes' layers of four bits, and back. A resumed run takes the base
from ``model.name``. A checksum over the bits of each weight says that it is the same.
"""

import importlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from megabatch import Learner
from megabatch.errors import MegabatchError, install_command
from megabatch.train.config import ModelConfig
from megabatch.train.model.architecture import silence
from megabatch.train.parallel.wrap import WrapperChoice, computing_dtype
from megabatch.train.runtime.ranks import Ranks

# By bytes of a number, the integer type with the same bits.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Numbers that are summed at a time, each in a copy of eight bytes.
SLICE = 2**22


def check_four_bits(outline: nn.Module, config: ModelConfig, wrapper: WrapperChoice) -> None:
    """Raise `MegabatchError` where the model or its wrapper cannot have a base in four bits."""
    if config.quantize is None:
        return
    if config.name is None:
        raise MegabatchError(
            f"model.quantize is {config.quantize!r} and model.config gives fresh weights, which are not quantized; "
            "name a model in model.name, or leave quantize out"
        )
    if wrapper.is_of_fsdp:
        raise MegabatchError(
            f"model.quantize is {config.quantize!r} and the wrapper {wrapper.name} ({wrapper.reason}), which "
            'cannot cut weights of four bits; set parallel.wrapper to "ddp", or leave quantize out'
        )
    # transformers would dequantize a Conv1D to a transposed matrix, which from_pretrained cannot read.
    if not four_bit_candidates(outline) or any(isinstance(module, Conv1D) for module in outline.modules()):
        raise MegabatchError(
            f"model.quantize is {config.quantize!r} and the layers of a {type(outline).__name__} are not torch's "
            "linear ones; leave quantize out"
        )


def four_bit_candidates(outline: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that transformers puts into four bits, by name."""
    model = cast(PreTrainedModel, outline)
    skipped = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]  # pyright: ignore[reportPrivateUsage]
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    return {name: layer for name, layer in layers.items() if should_convert_module(name, skipped)}


def four_bit_options(config: ModelConfig) -> dict[str, Any]:
    """Return what ``from_pretrained`` needs to quantize the base, on the CPU: its bits are the same on every device.

    Raises `MegabatchError` where bitsandbytes is not installed.
    """
    if config.quantize is None:
        return {}
    try:
        with silence():
            importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        raise MegabatchError(
            f"model.quantize is set and {error.name} is not installed; {install_command('qlora')}"
        ) from None
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=config.quantize, bnb_4bit_use_double_quant=config.double_quantization,
        bnb_4bit_compute_dtype=computing_dtype(config),
    )  # fmt: skip
    return {"quantization_config": quantization, "device_map": {"": "cpu"}}


def prepare_four_bits(model: nn.Module, config: ModelConfig) -> None:
    """Make bitsandbytes' layers keep their numbers: in eval(), in a bias and in a state dict.

    Raises `MegabatchError` for a layer whose weights were not saved.
    """
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "quant_state")}
    for name, layer in layers.items():
        if not hasattr(layer.weight, "quant_state"):
            raise MegabatchError(
                f"model.quantize is {config.quantize!r} and the files of model.name = {config.name!r} have no "
                f"{name}.weight to quantize; leave quantize out, or name another model"
            )
        # On some processors the layer would repack its weights in eval() and have no backward after that.
        layer.support_avx512bf16_for_cpu = False
        if layer.bias is not None:
            # The layer would cast its bias to the dtype of computing for good.
            layer.compute_dtype = layer.bias.dtype
        layer.register_state_dict_post_hook(leave_out_scales)


def leave_out_scales(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
    """Take a layer's scales out of a state dict, which the layer itself would not load."""
    for key in [key for key in state if key.startswith(f"{prefix}weight.")]:
        del state[key]


def dequantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Put torch's linear layers, of the numbers that the bits stand for, in place of those in four bits."""
    names = [name for name, _ in four_bits(model)]
    if names:
        with silence():
            cast(Any, model).dequantize(dtype)
    for name in names:
        model.get_parameter(name).requires_grad_(False)


def kind_of(config: ModelConfig) -> str:
    return f"{config.quantize}, scales in 8 bits" if config.double_quantization else f"{config.quantize}"


def four_bits(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each weight in four bits, and its layer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "quant_state"):
            yield f"{name}.weight", module


def described(model: nn.Module) -> dict[str, list[object]]:
    """Return dtype and shape of each parameter, as json. A weight in four bits has its format as dtype."""
    return {name: [dtype_name(weight), *shape_of(weight)] for name, weight in model.named_parameters()}


def dtype_name(weight: Tensor) -> str:
    """Return the dtype of a parameter, or the four-bit format."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return str(weight.dtype).removeprefix("torch.")
    return f"{state.quant_type}, scales in 8 bits" if state.nested else str(state.quant_type)


def shape_of(weight: Tensor) -> torch.Size:
    state: Any = getattr(weight, "quant_state", None)
    return weight.shape if state is None else torch.Size(state.shape)


def stored(weight: Tensor) -> list[Tensor]:
    """Return all tensors that are kept of a weight: itself, and its scales if it is in four bits."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return [weight]
    scales = [state.absmax, state.offset, state.state2.absmax] if state.nested else [state.absmax]
    return [weight, *scales]


def sealed(identity: dict[str, Any], model: nn.Module, names: Collection[str], ranks: Ranks) -> dict[str, Any]:
    """Return a model's identity with a checksum beside the shape of each of these weights. Collective."""
    local_sums = {name: sum_of_bits(weight, ranks) for name, weight in model.named_parameters() if name in names}
    rank_sums = ranks.gather(local_sums) if names else []
    parameters = identity["parameters"]
    added: dict[str, list[object]] = {}
    for name in local_sums:
        checksum = sum(sums[name] for sums in rank_sums) % 2**64
        added[name] = [*parameters[name], f"{checksum:016x}"]
    return {**identity, "parameters": {**parameters, **added}}


@torch.no_grad()
def sum_of_bits(weight: Tensor, ranks: Ranks) -> int:
    """Return this rank's part of a checksum: the sum of a weight's numbers, each read as an integer.

    Of the ranks that hold the same numbers the first one counts.
    """
    if not isinstance(weight, DTensor):
        return sum_of(stored(weight)) if ranks.is_main else 0
    mesh, placements = weight.device_mesh, enumerate(weight.placements)
    is_first = all(mesh.get_local_rank(axis) == 0 for axis, placement in placements if placement.is_replicate())
    return sum_of([weight.to_local()]) if is_first else 0


def sum_of(tensors: Iterable[Tensor]) -> int:
    """Return the sum of all of their numbers, each read as an integer."""
    read = (tensor.detach().contiguous().view(BITS[tensor.element_size()]).flatten() for tensor in tensors)
    return sum(int(part.sum(dtype=torch.int64)) for bits in read for part in bits.split(SLICE))


def check_same_bits(model: nn.Module, ranks: Ranks) -> None:
    """Raise where ranks have made other bits of the same base, as processors of another kind may. Collective."""
    local_sums = {name: sum_of(stored(layer.weight)) for name, layer in four_bits(model)}
    rank_sums = ranks.gather(local_sums) if local_sums else []
    name = next((name for name in local_sums if len({sums[name] for sums in rank_sums}) > 1), None)
    if name is not None:
        raise MegabatchError(
            f"model.quantize is set and {name} has other bits on other ranks: their processors or versions of "
            "bitsandbytes differ; use machines of one kind, or leave quantize out"
        )


class TrainedOnly:
    """A learner that is saved without its model's frozen base."""

    def __init__(self, learner: Learner, left_out: Collection[str]) -> None:
        self._learner, self._left_out = learner, left_out

    def state_dict(self) -> dict[str, Any]:
        state = self._learner.state_dict()
        return {**state, "model": {name: value for name, value in state["model"].items() if name not in self._left_out}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        full_state = get_model_state_dict(self._learner.model)
        self._learner.load_state_dict({**state, "model": {**full_state, **state["model"]}})
