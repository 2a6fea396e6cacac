"""The frozen base of adapters: in four bits if the recipe says so, told apart by its bits, and in no checkpoint.

bitsandbytes makes the four-bit layers and computes with them. Whoever resumes a run gets the base from where the run
had it, and a checksum over the bits of each weight says that it is the same.
"""

import importlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from megabatch import Learner
from megabatch.errors import MegabatchError, install_command
from megabatch.train.config import Config, ModelConfig
from megabatch.train.model.architecture import silence
from megabatch.train.model.weights import ModelSource, fill
from megabatch.train.parallel.wrap import WrapperChoice, dtype_of
from megabatch.train.runtime.ranks import Ranks

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
SLICE = 2**22  # numbers that are summed at a time, each in a copy of eight bytes


def bitsandbytes() -> Any:
    """Import the package. Raises `MegabatchError` where it is not installed."""
    try:
        with silence():
            return importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        raise MegabatchError(
            f"model.quantize is set and {error.name} is not installed; {install_command('qlora')}"
        ) from None


def quantized(source: ModelSource, config: Config, wrapper: WrapperChoice) -> ModelSource:
    """Return the source with its model whole and in four bits, if the recipe asks for it.

    The bits are made on the CPU, so that they are the same on every device. Raises `MegabatchError` where the model or
    its wrapper cannot have them.
    """
    if config.model.quantize is None:
        return source
    check_four_bit_wrapper(config.model, wrapper)
    if source.units is not None:
        fill(source.model, source.units, config.run.seed, torch.device("cpu"), source.saved)
    words = quantize(source.model, config.model)
    return replace(source, text=f"{source.text}; {words}", units=None, saved=None)


def check_four_bit_wrapper(config: ModelConfig, wrapper: WrapperChoice) -> None:
    """Raise for a wrapper that cannot cut weights of four bits."""
    if config.quantize is not None and wrapper.is_of_fsdp:
        raise MegabatchError(
            f"model.quantize is {config.quantize!r} and the wrapper {wrapper.name} ({wrapper.reason}), which "
            'cannot cut weights of four bits; set parallel.wrapper to "ddp", or leave quantize out'
        )


def quantize(model: nn.Module, config: ModelConfig) -> str:
    """Put the linear layers that transformers would choose into four bits. Return a description."""
    layers = four_bit_candidates(model, config)
    bytes_before = sum(each.weight.nbytes for each in layers.values())
    for name, layer in layers.items():
        model.set_submodule(name, four_bit_layer(layer, config))
    num_bytes = sum(part.nbytes for _, each in four_bits(model) for part in stored(each.weight))
    return f"{len(layers)} linear layers in {kind_of(config)}: {num_bytes:,} bytes instead of {bytes_before:,}"


def four_bit_candidates(model: nn.Module, config: ModelConfig) -> dict[str, nn.Linear]:
    """Return the linear layers that ``model.quantize`` puts into four bits, by name. Raises `MegabatchError`."""
    assert isinstance(model, PreTrainedModel)
    left = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]  # pyright: ignore[reportPrivateUsage]
    found = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    layers = {name: each for name, each in found.items() if should_convert_module(name, left)}
    kind = str(config.quantize)
    if (odd := next((name for name, each in layers.items() if each.in_features % 2), None)) is not None:
        raise MegabatchError(
            f"model.quantize is {kind!r} and {odd} has an odd number of inputs, two of which go into a byte; leave "
            "quantize out"
        )
    if not layers or any(isinstance(module, Conv1D) for module in model.modules()):
        raise MegabatchError(
            f"model.quantize is {kind!r} and the layers of a {type(model).__name__} are not torch's linear ones; leave "
            "quantize out"
        )
    return layers


