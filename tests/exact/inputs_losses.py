"""Input mutations of losses: a backward of their own, trained tensors outside of the model, odd totals."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from megabatch import JointLoss, LossContractError, MegabatchError, loss, losses
from tests.exact.inputs import Sample, User, mean_square, numbers, refused, regressor, right, squares
from tests.exact.wrappers import wrap

# Losses that run a backward of their own.


class TwoParts(nn.Module):
    """A body and a head; given labels, the total with its gradients computed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None, divisor: float = 1.0) -> Tensor:
        hidden = torch.tanh(self.body(x))
        if labels is None:
            return self.head(hidden)
        return EagerSquares.apply(hidden, self.head.weight, labels, divisor)


class EagerSquares(torch.autograd.Function):
    """A head and its loss, differentiated in the forward; its backward does not look at grad_output."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, divisor: float) -> Tensor:
        inputs = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        with torch.enable_grad():
            total = ((inputs[0] @ inputs[1].T - labels) ** 2).sum() / divisor
            ctx.save_for_backward(*torch.autograd.grad(total, inputs))
        return total.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return *ctx.saved_tensors, None, None


class HandedOn(torch.autograd.Function):
    """Passes a total on, with the gradient of its hidden states that is known already."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return *ctx.saved_tensors, None, None


def _in_chunks(model: TwoParts, batch: Sample, divisor: float) -> tuple[Tensor, int]:
    """As torchtitan's chunked cross-entropy: a backward for each chunk adds to the head's gradient."""
    hidden = torch.tanh(model.body(batch["x"]))
    apart, total = hidden.detach().requires_grad_(), hidden.new_zeros(())
    for part, labels in zip(apart.chunk(2), batch["labels"].chunk(2), strict=True):
        chunk = F.mse_loss(model.head(part), labels, reduction="sum") / divisor
        chunk.backward()
        total += chunk.detach()
    return HandedOn.apply(hidden, total, apart.grad), len(hidden)


