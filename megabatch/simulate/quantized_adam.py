"""Adam whose states have few bits, as torchao and bitsandbytes keep them, for simulations without these packages.

Two states of 8 or 4 bits a number, and a float32 scale for each block of either:

- torchao.optim (torchao/optim/adam.py, subclass_8bit.py, subclass_4bit.py, subclass_fp8.py): blocks of 256 numbers, or
  128 with 4 bits. A part of a parameter on a rank with fewer than 4,096 numbers, or not of whole blocks, has states of
  the parameter's dtype. torch.compile fuses the step of a parameter.
- bitsandbytes.optim (bitsandbytes/optim/optimizer.py): blocks of 256 numbers (of 2,048 before version 0.44). A
  parameter with fewer than 4,096 numbers has float32 states. One kernel makes the step of a parameter. Paged states are
  in memory that the driver may move to the host; they count as memory of the device, where a step needs them.

Tables of 256 code values are left out: 1 KiB a state.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor

from megabatch.errors import PlanError
from megabatch.torch_private import local_tensor

MIN_NUMBERS = 4096  # of a parameter whose states are quantized


class QuantizedStates(NamedTuple):
    """The states of an optimizer."""

    bits: int  # of a number
    block: int  # numbers with a scale of their own
    only_whole_blocks: bool  # other parameters have states of their own dtype, or of float32


def _by_name() -> dict[str, QuantizedStates]:
    found: dict[str, QuantizedStates] = {}
    for kind in ("Adam", "AdamW"):
        for name, bits, block in (("8bit", 8, 256), ("4bit", 4, 128), ("Fp8", 8, 256)):
            found[f"torchao.optim:{kind}{name}"] = QuantizedStates(bits, block, only_whole_blocks=True)
        for paged in ("", "Paged"):
            found[f"bitsandbytes.optim:{paged}{kind}8bit"] = QuantizedStates(8, 256, only_whole_blocks=False)
    return found


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
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            weight, gradient = (
                local_tensor(each) if isinstance(each, DTensor) else each for each in (parameter, parameter.grad)
            )
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
