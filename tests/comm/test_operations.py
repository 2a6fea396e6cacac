"""The loss is scaled and never the gradient: operations on tensors of a parameter's size, counted in one process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, loss
from tests.comm.counting import ParameterSized, Touching

SIZES = (11, 13, 17)  # layers, chosen so that no activation of two rows has as many numbers as a parameter
MAX_NORM = 0.01


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.Tanh(), nn.Linear(SIZES[1], SIZES[2])).double()


def uncounted(model: nn.Module, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return (model(microbatch["x"]) ** 2).sum(), len(microbatch["x"])


counted = loss(weigh=lambda microbatch: len(microbatch["x"]))(lambda model, microbatch: uncounted(model, microbatch))


def batch(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def third(update: Callable[[], None], model: nn.Module) -> list[str]:
    """Operations of the third update, when the optimizer has its state."""
    update()
    update()
    with ParameterSized(model.parameters()) as operations:
        update()
    return operations.seen


def pytorch_loop(num_microbatches: int, max_norm: float | None) -> list[str]:
    model, whole = network(), batch(2 * num_microbatches)
    optimizer = torch.optim.AdamW(model.parameters())

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        for rows in whole["x"].split(2):
            (uncounted(model, {"x": rows})[0] / len(whole["x"])).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()

    return third(update, model)


def megabatch_loop(num_microbatches: int, max_norm: float | None, loss_fn) -> list[str]:
    model, whole = network(), batch(2 * num_microbatches)
    optimizer = torch.optim.AdamW(model.parameters())
    gradient = GradientAccumulator(model, micro_batch_size=2)

    def update() -> None:
        gradient.forward_backward(whole, loss_fn)
        assert gradient.finalize(max_norm=max_norm).finite
        optimizer.step()

    return third(update, model)


@pytest.mark.parametrize("max_norm", [None, MAX_NORM])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_the_same_operations_as_the_plain_loop(num_microbatches: int, max_norm: float | None) -> None:
    expected = pytorch_loop(num_microbatches, max_norm)
    assert len(expected) > 4
    assert sorted(megabatch_loop(num_microbatches, max_norm, counted)) == sorted(expected)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_late_weight_costs_one_pass_and_none_when_clipping(num_microbatches: int) -> None:
    expected = pytorch_loop(num_microbatches, None)
    extra = megabatch_loop(num_microbatches, None, uncounted)
    assert len(extra) == len(expected) + 1, "one multiplication of all gradients"
    assert len(megabatch_loop(num_microbatches, MAX_NORM, uncounted)) == len(pytorch_loop(num_microbatches, MAX_NORM))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_nothing_touches_a_gradient_after_the_last_backward(num_microbatches: int) -> None:
    model = network()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(batch(2 * num_microbatches), counted)
    with Touching([parameter.grad for parameter in model.parameters()]) as touching:
        gradient.finalize()
    assert touching.seen == []


def test_the_counting_sees_a_pass_over_gradients() -> None:
    model = network()
    gradient = GradientAccumulator(model, micro_batch_size=2)
    gradient.forward_backward(batch(4), uncounted)
    with Touching([parameter.grad for parameter in model.parameters()]) as touching:
        gradient.finalize()
    assert len(touching.seen) == 1, touching.seen


def test_no_activation_is_taken_for_a_gradient() -> None:
    sizes = {parameter.numel() for parameter in network().parameters()}
    assert not sizes & {2 * width for width in SIZES}
