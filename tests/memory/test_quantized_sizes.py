"""The states of quantized optimizers: bytes that torchao 0.18 and bitsandbytes 0.50 keep, without their tables."""

import pytest
import torch
from torch import nn

from megabatch.errors import PlanError
from megabatch.simulate import FourBitLinear, QuantizedAdam
from tests.memory.runs import Run, predicted

EIGHT, FOUR = 2 * 512 * 256 + 2 * 4 * 512, 512 * 256 + 2 * 4 * 1024  # codes, and a scale for 256 or 128 numbers
STATES = {  # optimizer → bytes of [512, 256] and [100] in bfloat16, and of [4097] in float32
    "torchao.optim:AdamW8bit": (EIGHT, 400, 32776),
    "torchao.optim:AdamWFp8": (EIGHT, 400, 32776),
    "torchao.optim:AdamW4bit": (FOUR, 400, 32776),
    "bitsandbytes.optim:AdamW8bit": (EIGHT, 800, 2 * 4097 + 2 * 4 * 17),
    "bitsandbytes.optim:PagedAdamW8bit": (EIGHT, 800, 2 * 4097 + 2 * 4 * 17),
}


@pytest.mark.parametrize("name", STATES)
def test_states_have_the_bytes_of_the_package(name: str) -> None:
    shapes = ((512, 256), torch.bfloat16), ((100,), torch.bfloat16), ((4097,), torch.float32)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
    for each in parameters:
        each.grad = torch.ones_like(each)
    optimizer = QuantizedAdam(parameters, name)
    for _ in range(2):
        optimizer.step()
    found = [sum(value.nbytes for value in optimizer.state[each].values()) for each in parameters]
    assert tuple(found) == STATES[name]


def test_other_blocks_are_counted_and_a_third_state_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(4096))
    parameter.grad = torch.ones(4096)
    optimizer = QuantizedAdam([parameter], "torchao.optim:AdamW8bit", block_size=1024, bf16_stochastic_round=True)
    optimizer.step()
    assert sum(value.nbytes for value in optimizer.state[parameter].values()) == 2 * 4096 + 2 * 4 * 4
    with pytest.raises(PlanError, match="amsgrad"):
        QuantizedAdam([parameter], "torchao.optim:AdamW8bit", amsgrad=True)


@pytest.mark.slow
def test_a_rank_keeps_the_states_of_its_shards() -> None:
    found = predicted(Run("flat", "fsdp2", 2, 16, optimizer="torchao.optim:AdamW8bit"))
    states = found.phases["step"].at_peak["optimizer states"]
    assert states == pytest.approx(found.num_parameters / 2 * (2 + 8 / 256), rel=0.002)


@pytest.mark.parametrize(
    ("double", "num_bytes"), [(False, 96 * 80 // 2 + 4 * 120), (True, 96 * 80 // 2 + 120 + 4)]
)  # 120 blocks
def test_a_matrix_in_four_bits_has_the_bytes_of_the_package(double: bool, num_bytes: int) -> None:
    layer = FourBitLinear(nn.Linear(80, 96), torch.float32, double_quantization=double)
    assert sum(each.nbytes for name, each in layer.named_parameters() if name != "bias") == num_bytes
    hidden = torch.ones(2, 3, 80, requires_grad=True)
    output = layer(hidden)
    output.sum().backward()
    assert output.shape == (2, 3, 96)
    assert hidden.grad is not None
    assert hidden.grad.shape == hidden.shape
