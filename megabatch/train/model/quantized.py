"""Quantized: a frozen base whose linear layers are in four bits, under adapters.

bitsandbytes has the numbers' format and the kernels that read it. The product is torch's own: its Linear4bit computes
in the type of its first input, and in eval() it packs its weights, for processors with AVX512-BF16, into a layout that
has no backward. So a layer reads its matrix, in forward and again in backward, and multiplies in the type of what comes
in: the gradient is that of the linear layer of the numbers that four bits stand for, in float64 too.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from megabatch.errors import MegabatchError
from megabatch.train.config import Config, ModelConfig
from megabatch.train.model.initial import fill
from megabatch.train.model.silence import quiet
from megabatch.train.model.source import Source
from megabatch.train.model.wrap import Wrapper

BLOCK = 64  # numbers with a scale of their own, as bitsandbytes and transformers have it
CPU = torch.device("cpu")


def bitsandbytes() -> Any:
    """The package. Raises `MegabatchError` where it is not installed."""
    try:
        with quiet():
            return importlib.import_module("bitsandbytes")
    except ModuleNotFoundError as error:
        raise MegabatchError(
            f'model.quantize is set and {error.name} is not installed; pip install "megabatch[qlora]"'
        ) from None


def check_quantized(config: ModelConfig) -> None:
    """Raise for what does not go with a base in four bits, or where bitsandbytes is not there."""
    if config.quantize is None:
        if not config.double_quantization:
            raise MegabatchError("model.double_quantization is set and model.quantize is not; leave it out")
        return
    if config.lora is None:
        raise MegabatchError(
            f"model.quantize is {config.quantize!r} and model.lora is not set: four bits are not trained; set "
            "model.lora as well, or leave quantize out"
        )
    if config.function is not None:
        raise MegabatchError(
            "model.quantize is set and model.function makes a model of its own, which may use its weights other than "
            "by its layers; leave quantize out, or name a model by model.name or model.config"
        )
    if config.compile:
        raise MegabatchError("model.quantize and model.compile are set, which are not tested together; leave one out")
    bitsandbytes()


def quantized(source: Source, config: Config, wrapper: Wrapper) -> Source:
    """The source with its model whole and quantized, on the CPU, if the recipe asks for it: the same bits on every
    device. Raises `MegabatchError` where the model or its wrapper cannot have it."""
    if config.model.quantize is None:
        return source
    if wrapper.is_of_fsdp:
        raise MegabatchError(
            f"model.quantize is {config.model.quantize!r} and the wrapper {wrapper.name} ({wrapper.reason}), which "
            'cannot cut weights of four bits; set parallel.wrapper to "ddp", or leave quantize out'
        )
    if source.units is not None:
        fill(source.model, source.units, config.run.seed, CPU, source.saved)
    words = quantize(source.model, config.model)
    return replace(source, text=f"{source.text}; {words}", units=None, saved=None)


def quantize(model: nn.Module, config: ModelConfig) -> str:
    """Put the linear layers into four bits, as transformers chooses them; what was done, in words."""
    assert isinstance(model, PreTrainedModel)
    left = [*get_keys_to_not_convert(model), *(model._keep_in_fp32_modules or ())]  # pyright: ignore[reportPrivateUsage]
    found = {name: each for name, each in model.named_modules() if type(each) is nn.Linear}
    layers = {name: each for name, each in found.items() if should_convert_module(name, left)}
    check_layers(model, layers, str(config.quantize))
    bytes_before = sum(each.weight.nbytes for each in layers.values())
    for name, layer in layers.items():
        model.set_submodule(name, FourBit(layer, config))
    num_bytes = sum(part.nbytes for _, each in four_bits(model) for part in stored(each.weight))
    return f"{len(layers)} linear layers in {kind_of(config)}: {num_bytes:,} bytes instead of {bytes_before:,}"


def check_layers(model: nn.Module, layers: Mapping[str, nn.Linear], kind: str) -> None:
    """Raise where there is nothing to quantize, or something that would come out otherwise."""
    odd = next((name for name, each in layers.items() if each.in_features % 2), None)
    if odd is not None:
        raise MegabatchError(
            f"model.quantize is {kind!r} and {odd} has an odd number of inputs, two of which go into a byte; leave "
            "quantize out"
        )
    if not layers or any(isinstance(module, Conv1D) for module in model.modules()):
        raise MegabatchError(
            f"model.quantize is {kind!r} and the layers of a {type(model).__name__} are not torch's linear ones; leave "
            "quantize out"
        )


def kind_of(config: ModelConfig) -> str:
    """The type of the numbers."""
    return f"{config.quantize}, scales in 8 bits" if config.double_quantization else f"{config.quantize}"


class FourBit(nn.Linear):
    """A frozen linear layer in four bits, which computes as the linear layer of the numbers that they stand for."""

    def __init__(self, linear: nn.Linear, config: ModelConfig) -> None:
        super().__init__(linear.in_features, linear.out_features, has_bias(linear), device="meta")
        self.dtype, self.kind, weight = linear.weight.dtype, kind_of(config), linear.weight.detach()
        packed, state = bitsandbytes().functional.quantize_4bit(
            weight.float() if self.dtype == torch.float64 else weight, blocksize=BLOCK, quant_type=config.quantize,
            compress_statistics=config.double_quantization,
        )  # fmt: skip
        self.weight = bitsandbytes().nn.Params4bit(
            packed, requires_grad=False, quant_state=state, blocksize=BLOCK, quant_type=config.quantize,
            compress_statistics=config.double_quantization, bnb_quantized=True,
        )  # fmt: skip
        self.bias = linear.bias

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """What the four bits stand for [out, in]."""
        functional: Any = importlib.import_module("bitsandbytes.functional")  # is there: it has made the weight
        state = self.weight.quant_state  # pyright: ignore[reportAttributeAccessIssue]
        return functional.dequantize_4bit(self.weight.detach(), state).to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] to [..., out], in the input's type, or autocast's."""
        product = cast(Tensor, _Product.apply(in_autocast(input), self))
        return product + self.bias.to(product.dtype) if has_bias(self) else product


