"""Input mutations of open updates: what happens between two calls, and what sees single microbatches."""

import contextlib
import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import MegabatchError, losses
from tests.exact.inputs import Sample, User, mean_square, numbers, refused, regressor, right, squares

# What happens between two calls of one update.


def _between(user: User, oddity: Callable[..., None]) -> None:
    """Two calls, with the oddity after the first."""
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = user.accumulator(model)
    accumulator.forward_backward(user.rows(numbers()), losses.mse)
    oddity(accumulator, model, optimizer, user)
    accumulator.forward_backward(user.rows(numbers(3)), losses.mse)
    accumulator.finalize()


def _at_the_end(user: User, oddity: Callable[..., None]) -> None:
    """One call, with the oddity before the update is closed."""
    model = regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = user.accumulator(model)
    accumulator.forward_backward(user.rows(numbers()), losses.mse)
    oddity(accumulator, model, optimizer, user)
    accumulator.finalize()


def _fails(model: nn.Module, batch: Sample) -> Any:
    raise ArithmeticError("a bad batch")


def caught_error(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    with contextlib.suppress(ArithmeticError, MegabatchError):
        accumulator.forward_backward(numbers(4), _fails)


def second_accumulator(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    user.accumulator(model).forward_backward(user.rows(numbers(5)), losses.mse)


def zero_grad_of_one_rank(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    if user.rank == 0:
        model.zero_grad()


def clipped_by_hand(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def written(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    model[0].weight.grad.mul_(2)


def replaced(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


ODDITIES: dict[str, Callable[..., None]] = {
    "second_accumulator": second_accumulator,
    "optimizer_zero_grad": lambda accumulator, model, optimizer, user: optimizer.zero_grad(),
    "zeros_by_zero_grad": lambda accumulator, model, optimizer, user: optimizer.zero_grad(set_to_none=False),
    "model_zero_grad": lambda accumulator, model, optimizer, user: model.zero_grad(),
    "optimizer_step": lambda accumulator, model, optimizer, user: optimizer.step(),
    "caught_error": caught_error,
    "gradient_written": written,
    "gradient_replaced": replaced,
    "own_backward": lambda accumulator, model, optimizer, user: mean_square(model, numbers(5)),
}


@refused(MegabatchError, "update", 1, 2, 3, **ODDITIES)
def between_calls(user: User, variant: Callable[..., None]) -> None:
    _between(user, variant)


@refused(MegabatchError, "frozen", 1, 2, 3)
def freezing_between_calls(user: User) -> None:
    _between(user, lambda accumulator, model, optimizer, user: model[0].requires_grad_(False))


@refused(MegabatchError, "update", 2, 3)
def zero_grad_on_one_rank_between_calls(user: User) -> None:
    _between(user, zero_grad_of_one_rank)


@refused(
    MegabatchError,
    "update",
    1,
    2,
    3,
    optimizer_zero_grad=ODDITIES["optimizer_zero_grad"],
    second_accumulator=second_accumulator,
    clipped=clipped_by_hand,
    own_backward=ODDITIES["own_backward"],
)
def before_finalize(user: User, variant: Callable[..., None]) -> None:
    _at_the_end(user, variant)


@refused(MegabatchError, "cannot be copied", 1, 2)
def deepcopy_of_an_open_accumulator(user: User) -> None:
    _at_the_end(user, lambda accumulator, model, optimizer, user: copy.deepcopy(accumulator).finalize())


@refused(MegabatchError, "state_dict", 1)
def pickled_accumulator(user: User) -> None:
    pickle.dumps(user.accumulator(regressor()))


@right(1, 2, 3)
def zero_grad_between_updates(user: User) -> None:
    """No false refusal: two updates, two accumulators, zero_grad and a step between them."""
    model, batch = regressor(), numbers()
    first, second = user.accumulator(model), user.accumulator(model, micro_batch_size=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for accumulator in (first, second, first):
        reference = copy.deepcopy(model)
        reference.zero_grad()
        accumulator.forward_backward(user.rows(batch), losses.mse)
        accumulator.finalize()
        mean_square(reference, batch)
        user.expect(model, reference)
        optimizer.step()
        model.zero_grad(set_to_none=False)


@right(1, 2)
def caught_error_then_a_new_update(user: User) -> None:
    """No false refusal: the update is lost, and is begun again after finalize() said so."""
    model, batch = regressor(), numbers()
    reference, accumulator = copy.deepcopy(model), user.accumulator(model)
    accumulator.forward_backward(user.rows(batch), losses.mse)
    caught_error(accumulator, model, None, user)
    try:
        accumulator.finalize()
        raise AssertionError("finalize() closed an update that was lost")
    except MegabatchError:
        pass
    accumulator.forward_backward(user.rows(batch), losses.mse)
    accumulator.finalize()
    mean_square(reference, batch)
    user.expect(model, reference)


# What sees single microbatches.


@refused(MegabatchError, "hook", 1, 2, 3)
def tensor_hook(user: User) -> None:
    model = regressor()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    user.update(model, user.rows(numbers()), losses.mse)


@refused(MegabatchError, "hook", 1, 2, 3)
def post_accumulate_hook(user: User) -> None:
    """torch's tutorial of an optimizer in backward."""
    model = regressor()

    def step(parameter: Tensor) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(step)
    user.update(model, user.rows(numbers()), losses.mse)


@refused(MegabatchError, "hook", 1, 2)
def tensor_hook_that_comes_late(user: User) -> None:
    model = regressor()
    accumulator = user.accumulator(model)
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    accumulator.forward_backward(user.rows(numbers()), losses.mse)
    accumulator.finalize()


def _keep_on_parameter(name: str, layer: nn.Linear, gradients: Tensor) -> None:
    setattr(layer.weight, name, gradients)


def _keep_in_a_list(name: str, layer: nn.Linear, gradients: Tensor) -> None:
    vars(layer.weight).setdefault(name, []).append(gradients)


def _keep_on_module(name: str, layer: nn.Linear, gradients: Tensor) -> None:
    setattr(layer, name, gradients)


KEPT = {
    "grad_sample": (_keep_on_parameter, "grad_sample"),
    "grad_batch": (_keep_on_parameter, "grad_batch"),
    "batch_grad": (_keep_in_a_list, "batch_grad"),
    "on_a_module": (_keep_on_module, "norms"),
}


def _with_gradients_of_samples(model: nn.Sequential, keep: Callable[..., None], name: str) -> nn.Sequential:
    """As Opacus and BackPACK do it: hooks of a layer before its forward and after its backward."""
    inputs: list[Tensor] = []
    layer = model[0]

    def after(layer: nn.Module, grad_input: Any, grad_output: Any) -> None:
        keep(name, layer, torch.einsum("ni,nj->nij", grad_output[0], inputs.pop()))

    layer.register_forward_pre_hook(lambda layer, args: inputs.append(args[0].detach()))
    layer.register_full_backward_hook(after)
    return model


@refused(MegabatchError, "without weigh=", 1, 2, 3, **KEPT)
def gradients_of_samples_by_hooks(user: User, variant: tuple[Callable[..., None], str]) -> None:
    model = _with_gradients_of_samples(regressor(), *variant)
    user.update(model, user.rows(numbers()), losses.mse)


@refused(MegabatchError, "without weigh=", 1, 2)
def gradients_of_samples_in_a_loop_of_ones_own(user: User) -> None:
    model = _with_gradients_of_samples(regressor(), *KEPT["grad_sample"])
    accumulator, batch = user.accumulator(model), numbers()
    with accumulator.microbatch(0, of=1, sum_over=8) as part:
        part.scale((model(batch["x"]) - batch["labels"]).square().sum()).backward()


@right(1)
def gradients_of_samples_of_a_loss_without_weigh(user: User) -> None:
    """No false refusal: the total is not divided before its backward."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    samples = copy.deepcopy(model)
    _with_gradients_of_samples(model, *KEPT["batch_grad"])
    user.update(model, batch, squares, micro_batch_size=8)
    mean_square(reference, batch)
    user.expect(model, reference)
    for row in range(8):
        samples.zero_grad()
        (samples(batch["x"][[row]]) - batch["labels"][[row]]).square().sum().backward()
        user.expect_equal({"sample": model[0].weight.batch_grad[0][row]}, {"sample": samples[0].weight.grad})


@right(1, 2, 3)
def backward_hooks_that_log(user: User) -> None:
    """No false refusal: a hook keeps the norm of a layer's gradient as a number, and changes nothing."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)

    def log(layer: nn.Module, grad_input: Any, grad_output: Any) -> None:
        layer.norm = grad_output[0].norm()

    model[0].register_full_backward_hook(log)
    user.update(model, user.rows(batch), losses.mse)
    mean_square(reference, batch)
    user.expect(model, reference)


@right(1, 2, 3)
def forward_hooks(user: User) -> None:
    """No false refusal: hooks of modules, and a hook of an activation."""
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    user.update(model, user.rows(batch), losses.mse)
    mean_square(lambda x: reference[1:](reference[0](x) * 2), batch)
    user.expect(model, reference)


class Positions(nn.Module):
    """Two parameters whose gradients torch gives one memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.position, self.kind = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + (self.position[None] + self.kind[None])))


@right(1, 2, 3, one=(8, None), two=(4, None), eight=(1, None), one_clipped=(8, 0.01), four_clipped=(2, 0.01))
def gradients_that_share_memory(user: User, variant: tuple[int, float | None]) -> None:
    size, max_norm = variant
    model = Positions().double()
    reference = copy.deepcopy(model)
    batch = {"x": torch.randn(8, 5, 4).double(), "labels": torch.randn(8, 5, 1).double()}
    user.update(model, user.rows(batch), losses.mse, max_norm=max_norm, micro_batch_size=size)
    mean_square(reference, batch)
    gradients = [each.grad.clone() for each in reference.parameters()]  # each on a memory of its own
    norm = torch.stack([each.norm() for each in gradients]).norm()
    for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
        parameter.grad = gradient if max_norm is None else gradient * (max_norm / (norm + 1e-6))
    user.expect(model, reference)


# No false refusals.


def evaluated(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    model.eval()
    with torch.no_grad():
        model(numbers(5)["x"])
    model.train()


def logged(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None])
    copy.deepcopy(model), model.state_dict(), optimizer.state_dict()


def other_model_trained(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    user.update(regressor(), user.rows(numbers(5)), losses.mse)


def slopes_asked(accumulator: Any, model: nn.Module, optimizer: Any, user: User) -> None:
    torch.autograd.grad(model(numbers(5)["x"]).sum(), list(model.parameters()))


@right(1, 2, 3, evaluated=evaluated, logged=logged, other_model=other_model_trained, slopes=slopes_asked)
def harmless_between_calls(user: User, variant: Callable[..., None]) -> None:
    model = regressor()
    reference, accumulator = copy.deepcopy(model), user.accumulator(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in (2, 3):
        accumulator.forward_backward(user.rows(numbers(seed)), losses.mse)
        variant(accumulator, model, optimizer, user)
    accumulator.finalize()
    mean_square(reference, numbers(2), numbers(3))
    user.expect(model, reference)


@right(1)
def deepcopy_of_a_closed_accumulator(user: User) -> None:
    accumulator = user.accumulator(regressor())
    accumulator.forward_backward(numbers(3), losses.mse)
    accumulator.finalize()
    twin = copy.deepcopy(accumulator)
    reference = copy.deepcopy(twin.model)
    reference.zero_grad()
    twin.forward_backward(numbers(), losses.mse)
    twin.finalize()
    mean_square(reference, numbers())
    user.expect(twin.model, reference)
