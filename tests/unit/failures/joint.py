"""Joint losses that break their contract, and places where none can be run."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from megabatch import JointLoss, LossContractError
from tests.unit.failures.table import SAMPLES, Failure, accumulator, here, linear, update

ROWS = "a tensor"
CHANGED = "the second time"
REACHED = "JointLoss … (1, 1)"


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


JOINT = {
    "encode returns nothing": (encoding(lambda outputs: ()), f"encode returned nothing; expected {ROWS}"),
    "encode returns a number": (encoding(lambda outputs: 3.0), f"encode returned a float; expected {ROWS}"),
    "encode returns None beside a tensor": (encoding(lambda outputs: (outputs, None)), "NoneType"),
    "encode returns a mean": (encoding(lambda outputs: outputs.mean()), "() … for 2 samples"),
    "encode returns other rows": (encoding(lambda outputs: outputs[:1]), "(1, 1) … for 2 samples"),
    "encode returns other shapes": (
        by_microbatch(lambda outputs: {"q": outputs}, lambda outputs: {"q": outputs.expand(-1, 3)}),
        "['q'] … torch.float64 … (1,) … microbatch 0 and … ['q'] … torch.float64",
    ),
    "encode draws from another generator": (encoding(lambda outputs: outputs * random.random()), CHANGED),
    "encode detaches": (encoding(lambda outputs: outputs.detach()), "carries a gradient"),
    "a joint loss that detaches": (coupling(lambda encoded: (encoded.detach().sum(), 2)), "carries a gradient"),
    "a joint loss that is a mean": (coupling(lambda encoded: encoded.mean()), "()"),
}

FAILURES = {
    name: Failure(text, lambda loss_fn=loss_fn: update(loss_fn), LossContractError)
    for name, (loss_fn, text) in JOINT.items()
} | {
    "a joint loss that reaches a parameter": Failure(REACHED, reaching, LossContractError),
}


DTYPES = "torch.float64 … (1,) … rank 0 and … torch.float32 … (1,) … rank 1"
FEWER = "data rank 1 of 2 … (1, 1) … for 2 samples"
DREW = "JointLoss"
CONTEXT = "JointLoss … 'cp'"


def dtypes_differ() -> None:
    dtype = here(torch.float32, torch.float64)
    accumulator().forward_backward(SAMPLES, encoding(lambda outputs: outputs.to(dtype)))


def fewer_rows() -> None:
    accumulator().forward_backward(SAMPLES, encoding(here(lambda outputs: outputs[:1], lambda outputs: outputs)))


def loss_draws() -> None:
    accumulator().forward_backward(SAMPLES, coupling(lambda encoded: (encoded.sum() * torch.rand(()), 1)))


def changes() -> None:
    times = here(random.random, lambda: 1.0)
    accumulator().forward_backward(SAMPLES, encoding(lambda outputs: outputs * times()))


def cut_along_the_sequence() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    batch = [{"x": torch.ones(2, 1, dtype=torch.float64)}]
    accumulator(mesh=mesh).forward_backward(batch, coupling(squares))


JOBS: dict[str, tuple[Callable[[], None], list[str]]] = {  # what each of two ranks is told
    "representations of two dtypes": (dtypes_differ, 2 * [f"LossContractError: {DTYPES}"]),
    "fewer rows on one rank": (fewer_rows, 2 * [f"LossContractError: {FEWER}"]),
    "a joint loss that draws": (loss_draws, 2 * [f"LossContractError: {DREW}"]),
    "representations that change on one rank": (changes, 2 * [f"LossContractError: {CHANGED}"]),
    "a joint loss over stretches": (cut_along_the_sequence, 2 * [f"PlanError: {CONTEXT}"]),
}


def job(name: str) -> str:
    try:
        JOBS[name][0]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
