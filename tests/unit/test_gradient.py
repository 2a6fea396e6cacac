"""On p.grad: the norm and the clip of torch, bit for bit, and one pass where there is a factor."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megabatch.core import gradients

SHAPES = [(3, 4), (7,), (), (2, 3, 5)]


def parameters(scale: float = 1.0, *, dtype: torch.dtype = torch.float32, without: int | None = None):
    """Parameters with random gradients; one may have none."""
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for index, parameter in enumerate(made):
        value = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
        parameter.grad = None if index == without else value
    return made


def same_bits(ones, others) -> bool:
    pairs = [(one.grad, other.grad) for one, other in zip(ones, others, strict=True)]
    return all((one is None and other is None) or torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 100.0, float("inf"), float("nan")])
@pytest.mark.parametrize("without", [None, 1])
def test_clipped_as_torch_clips(dtype, scale, without):
    mine, theirs = (parameters(scale, dtype=dtype, without=without) for _ in range(2))
    norm, expected = gradients.clip_gradients(mine, 1.0), nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(norm, expected) or (norm.isnan() and expected.isnan())
    if scale == scale and scale != float("inf"):
        assert same_bits(mine, theirs)


def test_a_factor_comes_before_the_clip():
    mine, theirs = parameters(dtype=torch.float64), parameters(dtype=torch.float64)
    gradients.scale_gradients(theirs, 0.25)
    expected = nn.utils.clip_grad_norm_(theirs, 1.0)
    assert torch.equal(gradients.clip_gradients(mine, 1.0, 0.25), expected)  # a power of two rounds nothing
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-15, atol=0)


class Writes(TorchDispatchMode):
    """Counts the operations that write into a gradient."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.endswith("mul_"):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("factor", [None, 0.5, torch.tensor(0.5)])
def test_clip_writes_each_gradient_once(factor):
    with Writes() as writes:
        gradients.clip_gradients(parameters(), 1.0, factor)
    assert writes.names == ["_foreach_mul_"]


def test_each_dtype_is_scaled_in_its_own_precision():
    ones = [*parameters(dtype=torch.float32), *parameters(dtype=torch.float64)]
    before = [each.grad.clone() for each in ones]
    factor = torch.tensor(1 / 3, dtype=torch.float64)
    gradients.scale_gradients(ones, factor)
    for one, was in zip(ones, before, strict=True):
        assert torch.equal(one.grad, was * factor.to(was.dtype))


def test_complex128_keeps_its_digits() -> None:
    numbers = torch.randn(64, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mine, theirs = (nn.Parameter(torch.zeros(64, dtype=torch.complex128)) for _ in range(2))
    mine.grad, theirs.grad = (torch.view_as_complex(numbers.clone()) for _ in range(2))
    gradients.clip_gradients([mine], 0.1)
    nn.utils.clip_grad_norm_([theirs], 0.1)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-15, atol=0)


def test_the_norm_of_a_sparse_gradient_counts_each_row_once() -> None:
    mine, theirs = (nn.Parameter(torch.zeros(4, 2)) for _ in range(2))
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    mine.grad = torch.sparse_coo_tensor([[0, 2, 0]], values, (4, 2), check_invariants=True)
    theirs.grad = mine.grad.to_dense()
    assert torch.equal(gradients.clip_gradients([mine], 1.0), nn.utils.clip_grad_norm_([theirs], 1.0))
    torch.testing.assert_close(mine.grad.to_dense(), theirs.grad)
