"""Joint losses that break their contract, and places where none can be run."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megabatch import JointLoss, LossContractError, PlanError
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, update

ROWS = "a tensor, or a tuple or mapping of tensors, with one row per sample"
CHANGED = (
    "encode gave other representations for the same microbatch the second time; let nothing in it change from call to "
    "call, and draw random numbers from torch's own generators"
)
REACHED = (
    "the loss of a JointLoss reaches a trainable parameter of shape (1, 1) by itself; return what it needs from "
    "encode, one row per sample: temperature.expand(len(queries))"
)


def squares(encoded: Tensor) -> tuple[Tensor, int]:
    return (encoded**2).sum(), len(encoded)


def encoding(make: Callable[[Tensor], Any]) -> JointLoss:
    """A joint loss whose encode returns what ``make`` makes of the outputs."""
    return JointLoss(lambda model, microbatch: make(model(microbatch["x"])), squares)


def coupling(loss: Callable[..., Any]) -> JointLoss:
    return JointLoss(lambda model, microbatch: model(microbatch["x"]), loss)


def by_microbatch(*makes: Callable[[Tensor], Any]) -> JointLoss:
    """Another encode for every microbatch."""
    turn = iter(makes)
    return encoding(lambda outputs: next(turn)(outputs))


def reaching() -> None:
    model = linear()
    accumulator(model).forward_backward(SAMPLES, coupling(lambda encoded: ((encoded * model.weight).sum(), 1)))


def in_a_loop() -> None:
    for _ in accumulator().microbatches(SAMPLES, coupling(squares)):
        pass


JOINT = {
    "encode returns nothing": (encoding(lambda outputs: ()), f"encode returned nothing; expected {ROWS}"),
    "encode returns a number": (encoding(lambda outputs: 3.0), f"encode returned a float; expected {ROWS}"),
    "encode returns None beside a tensor": (
        encoding(lambda outputs: (outputs, None)), f"encode returned a NoneType; expected {ROWS}",
    ),
    "encode returns a mean": (
        encoding(lambda outputs: outputs.mean()), f"encode returned the shape () for 2 samples; expected {ROWS}",
    ),
    "encode returns other rows": (
        encoding(lambda outputs: outputs[:1]), f"encode returned the shape (1, 1) for 2 samples; expected {ROWS}",
    ),
    "encode returns other shapes": (
        by_microbatch(lambda outputs: {"q": outputs}, lambda outputs: {"q": outputs.expand(-1, 3)}),
        "encode gives ['q'] torch.float64 (1,) for microbatch 0 and ['q'] torch.float64 (3,) for microbatch 1; "
        "give rows of one shape and dtype, padded to one length if need be",
    ),
    "encode draws from another generator": (encoding(lambda outputs: outputs * random.random()), CHANGED),
    "encode detaches": (
        encoding(lambda outputs: outputs.detach()),
        "no representation carries a gradient; compute them in encode from the model's output, undetached",
    ),
    "a joint loss that detaches": (
        coupling(lambda encoded: (encoded.detach().sum(), 2)),
        "no total of the loss carries a gradient; compute one from the model's output, undetached",
    ),
    "a joint loss that is a mean": (
        coupling(lambda encoded: encoded.mean()),
        "the loss is a tensor of shape (), perhaps a mean; "
        "return (total, weight): the sum over the microbatch and the count it is divided by",
    ),
}  # fmt: skip

FAILURES = {
    name: Failure(LossContractError, text, lambda loss_fn=loss_fn: update(loss_fn))
    for name, (loss_fn, text) in JOINT.items()
} | {
    "a joint loss that reaches a parameter": Failure(LossContractError, REACHED, reaching),
    "a joint loss in a loop": Failure(
        PlanError,
        "microbatches() was given a JointLoss, which needs all samples at once; give it to forward_backward()",
        in_a_loop,
    ),
}


class Other(nn.Module):
    """Gives another kind of rows where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return self.linear(x).to(dtype)


DTYPES = (
    "encode gives torch.float64 (1,) on data rank 0 and torch.float32 (1,) on data rank 1; "
    "give rows of one shape and dtype on all"
)
FEWER = f"data rank 1 of 2: encode returned the shape (1, 1) for 2 samples; expected {ROWS}"
DREW = "the loss of a JointLoss drew random numbers, which differ from rank to rank; draw them in encode"
CONTEXT = "a JointLoss needs whole samples on every rank, but the mesh has the axis 'cp'; use data axes and tp"


def dtypes_differ(here: Callable[[Any, Any], Any]) -> None:
    """On two ranks: ``here`` gives its first argument on rank 1 and its second on rank 0."""
    dtype = here(torch.float32, torch.float64)
    accumulator(Other()).forward_backward(SAMPLES, JointLoss(lambda model, batch: model(batch["x"], dtype), squares))


def fewer_rows(here: Callable[[Any, Any], Any]) -> None:
    accumulator().forward_backward(SAMPLES, encoding(here(lambda outputs: outputs[:1], lambda outputs: outputs)))


def draws(here: Callable[[Any, Any], Any]) -> None:
    accumulator().forward_backward(SAMPLES, coupling(lambda encoded: (encoded.sum() * torch.rand(()), 1)))


def changes(here: Callable[[Any, Any], Any]) -> None:
    times = here(random.random, lambda: 1.0)
    accumulator().forward_backward(SAMPLES, encoding(lambda outputs: outputs * times()))


ON_TWO_RANKS = {  # what both are told
    "representations of two dtypes": (dtypes_differ, DTYPES),
    "fewer rows on one rank": (fewer_rows, FEWER),
    "a joint loss that draws": (draws, DREW),
    "representations that change on one rank": (changes, CHANGED),
}