def _eager(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
    return model(batch["x"], batch["labels"], divisor), len(batch["x"])


def two_parts() -> TwoParts:
    torch.manual_seed(1)
    return TwoParts().double()


@refused(LossContractError, "divisor", 1, 2, 3, in_chunks=_in_chunks, eager=_eager)
def own_backward(user: User, variant: Any) -> None:
    user.update(two_parts(), user.rows(numbers()), loss(weigh=lambda b: len(b["x"]))(lambda m, b: variant(m, b, 1.0)))


@refused(LossContractError, "divisor", 1, 2, in_chunks=_in_chunks, eager=_eager)
def own_backward_uncounted(user: User, variant: Any) -> None:
    user.update(two_parts(), user.rows(numbers()), lambda model, batch: variant(model, batch, 1.0))


def _given_the_divisor(user: User, inner: Any, wrapper: str) -> None:
    model, batch = two_parts(), numbers()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: len(batch["x"]))
    def divided(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
        return inner(model, batch, divisor)

    wrapped = fully_shard(model) if wrapper == "fsdp2" else wrap(model, wrapper)
    update = user.update(wrapped, user.rows(batch), divided)
    mean_square(reference, batch)
    expected = F.mse_loss(reference(batch["x"]), batch["labels"])
    assert abs(float(update.loss) / float(expected) - 1) < 1e-12, f"the loss is {update.loss}, expected {expected}"
    user.expect(wrapped, reference)


@right(1, 2, 3, in_chunks=_in_chunks, eager=_eager)
def own_backward_given_the_divisor(user: User, variant: Any) -> None:
    _given_the_divisor(user, variant, "plain")


@right(2, 3, ddp="ddp", fsdp2="fsdp2")
def own_backward_given_the_divisor_wrapped(user: User, variant: str) -> None:
    _given_the_divisor(user, _eager, variant)


@right(1, 2, 3)
def own_backward_given_the_divisor_in_two_calls(user: User) -> None:
    model, batch = two_parts(), numbers()
    reference = copy.deepcopy(model)

    @loss(weigh=lambda batch: len(batch["x"]))
    def divided(model: nn.Module, batch: Sample, divisor: float) -> tuple[Tensor, int]:
        return _eager(model, batch, divisor)

    accumulator = user.accumulator(model)
    accumulator.forward_backward(user.rows(batch), divided)
    accumulator.forward_backward(user.rows(numbers(3)), divided)
    accumulator.finalize()
    mean_square(reference, batch, numbers(3))
    user.expect(model, reference)


# What is trained and is not the model's.


def _outside(kind: str) -> tuple[nn.Module, Any, Any]:
    """The model, what is outside of it, and the loss of a batch."""
    torch.manual_seed(1)
    model = nn.Linear(4, 1).double()
    if kind == "head":
        model, head = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
        return model, head, lambda model, batch: squares(lambda x: head(model(x)), batch)
    value = torch.tensor(0.7).double().requires_grad_()
    if kind != "plain_tensor":
        value = nn.Parameter(value.detach())
    if kind in ("temperature", "plain_tensor"):
        return model, value, lambda model, batch: squares(lambda x: model(x) / value.exp(), batch)

    def learned(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
        total, weight = squares(model, batch)
        return total * torch.exp(-value) + weight * value, weight

    return model, value, learned


@refused(
    LossContractError,
    "[model, ",
    1,
    2,
    3,
    head="head",
    temperature="temperature",
    learned_weight="weight",
    plain_tensor="plain_tensor",
)
def trained_outside_of_the_model(user: User, variant: str) -> None:
    model, _, loss_fn = _outside(variant)
    user.update(model, user.rows(numbers()), loss(weigh=lambda batch: len(batch["x"]))(loss_fn))


@refused(LossContractError, "[model, ", 1, 2)
def trained_outside_of_the_model_uncounted(user: User) -> None:
    model, _, loss_fn = _outside("head")
    user.update(wrap(model, "ddp") if user.world > 1 else model, user.rows(numbers()), loss_fn)


@right(1, 2, 3)
def head_beside_the_model(user: User) -> None:
    """The remedy."""
    model, head, _ = _outside("head")
    references, batch = copy.deepcopy((model, head)), numbers()

    @loss(weigh=lambda batch: len(batch["x"]))
    def both(models: list[nn.Module], batch: Sample) -> tuple[Tensor, int]:
        return squares(lambda x: models[1](models[0](x)), batch)

    user.update([model, head], user.rows(batch), both)
    mean_square(lambda x: references[1](references[0](x)), batch)
    for each, reference in zip((model, head), references, strict=True):
        user.expect(each, reference)


@right(1, 2, 3)
def frozen_teacher_outside_of_the_model(user: User) -> None:
    """No false refusal: what is outside and is not trained."""
    model, batch = regressor(), numbers()
    reference, teacher = copy.deepcopy(model), regressor().requires_grad_(False)
    distilled = loss(weigh=lambda b: len(b["x"]))(
        lambda model, b: squares(model, b | {"labels": b["labels"] + teacher(b["x"])})
    )
    user.update(model, user.rows(batch), distilled)
    mean_square(reference, batch | {"labels": batch["labels"] + teacher(batch["x"])})
    user.expect(model, reference)


# Terms and totals.


def _with_unweighed_term(model: nn.Module, batch: Sample, scale: float) -> Any:
    outputs = model(batch["x"])
    term = scale * (outputs**4).sum()
    return {"main": squares(model, batch), "rare": (term, 0)}


@refused(LossContractError, "'rare'", 1, 2, 3)
def term_without_weight_and_with_a_total(user: User) -> None:
    counted = loss(weigh=lambda batch: {"main": len(batch["x"]), "rare": 0})
    user.update(regressor(), user.rows(numbers()), counted(lambda m, b: _with_unweighed_term(m, b, 1.0)))


@right(1, 2, 3)
def term_without_weight_and_without_a_total(user: User) -> None:
    model, batch = regressor(), numbers()
    reference = copy.deepcopy(model)
    counted = loss(weigh=lambda batch: {"main": len(batch["x"]), "rare": 0})
    user.update(model, user.rows(batch), counted(lambda m, b: _with_unweighed_term(m, b, 0.0)))
    mean_square(reference, batch)
    user.expect(model, reference)


class Amplitude(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(4, 1, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.weight.dtype) @ self.weight


@refused(LossContractError, "complex", 1, 2)
def complex_total(user: User) -> None:
    counted = loss(weigh=lambda batch: len(batch["x"]))
    user.update(Amplitude(), user.rows(numbers()), counted(lambda m, b: (m(b["x"]).sum(), len(b["x"]))))


@right(1, 2, 3)
def complex_model_clipped(user: User) -> None:
    model, batch = Amplitude(), numbers()
    reference = copy.deepcopy(model)
    counted = loss(weigh=lambda batch: len(batch["x"]))
    user.update(model, user.rows(batch), counted(lambda m, b: squares(lambda x: m(x).abs(), b)), max_norm=0.01)
    mean_square(lambda x: reference(x).abs(), batch)
    nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    user.expect(model, reference)


# No false refusals.


class Reversed(torch.autograd.Function):
    """Turns a gradient round, and looks at it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


def reversal(model: nn.Module, batch: Sample) -> Tensor:
    return ((model[1:](Reversed.apply(model[0](batch["x"]))) - batch["labels"]) ** 2).sum()


def penalty(model: nn.Module, batch: Sample) -> Tensor:
    """A penalty on the gradient at inputs, which carry one."""
    x = batch["x"].clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return ((outputs - batch["labels"]) ** 2).sum() + (slope**2).sum()


def checkpointed(reentrant: bool) -> Any:
    def run(model: nn.Module, batch: Sample) -> Tensor:
        x = batch["x"].clone().requires_grad_()
        return ((checkpoint(model, x, use_reentrant=reentrant) - batch["labels"]) ** 2).sum()

    return run


def without_gradients(model: nn.Module, batch: Sample) -> Tensor:
    """The model's own output without gradients is its target."""
    with torch.no_grad():
        target = model(batch["x"] + 1)
    return ((model(batch["x"]) - target) ** 2).sum()


def functional(model: nn.Module, batch: Sample) -> Tensor:
    outputs = torch.func.functional_call(model, dict(model.named_parameters()), (batch["x"],))
    return ((outputs - batch["labels"]) ** 2).sum()


FINE = {
    "reversal": reversal, "penalty": penalty, "checkpointed": checkpointed(False), "reentrant": checkpointed(True),
    "without_gradients": without_gradients, "functional": functional,
}  # fmt: skip


@right(1, 2, 3, **FINE)
def unusual_loss(user: User, variant: Any) -> None:
    """It is right with a counted weight and without."""
    batch = numbers()
    for counted in (True, False):
        model = regressor()
        reference = copy.deepcopy(model)

        def loss_fn(model: nn.Module, batch: Sample) -> tuple[Tensor, int]:
            return variant(model, batch), len(batch["x"])

        user.update(model, user.rows(batch), loss(weigh=lambda batch: len(batch["x"]))(loss_fn) if counted else loss_fn)
        (variant(reference, batch) / 8).backward()
        user.expect(model, reference)


class Clamped(nn.Module):
    """Clamps the gradient of an activation, as recurrent networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = regressor()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return self.layers[1:](hidden)


@right(1, 2, 3)
def clamped_gradient_of_an_activation(user: User) -> None:
    """It sees what it would see of the uncut batch, where the weight is counted before the backward."""
    model, batch = Clamped(), numbers()
    reference = copy.deepcopy(model)
    user.update(model, user.rows(batch), losses.mse)
    mean_square(reference, batch)
    user.expect(model, reference)


AMBIENT = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "off": lambda: torch.set_grad_enabled(False),
}


@refused(MegabatchError, "is on around the call; leave it out", 1, 2, 3, **AMBIENT)
def gradients_switched_off_around_a_call(user: User, variant: Callable[[], Any]) -> None:
    accumulator = user.accumulator(regressor())
    with variant():
        accumulator.forward_backward(user.rows(numbers()), losses.mse)
    accumulator.finalize()


@refused(MegabatchError, "is on around the call; leave it out", 1, 2, **AMBIENT)
def gradients_switched_off_around_a_loop(user: User, variant: Callable[[], Any]) -> None:
    model = regressor()
    accumulator = user.accumulator(model)
    with variant(), accumulator.microbatch(0, of=1, sum_over=8) as part:
        part.scale(model(numbers()["x"]).sum()).backward()


@refused(MegabatchError, "encode failed (ValueError: one sample)", 2, 3)
def encode_that_fails_on_one_rank(user: User) -> None:
    def encode(model: Any, batch: Sample) -> Tensor:
        if user.rank == 0:
            raise ValueError("one sample")
        return model(batch["x"])

    try:
        user.update(regressor(), user.rows(numbers()), JointLoss(encode, lambda rows: (rows.square().sum(), len(rows))))
    except ValueError as error:
        raise MegabatchError(f"encode failed (ValueError: {error})") from error