class _Product(torch.autograd.Function):
    """Inputs [..., in] by a layer's matrix, which is read again in backward and not kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: FourBit) -> Tensor:
        ctx.layer = layer
        return F.linear(inputs, layer.matrix(inputs.dtype))  # [..., out]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient @ ctx.layer.matrix(gradient.dtype), None  # [..., in]


def has_bias(layer: nn.Linear) -> bool:
    return cast("Tensor | None", layer.bias) is not None


def in_autocast(inputs: Tensor) -> Tensor:
    """The inputs in the type that autocast would compute torch's own linear layer in."""
    kind = inputs.device.type
    if not torch.is_autocast_enabled(kind) or inputs.dtype == torch.float64:
        return inputs
    return inputs.to(torch.get_autocast_dtype(kind))


def dequantize(model: nn.Module) -> None:
    """Put torch's linear layers in place of those in four bits: of the numbers that they stand for, in the base's
    type."""
    for name, layer in [(name, each) for name, each in model.named_modules() if isinstance(each, FourBit)]:
        linear = nn.Linear(layer.in_features, layer.out_features, has_bias(layer), device="meta")
        linear.weight = nn.Parameter(layer.matrix(layer.dtype), requires_grad=False)
        linear.bias = layer.bias
        model.set_submodule(name, linear)


def four_bits(model: nn.Module) -> Iterator[tuple[str, FourBit]]:
    """The weights in four bits, by the names of the parameters, and their layers."""
    return ((f"{name}.weight", each) for name, each in model.named_modules() if isinstance(each, FourBit))


def described(model: nn.Module) -> dict[str, list[object]]:
    """Type and shape of each parameter, as json; of those in four bits what they stand for."""
    layers = dict(four_bits(model))
    return {
        name: [layers[name].kind, layers[name].out_features, layers[name].in_features]
        if name in layers
        else [str(parameter.dtype).removeprefix("torch."), *parameter.shape]
        for name, parameter in model.named_parameters()
    }


def stored(weight: Tensor) -> list[Tensor]:
    """All that is kept of a weight: itself, and its scales where it is in four bits."""
    state: Any = getattr(weight, "quant_state", None)
    if state is None:
        return [weight]
    scales = [state.absmax, state.offset, state.state2.absmax] if state.nested else [state.absmax]
    return [weight, *scales]


def num_numbers(weight: Tensor) -> int:
    """How many numbers a weight stands for."""
    state: Any = getattr(weight, "quant_state", None)
    return weight.numel() if state is None else state.shape.numel()
