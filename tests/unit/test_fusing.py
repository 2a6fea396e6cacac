"""Linear layers that add to their gradients themselves: the same bits, and where they leave it to autograd."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megabatch import GradientAccumulator, LossContractError, MegabatchError, loss
from megabatch.wrappers import fusing
from tests.exact.fusing import Additions, leftovers
from tests.exact.spikes import Spikes
from tests.unit.linear_layers import (
    ROWS,
    Again,
    AgainTwice,
    Copied,
    Functional,
    Net,
    OneByOne,
    Parts,
    Replaced,
    Turned,
    Twice,
    Watched,
    looks_inside,
    penalised,
    total_of,
    with_torch_func,
)


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    monkeypatch.setattr(fusing, "MIN_ELEMENTS", 1)


def gradients(
    make: type[nn.Module], total: Callable[..., Tensor], *, fuse: bool, micro_batch_size: int = 2
) -> tuple[list[Tensor], int]:
    """The gradient of an update of two calls, and how often a product was added to one."""
    model = make()

    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def summed(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        return total(model, microbatch), len(microbatch["x"])

    gradient = GradientAccumulator(model, micro_batch_size=micro_batch_size, fuse_accumulation=fuse)
    with Additions() as additions:
        for _ in range(2):
            gradient.forward_backward(ROWS, summed)
    gradient.finalize()
    assert list(leftovers(model)) == (["first"] if make is Replaced else [])
    return [each.grad for each in model.parameters()], additions.number


ALL = 2 * 7  # two layers in all microbatches but the first
CASES = {
    "plain": (Net, total_of, ALL),
    "used twice": (Twice, total_of, 3 * 7),
    "a hook on a module": (Watched, total_of, ALL),
    "used past the layer": (Functional, total_of, ALL),
    "a forward of its own": (Replaced, total_of, 7),
    "not contiguous": (Turned, total_of, ALL),
    "one dimension": (OneByOne, total_of, 0),
    "computed again inside": (Again, total_of, ALL),
    "computed again, used twice": (AgainTwice, total_of, 3 * 7),
    "saved as a copy": (Copied, total_of, ALL),
    "some rows or none": (Parts, total_of, None),
    "a gradient of a gradient": (Net, penalised, None),
    "backwards for others": (Net, looks_inside, ALL),
    "torch.func": (Net, with_torch_func, ALL),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_autograd(name: str):
    make, total, expected = CASES[name]
    mine, num_added = gradients(make, total, fuse=True)
    reference, none = gradients(make, total, fuse=False)
    assert none == 0
    assert num_added == expected if expected is not None else num_added > 0
    assert all(map(torch.equal, mine, reference))


def test_a_backward_for_others_would_add_if_it_were_not_asked(monkeypatch):
    monkeypatch.setattr(fusing, "_runs", lambda node: True)
    with pytest.raises(LossContractError, match="gradients changed while the loss ran"):
        gradients(Net, looks_inside, fuse=True)


def test_autocast_goes_the_plain_way():
    def under_autocast(model: nn.Module, microbatch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (model(microbatch["x"].float()).float() ** 2).sum()

    class Single(Net):
        def __init__(self) -> None:
            super().__init__()
            self.float()

    mine, num_added = gradients(Single, under_autocast, fuse=True)
    assert num_added == 0
    assert all(map(torch.equal, mine, gradients(Single, under_autocast, fuse=False)[0]))


def test_a_copy_made_inside_of_a_call_is_a_model_of_its_own():
    model = Net()
    copies: list[nn.Module] = []
    gradient = GradientAccumulator(model, micro_batch_size=4, fuse_accumulation=True)
    for microbatch in gradient.microbatches(ROWS):
        copies.append(copy.deepcopy(model))
        gradient.backward(total_of(model, microbatch), 4)
    with torch.no_grad():
        copies[0].first.weight.zero_()
    with Additions() as additions:
        for _ in range(2):
            total_of(copies[0], ROWS).backward()
    assert additions.number == 0
    assert torch.equal(copies[0].first(ROWS["x"]), copies[0].first.bias.expand(8, 3, 4))
    assert not torch.equal(model.first.weight, copies[0].first.weight)


def test_a_call_that_fails_leaves_the_layers_as_they_were():
    model = Net()
    gradient = GradientAccumulator(model, micro_batch_size=4, fuse_accumulation=True)
    with pytest.raises(ZeroDivisionError):
        gradient.forward_backward(ROWS, lambda model, microbatch: (total_of(model, microbatch), 1 / 0))
    assert not list(leftovers(model))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_worse_than_autograds(dtype: torch.dtype):
    def real(model: nn.Module, microbatch: Any) -> Tensor:
        return total_of(model, {"x": microbatch["x"].to(dtype) / 7})

    class Rounded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.to(dtype)

    truth, _ = gradients(Net, lambda model, given: total_of(model, {"x": given["x"] / 7}), fuse=False)
    mine, theirs = (gradients(Rounded, real, fuse=fuse, micro_batch_size=1)[0] for fuse in (True, False))
    epsilon = torch.finfo(dtype).eps
    for one, other, exact in zip(mine, theirs, truth, strict=True):
        assert (one - exact).norm() <= 2 * (other - exact).norm() + 2 * epsilon * exact.norm()


class TwiceOutOfMemory(Net):
    """Memory runs out between the two backwards of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Identity()
        self.spikes = Spikes(self, ("first", "between"))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.second(self.first(x))))


def run_out(model: nn.Module, when: Any, **settings: Any) -> GradientAccumulator:
    gradient = GradientAccumulator(model, micro_batch_size=4, **settings)
    model.spikes.set(when)

    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def squares(model: nn.Module, microbatch: Any) -> tuple[Tensor, int]:
        return total_of(model, microbatch), len(microbatch["x"])

    gradient.forward_backward(ROWS, squares)
    gradient.finalize()
    return gradient


def test_a_gradient_that_was_added_by_half_is_not_run_again():
    with pytest.raises(MegabatchError, match="which had added a part of a weight's gradient, so that it cannot run"):
        run_out(TwiceOutOfMemory(), {1: ("backward", 1)}, fuse_accumulation=True)


@pytest.mark.parametrize("when", [{1: ("backward", 0)}, {0: ("backward", 1)}])
def test_one_that_was_added_whole_or_not_at_all_is(when: Any):
    model, reference = TwiceOutOfMemory(), TwiceOutOfMemory()
    assert run_out(model, when, fuse_accumulation=True).last_plan.num_split == 1
    run_out(reference, {})
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), reference.parameters(), strict=True)
    )


def test_a_layer_is_taken_for_its_size(monkeypatch):
    monkeypatch.setattr(fusing, "MIN_ELEMENTS", 17)

    class Uneven(Net):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(4, 5).double()
            nn.init.ones_(self.wide.weight)
            nn.init.zeros_(self.wide.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(super().forward(x))

    mine, num_added = gradients(Uneven, total_of, fuse=True)
    assert num_added == 7
    assert all(map(torch.equal, mine, gradients(Uneven, total_of, fuse=False)[0]))
