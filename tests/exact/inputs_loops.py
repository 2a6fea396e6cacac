"""Input mutations of loops that are not megabatch's: what a body does beside the backward of its scaled loss."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megabatch import MegabatchError
from tests.exact.inputs import Sample, User, mean_square, numbers, refused, regressor, right

NUM_MICROBATCHES = 3
Body = Callable[[Any, Any, Sample, int], None]  # of the part, the model, a microbatch and its index


def sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model) if dist.is_initialized() else model,
    "fsdp2": lambda model: sharded(model) if dist.is_initialized() else model,
}


def _loop(user: User, model: nn.Module, body: Body, **options: Any) -> None:
    """One update of several microbatches of a rank, of which each has every sample."""
    accumulator = user.accumulator(model, **options)
    for index in range(NUM_MICROBATCHES):
        with accumulator.microbatch(index, of=NUM_MICROBATCHES, sum_over=8) as part:
            body(part, model, numbers(2 + index), index)
    accumulator.finalize()


def _expect(user: User, model: nn.Module, reference: nn.Module) -> None:
    mean_square(reference, *(numbers(2 + index) for index in range(NUM_MICROBATCHES)))
    user.expect(model, reference)


def _squares(model: Any, batch: Sample) -> Tensor:
    return (model(batch["x"]) - batch["labels"]).square().sum()


def _after(number: int) -> Body:
    """An auxiliary loss by itself, after the scaled one."""

    def body(part: Any, model: Any, batch: Sample, index: int) -> None:
        part.scale(_squares(model, batch)).backward()
        if index == number:
            model(batch["x"]).square().sum().backward()

    return body


def _before(part: Any, model: Any, batch: Sample, index: int) -> None:
    loss = part.scale(_squares(model, batch))
    model(batch["x"]).square().sum().backward()
    loss.backward()


def _of_a_penalty(part: Any, model: Any, batch: Sample, index: int) -> None:
    """It reaches the last layer alone."""
    part.scale(_squares(model, batch)).backward()
    parameters = [each for each in model.parameters() if each.shape[-1] == 1]
    torch.stack([each.square().sum() for each in parameters]).sum().backward()


def _of_one_graph(part: Any, model: Any, batch: Sample, index: int) -> None:
    output = model(batch["x"])
    part.scale((output - batch["labels"]).square().sum()).backward(retain_graph=True)
    output.square().sum().backward()


def _unscaled(part: Any, model: Any, batch: Sample, index: int) -> None:
    _squares(model, batch).backward()
    model(batch["x"]).square().sum().backward()


SECONDS = {
    f"{wrap}_{name}": (wrap, body)
    for wrap in WRAPS
    for name, body in {
        "first": _after(0),
        "middle": _after(1),
        "last": _after(2),
        "before": _before,
        "one_graph": _of_one_graph,
        "unscaled": _unscaled,
    }.items()
}


@refused(MegabatchError, "backward", 1, 2, **SECONDS)
def second_backward(user: User, variant: tuple[str, Body]) -> None:
    wrap, body = variant
    _loop(user, WRAPS[wrap](regressor()), body)


@refused(MegabatchError, "backward", 1, 2)
def second_backward_of_a_penalty(user: User) -> None:
    _loop(user, regressor(), _of_a_penalty)


@refused(MegabatchError, "backward", 2, 3)
def second_backward_on_one_rank(user: User) -> None:
    model = DistributedDataParallel(regressor())
    _loop(user, model, _after(0 if user.rank else NUM_MICROBATCHES))


def _added(part: Any, model: Any, batch: Sample, index: int) -> None:
    (part.scale(_squares(model, batch)) + 0.1 * model(batch["x"]).square().sum()).backward()


def _added_in_place(part: Any, model: Any, batch: Sample, index: int) -> None:
    loss = part.scale(_squares(model, batch))
    loss.add_(0.1 * model(batch["x"]).square().sum())
    loss.backward()


def _stacked(part: Any, model: Any, batch: Sample, index: int) -> None:
    torch.stack([part.scale(_squares(model, batch)), model(batch["x"]).square().sum()]).sum().backward()


def _from_the_left(part: Any, model: Any, batch: Sample, index: int) -> None:
    (model(batch["x"]).square().sum() - part.scale(_squares(model, batch))).backward()


ADDED = {"sum": _added, "in_place": _added_in_place, "stack": _stacked, "left": _from_the_left}


@refused(MegabatchError, "give their sum to scale()", 1, 2, **ADDED)
def loss_added_to_a_scaled_one(user: User, variant: Body) -> None:
    _loop(user, regressor(), variant)


@right(1, 2, **{wrap: wrap for wrap in WRAPS})
def scaled_loss_that_is_logged(user: User, variant: str) -> None:
    """No false refusal: what a loop does with its loss beside the backward."""
    running: list[Any] = [0]

    def body(part: Any, model: Any, batch: Sample, index: int) -> None:
        loss = part.scale(_squares(model, batch))
        assert loss.item() == float(loss) == float(loss.detach().clone())
        assert f"{loss:.3f}"
        torch.stack([loss.detach(), torch.zeros_like(loss)]).mean()
        running[0] = running[0] + loss
        torch.autograd.backward(loss)

    model = regressor()
    reference = copy.deepcopy(model)
    model = WRAPS[variant](model)
    _loop(user, model, body)
    _expect(user, model, reference)


class Checkpointed(nn.Module):
    """Layers but the last run again in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = regressor(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = checkpoint(layer, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.reentrant)
        return self.layers[-1](x)


@right(1, 2, reentrant=True, other=False)
def checkpointed_layers_in_a_loop(user: User, variant: bool) -> None:
    """No false refusal: reentrant checkpointing starts a backward of its own for each layer."""
    model = Checkpointed(reentrant=variant)
    reference = copy.deepcopy(model.layers)
    _loop(user, model, lambda part, model, batch, index: part.scale(_squares(model, batch)).backward())
    mean_square(reference, *(numbers(2 + index) for index in range(NUM_MICROBATCHES)))
    user.expect(model.layers, reference)


@right(1, 2)
def backward_of_another_model_in_a_loop(user: User) -> None:
    """No false refusal: a critic is trained in the same body, by its own backward."""
    model, critic = regressor(), regressor()
    reference = copy.deepcopy(model)

    def body(part: Any, model: Any, batch: Sample, index: int) -> None:
        part.scale(_squares(model, batch)).backward()
        critic(batch["x"]).sum().backward()
        torch.autograd.grad(model(batch["x"]).sum(), list(model.parameters()))

    _loop(user, model, body)
    _expect(user, model, reference)
