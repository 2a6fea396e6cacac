"""Optimizers that may step in backward are accepted and left as they are; the others are refused, by name."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.optimization import Adafactor

from megabatch import PlanError
from tests.unit.failures.table import check_error
from tests.unit.tower import new_tower, rows, square, stepping

LEAVE_OUT = "or leave step_in_backward() out"


class Lion(optim.Optimizer):
    """By the sign of a mean; written as one would write it, with an attribute and a warm-up of its own."""

    def __init__(self, parameters, lr: float = 1e-4) -> None:
        super().__init__(parameters, {"lr": lr})
        self.betas, self.params, self.log = (
            (0.9, 0.99),
            [each for group in self.param_groups for each in group["params"]],
            [],
        )

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    parameter.sub_(group["lr"] * mean.lerp(parameter.grad, 1 - self.betas[0]).sign())
                    mean.lerp_(parameter.grad, 1 - self.betas[1])
                    self.log.append(float(mean.norm()))


class OfAll(optim.Optimizer):
    """Adam as it should not be here: ``mixes`` gives all parameters one scale, else one count of steps."""

    def __init__(self, parameters, mixes: str) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.mixes, self.count = mixes, 0
        self.all = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self, closure=None) -> None:
        self.count += 1
        found = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        if self.mixes == "past its groups":
            found = [each for each in self.all if each.grad is not None]
        scale = torch.ones(())
        if self.mixes == "clips":
            norm = torch.stack([each.grad.norm() for each in found]).norm()
            scale = (1.0 / norm).clamp(max=1.0)
        if self.mixes == "normalizes":
            scale = 1 / torch.stack([each.grad.norm() for each in found]).norm()
        for each in found:
            state = self.state[each]
            square = state["square"] = 0.9 * state.get("square", 0.0) + 0.1 * (each.grad * scale) ** 2
            correction = 1 - 0.9**self.count if self.mixes == "counts" else 1.0
            each.sub_(0.01 * each.grad * scale / ((square / correction).sqrt() + 1e-8))


def matrices(model: nn.Module) -> list[Tensor]:
    return [each for each in model.parameters() if each.ndim == 2]


def two_groups(model: nn.Module) -> optim.Optimizer:
    rest = [each for each in model.parameters() if each.ndim != 2]
    return optim.AdamW([{"params": matrices(model), "lr": 1e-3}, {"params": rest, "weight_decay": 0.0}])


def scheduled(model: nn.Module) -> optim.Optimizer:
    """Puts a step of its own before the optimizer's, and begins at 0."""
    optimizer = optim.AdamW(model.parameters())
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    return optimizer


ACCEPTED: dict[str, Callable[[nn.Module], optim.Optimizer]] = {
    "SGD": lambda model: optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW foreach": lambda model: optim.AdamW(model.parameters(), foreach=True),
    "AdamW fused": lambda model: optim.AdamW(model.parameters(), fused=True),
    "AdamW in two groups": two_groups,
    "AdamW with a schedule": scheduled,
    "AdamW with a rate on the device": lambda model: optim.AdamW(model.parameters(), lr=torch.tensor(1e-3)),
    "Adafactor": lambda model: optim.Adafactor(model.parameters()),
    "Adafactor of transformers": lambda model: Adafactor(model.parameters()),
    "RAdam": lambda model: optim.RAdam(model.parameters()),
    "NAdam": lambda model: optim.NAdam(model.parameters()),
    "RMSprop": lambda model: optim.RMSprop(model.parameters()),
    "Adagrad": lambda model: optim.Adagrad(model.parameters()),  # makes its state when it is made
    "Muon": lambda model: optim.Muon(matrices(model)),
    "SparseAdam": lambda model: optim.SparseAdam(model.parameters()),
    "a Lion of one's own": lambda model: Lion(model.parameters()),
}
REFUSED = {
    "clips": "several parameters", "normalizes": "several parameters", "past its groups": "several parameters",
    "counts": "counts its steps",
}  # fmt: skip


def refusal(make: Callable[[nn.Module], optim.Optimizer]) -> str:
    model = new_tower()
    optimizer = make(model)
    with pytest.raises(PlanError) as raised:
        stepping(model, optimizer)
    return str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ACCEPTED)
def test_an_optimizer_of_one_parameter_at_a_time_is_accepted_and_left_as_it_is(name: str, dtype: torch.dtype) -> None:
    model = new_tower().to(dtype)
    optimizer = ACCEPTED[name](model)
    before = copy.deepcopy(vars(optimizer) | {"step": None, "weights": list(model.parameters())})
    generator = torch.get_rng_state()
    stepping(model, optimizer)
    assert torch.equal(torch.get_rng_state(), generator)
    after = vars(optimizer) | {"step": None, "weights": list(model.parameters())}
    assert repr(after["param_groups"]) == repr(before["param_groups"])
    assert repr(list(after["state"].values())) == repr(list(before["state"].values()))
    assert all(map(torch.equal, after["weights"], before["weights"]))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert getattr(optimizer, "log", []) == []


@pytest.mark.parametrize("name", ["AdamW fused", "Adagrad", "a Lion of one's own"])
def test_an_optimizer_that_has_stepped_is_accepted_and_steps_alike(name: str) -> None:
    models = [new_tower(), new_tower()]
    optimizers = [ACCEPTED[name](model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        square(model, rows(4))[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    gradient = stepping(models[0], optimizers[0], micro_batch_size=4)
    gradient.forward_backward(rows(4), square)
    gradient.finalize()
    (square(models[1], rows(4))[0] / 4).backward()
    optimizers[1].step()
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


@pytest.mark.parametrize("mixes", REFUSED)
def test_an_optimizer_that_mixes_parameters_is_refused(mixes: str) -> None:
    check_error(refusal(lambda model: OfAll(model.parameters(), mixes)), f"OfAll … {REFUSED[mixes]} … {LEAVE_OUT}")


def test_a_hook_of_a_step_is_refused_before_and_after() -> None:
    def log(*_: object) -> None: ...

    expected = "AdamW has the step hook 'log', which would run once for each parameter; remove the hook, " + LEAVE_OUT

    def with_hook(model: nn.Module) -> optim.Optimizer:
        optimizer = optim.AdamW(model.parameters())
        optimizer.register_step_pre_hook(log)
        return optimizer

    assert refusal(with_hook) == expected
    model = new_tower()
    optimizer = optim.AdamW(model.parameters())
    gradient = stepping(model, optimizer)
    handle = optimizer.register_step_post_hook(log)
    with pytest.raises(PlanError) as raised:
        gradient.forward_backward(rows(4), square)
    assert str(raised.value) == expected
    handle.remove()
    handle = register_optimizer_step_post_hook(log)
    try:
        assert refusal(lambda model: optim.AdamW(model.parameters())) == expected
    finally:
        handle.remove()
