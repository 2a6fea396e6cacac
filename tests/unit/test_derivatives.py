"""Losses that take derivatives, such as forces, a residual or an inner step: verified, and evaluated with a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from megabatch import GradientAccumulator, verify

Batch = dict[str, Tensor]
Values = Callable[[Any, Batch], Tensor]  # a number per sample, [B]
SIZE = 6


class Centred(nn.Module):
    """Subtracts the mean over the samples."""

    def forward(self, features: Tensor) -> Tensor:
        return features - features.mean(0)


def energy(inner: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Identity() if inner is None else inner
    return nn.Sequential(nn.Linear(3, 8), inner, nn.Tanh(), nn.Linear(8, 1)).double()


def points() -> Batch:
    return {"x": torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)}


def forces(model: Any, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return force.square().sum(1)


def forces_in_place(model: Any, batch: Batch) -> Tensor:
    (force,) = torch.autograd.grad(model(batch["x"].requires_grad_()).sum(), batch["x"], create_graph=True)
    return force.square().sum(1)


def forces_of_a_checkpoint(model: Any, batch: Batch) -> Tensor:
    return forces(lambda x: checkpoint(model, x, use_reentrant=False), batch)


def laplacian(model: Any, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    rows = [torch.autograd.grad(slope[:, axis].sum(), x, create_graph=True)[0][:, axis] for axis in range(3)]
    return (torch.stack(rows).sum(0) - 1).square()


def per_sample_gradients(model: Any, batch: Batch) -> Tensor:
    return vmap(grad(lambda x: model(x[None]).sum()))(batch["x"]).square().sum(1)


def jacobian(model: Any, batch: Batch) -> Tensor:
    return jacrev(lambda x: model(x).sum())(batch["x"]).square().sum(1)


def inner_step(model: nn.Module, batch: Batch) -> Tensor:
    values: list[Tensor] = []
    for x in batch["x"].split(1):
        parameters = dict(model.named_parameters())
        slopes = torch.autograd.grad(model(x).square().sum(), list(parameters.values()), create_graph=True)
        moved = {name: each - 0.1 * slope for (name, each), slope in zip(parameters.items(), slopes, strict=True)}
        values.append(functional_call(model, moved, (x,)).square().sum())
    return torch.stack(values)


def with_a_hook(model: Any, batch: Batch) -> Tensor:
    outputs = model(batch["x"])
    outputs.register_hook(lambda gradient: gradient)
    return outputs[:, 0].square()


def without_the_key(model: Any, batch: Batch) -> Tensor:
    return forces(model, {"x": batch.pop("x")})


LOSSES: dict[str, Values] = {
    function.__name__: function
    for function in (
        forces, forces_in_place, forces_of_a_checkpoint, laplacian, per_sample_gradients, jacobian, inner_step,
        with_a_hook, without_the_key,
    )
}  # fmt: skip


def summed(values: Values) -> Callable[..., tuple[Tensor, int]]:
    def loss(model: Any, batch: Batch) -> tuple[Tensor, int]:
        numbers = values(model, batch)
        return numbers.sum(), len(numbers)

    return loss


def own_backward(model: Any, batch: Batch) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    return x.grad.square().sum(1)


@pytest.mark.parametrize("name", LOSSES)
def test_verify_passes_what_is_exact(name: str) -> None:
    verification = verify(energy(), summed(LOSSES[name]), points())
    assert verification.ok, str(verification)
    assert verification.worst <= 1e-14


@pytest.mark.parametrize("name", LOSSES)
def test_verify_gives_its_verdict_on_what_is_not(name: str) -> None:
    def divided(model: Any, batch: Batch) -> tuple[Tensor, int]:
        numbers = LOSSES[name](model, batch)
        return (numbers / numbers.detach().mean()).sum(), len(numbers)

    verification = verify(energy(), divided, points())
    assert not verification.ok
    assert "the loss itself couples the samples" in verification.causes[0]


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("forces", lambda: nn.BatchNorm1d(8)), ("forces", Centred), ("laplacian", Centred),
        ("forces_of_a_checkpoint", Centred), ("jacobian", Centred),
    ],
)  # fmt: skip
def test_verify_names_the_module_that_mixes(name: str, inner: Callable[[], nn.Module]) -> None:
    verification = verify(energy(inner()), summed(LOSSES[name]), points(), micro_batch_size=2)
    assert not verification.ok
    assert verification.causes[0].startswith("module '1'")


def test_verify_names_padding_under_forces() -> None:
    """The mean over the atoms of a molecule, in which padding counts."""
    samples = [{"x": torch.randn(length, 3, dtype=torch.float64)} for length in (2, 5, 3)]

    def of_molecules(model: Any, batch: Batch) -> tuple[Tensor, int]:
        x = batch["x"].clone().requires_grad_()
        (force,) = torch.autograd.grad(model(x).square().mean(1).sum(), x, create_graph=True)
        return force.square().sum(), len(x)

    verification = verify(energy(), of_molecules, samples)
    assert not verification.ok
    assert verification.causes[0].startswith("padding changes the loss of a sample"), verification.causes


def test_verify_finds_unused_targets_under_forces() -> None:
    """The labels at position 0 count in the weight alone."""
    batch = {"x": torch.randn(4, 5, 3, dtype=torch.float64), "labels": torch.ones(4, 5, dtype=torch.int64)}

    def of_targets(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        x = batch["x"].clone().requires_grad_()
        (force,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        targets = batch["labels"] != -100
        return (force.square().sum(2) * targets)[:, 1:].sum(), targets.sum()

    assert "the labels at position 0" in verify(energy(), of_targets, batch).causes[0]


def test_verify_works_without_gradients_around_it() -> None:
    with torch.no_grad():
        assert verify(energy(), summed(forces), points()).ok
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("name", [*LOSSES, "own_backward"])
def test_evaluate_and_forward_run_with_a_graph_where_one_is_needed(name: str) -> None:
    values = LOSSES.get(name, own_backward)
    expected = values(energy(), points()).detach()
    model, batch = energy(), points()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    gradient = GradientAccumulator(model, micro_batch_size=2)
    outputs = gradient.forward(batch, values)
    evaluated = gradient.evaluate(batch, summed(values))["loss"]
    assert torch.allclose(torch.stack(outputs), expected, rtol=1e-13, atol=0)
    assert float(evaluated) == pytest.approx(float(expected.mean()), rel=1e-13)
    assert not any(each.requires_grad for each in [*outputs, evaluated])
    assert all(parameter.grad is each for parameter, each in zip(model.parameters(), gradients, strict=True))
    assert all(bool((each == 1).all()) for each in gradients if each is not None)
    assert not batch["x"].requires_grad
    assert batch["x"].grad is None


def test_an_open_update_is_left_as_it_is() -> None:
    gradients: list[list[Tensor]] = []
    for evaluates in (False, True):
        model = energy(nn.Dropout(0.5))
        gradient = GradientAccumulator(model, micro_batch_size=2)
        torch.manual_seed(5)
        for _ in range(2):
            gradient.forward_backward(points(), summed(laplacian))
            if evaluates:
                gradient.evaluate(points(), summed(laplacian))
        gradient.finalize()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_an_ordinary_loss_is_evaluated_without_a_graph() -> None:
    """No second forward either."""
    modes: list[bool] = []

    def ordinary(model: Any, batch: Batch) -> tuple[Tensor, int]:
        modes.append(torch.is_grad_enabled())
        return model(batch["x"]).sum(), len(batch["x"])

    GradientAccumulator(energy(), micro_batch_size=2).evaluate(points(), ordinary)
    assert modes == [False] * 3


def test_a_graph_is_tried_once() -> None:
    modes: list[bool] = []

    def derivative(model: Any, batch: Batch) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return forces(model, batch)

    GradientAccumulator(energy(), micro_batch_size=2).evaluate(points(), summed(derivative))
    assert modes == [False, True, True, True]


def test_dropout_is_drawn_as_in_training() -> None:
    """The forward that failed has drawn random numbers."""
    model = energy(nn.Dropout(0.5))
    gradient = GradientAccumulator(model, micro_batch_size=SIZE)
    torch.manual_seed(7)
    evaluated = gradient.evaluate(points(), summed(forces))["loss"]
    gradient.forward_backward(points(), summed(forces))
    assert float(gradient.finalize().loss) == pytest.approx(float(evaluated), rel=1e-13)


def test_an_error_of_the_loss_is_shown_as_it_is() -> None:
    modes: list[bool] = []

    def failing(model: Any, batch: Batch) -> tuple[Tensor, int]:
        modes.append(torch.is_grad_enabled())
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        GradientAccumulator(energy(), micro_batch_size=2).evaluate(points(), failing)
    assert modes == [False]
