"""Quantized states and weights with the bytes of torchao and bitsandbytes, for simulations without these packages.

Adam has two states of 8 or 4 bits a number, and a float32 scale for each block of either:

- torchao.optim (torchao/optim/adam.py, subclass_8bit.py, subclass_4bit.py, subclass_fp8.py): blocks of 256 numbers, or
  128 with 4 bits. A part of a parameter on a rank with fewer than 4,096 numbers, or not of whole blocks, has states of
  the parameter's dtype. torch.compile fuses the step of a parameter.
- bitsandbytes.optim (bitsandbytes/optim/optimizer.py): blocks of 256 numbers (2,048 in old versions). A
  parameter with fewer than 4,096 numbers has float32 states. One kernel makes the step of a parameter. Paged states are
  in memory that the driver may move to the host; they count as memory of the device, where a step needs them.

A frozen matrix of bitsandbytes (nn/modules.py, functional.py: quantize_4bit) has two numbers in a byte, and a scale for
each block of 64: float32, or with double quantization 8 bits and a float32 scale for each 256 scales. A forward and a
backward each make the whole matrix in the dtype of computing, and free it.

Tables of 256 code values are left out: 1 KiB a state or a matrix.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn, optim

from megabatch.errors import PlanError
from megabatch.torch_private.classes import local_tensor

MIN_NUMBERS = 4096  # of a parameter whose states are quantized
SCALED, TWICE_SCALED = 64, 256  # numbers of a matrix with a scale, and scales with a scale


class QuantizedStates(NamedTuple):
    """The states of an optimizer."""

    bits: int  # of a number
    block: int  # numbers with a scale of their own
    only_whole_blocks: bool  # other parameters have states of their own dtype, or of float32


def _by_name() -> dict[str, QuantizedStates]:
    states_by_name: dict[str, QuantizedStates] = {}
    for kind in ("Adam", "AdamW"):
        for name, bits, block in (("8bit", 8, 256), ("4bit", 4, 128), ("Fp8", 8, 256)):
            states_by_name[f"torchao.optim:{kind}{name}"] = QuantizedStates(bits, block, only_whole_blocks=True)
        for paged in ("", "Paged"):
            states_by_name[f"bitsandbytes.optim:{paged}{kind}8bit"] = QuantizedStates(8, 256, only_whole_blocks=False)
    return states_by_name


QUANTIZED_OPTIMIZERS = _by_name()
"""The optimizers that `QuantizedAdam` has the states of, as "module:class"."""


class QuantizedAdam(optim.Optimizer):
    """An optimizer with the states of a quantized Adam, for `simulate`. Its step computes nothing.

    Args:
        params: Parameters or groups of them.
        name: A key of `QUANTIZED_OPTIMIZERS`.
        lr: The learning rate.
        block_size: Numbers with a scale of their own, if not the optimizer's default. Other options change no memory.

    Raises:
        PlanError: For options that add states.
    """

    def __init__(
        self, params: Iterable[Any], name: str, lr: float = 1e-3, *, block_size: int | None = None, **options: Any
    ) -> None:
        if options.get("amsgrad"):
            raise PlanError(f"{name} has amsgrad, which keeps a third state that is not simulated; leave amsgrad out")
        states = QUANTIZED_OPTIMIZERS[name]
        self._states = states if block_size is None else states._replace(block=block_size)
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - no closure
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for parameter in (parameter for parameter in parameters if parameter.grad is not None):
            weight, gradient = (local_tensor(tensor) for tensor in (parameter, parameter.grad))
            if not self.state[parameter]:
                self.state[parameter] = self._new_states(weight)
            weight.add_(gradient, alpha=-1.0)

    def _new_states(self, weight: Tensor) -> dict[str, Tensor]:
        (bits, block, only_whole_blocks), num = self._states, weight.numel()
        if num < MIN_NUMBERS or (only_whole_blocks and num % block):
            dtype = weight.dtype if only_whole_blocks else torch.float32
            return {name: torch.zeros_like(weight, dtype=dtype) for name in ("first", "second")}
        codes = {name: weight.new_zeros(num * bits // 8, dtype=torch.uint8) for name in ("first", "second")}
        return {**codes, "scales": weight.new_zeros(2 * -(-num // block), dtype=torch.float32)}


class FourBitLinear(nn.Linear):
    """A frozen linear layer in four bits, for `simulate`, with the memory of bitsandbytes' Linear4bit.

    Args:
        linear: The layer to replace. Its bias stays.
        computed: The dtype of computing.
        double_quantization: Keep scales in 8 bits.
    """

    def __init__(self, linear: nn.Linear, computed: torch.dtype, *, double_quantization: bool) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        num, self._computed = linear.weight.numel(), computed
        num_scales = -(-num // SCALED)
        parts = {"weight": (-(-num // 2), torch.uint8)}
        if double_quantization:
            parts |= {"scales": (num_scales, torch.uint8), "of_scales": (-(-num_scales // TWICE_SCALED), torch.float32)}
        else:
            parts |= {"scales": (num_scales, torch.float32)}
        for name, (size, dtype) in parts.items():
            part = torch.empty(size, dtype=dtype, device=linear.weight.device)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def forward(self, input: Tensor) -> Tensor:  # [B, T, in] -> [B, T, out]
        output = cast(Tensor, _FourBitProduct.apply(input.to(self._computed), self.out_features))
        bias = cast("Tensor | None", self.bias)
        return (output if bias is None else output + bias).to(input.dtype)


class _FourBitProduct(torch.autograd.Function):
    """The product with a matrix that exists only meanwhile, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, out_features: int) -> Tensor:
        ctx.num_outputs, ctx.num_inputs = out_features, rows.shape[-1]
        return rows @ rows.new_zeros(out_features, rows.shape[-1]).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch's is not typed
        (gradient,) = gradients
        return gradient @ gradient.new_zeros(ctx.num_outputs, ctx.num_inputs), None