def four_bit_layer(linear: nn.Linear, config: ModelConfig) -> nn.Linear:
    """Return bitsandbytes' layer of the same numbers, frozen."""
    has_bias = "bias" in dict(linear.named_parameters())
    layers, options = (
        bitsandbytes().nn,
        {"quant_type": config.quantize, "compress_statistics": config.double_quantization},
    )
    computed = four_bit_dtype(linear, config)
    layer = layers.Linear4bit(
        linear.in_features, linear.out_features, has_bias, compute_dtype=computed, device="meta", **options
    )
    layer.weight = layers.Params4bit(linear.weight.detach(), requires_grad=False, **options).to("cpu")
    layer.bias = linear.bias
    layer.support_avx512bf16_for_cpu = False  # in eval() it would repack its weights and have no backward after that
    layer.register_state_dict_post_hook(leave_out_scales)
    return layer


def four_bit_dtype(linear: nn.Linear, config: ModelConfig) -> torch.dtype:
    """Return the dtype that a layer in four bits computes in; it casts its bias for good to that dtype."""
    has_bias = "bias" in dict(linear.named_parameters())
    return torch.bfloat16 if config.compute_dtype is not None and not has_bias else dtype_of(config)


def leave_out_scales(_: nn.Module, state: dict[str, Any], prefix: str, __: object) -> None:
    """Take a layer's scales out of a state dict, which the layer itself would not load."""
    for key in [key for key in state if key.startswith(f"{prefix}weight.")]:
        del state[key]


def dequantize(model: nn.Module, dtype: torch.dtype) -> None:
    """Put torch's linear layers, of the numbers that the bits stand for, in place of those in four bits."""
    for name, layer in list(four_bits(model)):
        path, values = name.removesuffix(".weight"), layer.weight.detach()
        linear = nn.Linear(layer.in_features, layer.out_features, device="meta")
        whole = bitsandbytes().functional.dequantize_4bit(values, layer.weight.quant_state)
        linear.weight, linear.bias = nn.Parameter(whole.to(dtype), requires_grad=False), layer.bias
        model.set_submodule(path, linear)


def kind_of(config: ModelConfig) -> str:
    """Return the name of the format."""
    return f"{config.quantize}, scales in 8 bits" if config.double_quantization else f"{config.quantize}"


def four_bits(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the name of each weight in four bits, and its layer."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and hasattr(module.weight, "quant_state"):
            yield f"{name}.weight", module


def described(model: nn.Module) -> dict[str, list[object]]:
    """Return dtype and shape of each parameter, as json. A weight in four bits has its format as dtype."""
    return {name: [dtype_name(each), *shape_of(each)] for name, each in model.named_parameters()}


def dtype_name(weight: Tensor) -> str:
    """Return the dtype of a parameter, or the four-bit format."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return str(weight.dtype).removeprefix("torch.")
    return f"{state.quant_type}, scales in 8 bits" if state.nested else str(state.quant_type)


def shape_of(weight: Tensor) -> torch.Size:
    """Return the shape of the numbers that a weight stands for."""
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
    own = {name: sum_of_bits(each, ranks) for name, each in model.named_parameters() if name in names}
    told = ranks.gather(own) if names else []
    parameters = identity["parameters"]
    added = {
        name: [*parameters[name], f"{sum(each[name] for each in told) % 2**64:016x}"] for name in (own if told else ())
    }
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
    return sum(int(part.sum(dtype=torch.int64)) for each in read for part in each.split(SLICE))


def check_same_bits(model: nn.Module, ranks: Ranks) -> None:
    """Raise where ranks have made other bits of the same base, as processors of another kind may. Collective."""
    own = {name: sum_of(stored(layer.weight)) for name, layer in four_bits(model)}
    told = ranks.gather(own) if own else []
    name = next((name for name in own if len({each[name] for each in told}) > 1), None)
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
        """Return the learner's state without the base."""
        state = self._learner.state_dict()
        return {**state, "model": {name: each for name, each in state["model"].items() if name not in self._left_out}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        whole = get_model_state_dict(self._learner.model)
        self._learner.load_state_dict({**state, "model": {**whole, **state["model"]}})
