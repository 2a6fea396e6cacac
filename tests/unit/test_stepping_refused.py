"""What a step in the last backward cannot go together with is refused, by name."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megabatch import GradientAccumulator, MegabatchError, PlanError, loss
from tests.unit.tower import Tower, moved, new_tower, parameters_of, rows, square, stepping

LEAVE_OUT = "or leave step_in_backward() out"


def refusal(gradient: GradientAccumulator, loss_fn, num_calls: int = 1, **finalize: float) -> str:
    def update() -> None:
        for _ in range(num_calls):
            gradient.forward_backward(rows(4), loss_fn)
        gradient.finalize(**finalize)

    with pytest.raises(PlanError) as raised:
        update()
    return str(raised.value)


def test_what_must_be_known_before_the_step_is_refused() -> None:
    model = new_tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("max_norm", "weight"):
        assert refusal(stepping(model, optimizer), square, **{name: 1.0}) == (
            f"{name} is 1.0, but the optimizer steps in backward, before finalize() can scale a gradient; "
            f"leave {name} out, {LEAVE_OUT}"
        )
    assert refusal(stepping(model, optimizer), lambda model, microbatch: square(model, microbatch)) == (
        "the loss has no weigh, and an optimizer that steps in backward cannot wait for the weight; count it with "
        f"@megabatch.loss(weigh=...), {LEAVE_OUT}"
    )
    assert refusal(stepping(model, optimizer), square, num_calls=2) == (
        "a second call in one update, but the optimizer has stepped in the last backward of the first; give all "
        f"samples to one forward_backward, {LEAVE_OUT}"
    )


@pytest.mark.parametrize("kept", ["a number", "a tensor"])
def test_an_optimizer_that_counts_its_steps_in_the_group_is_refused(kept: str) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure=None) -> None:
            super().step()
            for group in self.param_groups:
                group["k"] += 1  # in place, where it is a tensor

    model = new_tower()
    optimizer = Counting(model.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group["k"] = 1000 if kept == "a number" else torch.zeros(())
    with pytest.raises(MegabatchError, match="Counting writes to its parameter groups in a step, so that it cannot"):
        stepping(model, optimizer).forward_backward(rows(4), square)


def test_a_gradient_that_comes_in_two_parts_is_refused_before_a_step() -> None:
    class Twice(Tower):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.layers[0], x, use_reentrant=True)
            return x

    torch.manual_seed(0)
    model = Twice()
    gradient, before = stepping(model, torch.optim.SGD(model.parameters(), lr=0.1)), parameters_of(model)

    @loss(weigh=lambda microbatch: len(microbatch["x"]))
    def total(model, microbatch):
        return model(microbatch["x"].requires_grad_()).square().sum(), float(len(microbatch["x"]))

    assert refusal(gradient, total) == (
        "a parameter of shape (8,) got its gradient in two parts of one backward (checkpointing with "
        "use_reentrant=True, or a module that FSDP2 wraps and the model calls twice), and the optimizer would step "
        f"with the first alone; change this, {LEAVE_OUT}"
    )
    assert not moved(model, before)
