"""Joint losses that break their contract, and places where none can be run."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

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


DTYPES = (
    "encode gives torch.float64 (1,) on data rank 0 and torch.float32 (1,) on data rank 1; "
    "give rows of one shape and dtype on all"
)
FEWER = f"data rank 1 of 2: encode returned the shape (1, 1) for 2 samples; expected {ROWS}"
DREW = "the loss of a JointLoss drew random numbers, which differ from rank to rank; draw them in encode"
CONTEXT = "a JointLoss needs whole samples on every rank, but the mesh has the axis 'cp'; use data axes and tp"


def here(mine: Any, others: Any) -> Any:
    """``mine`` on rank 1, where the fault is, and ``others`` on rank 0."""
    return mine if dist.get_rank() == 1 else others


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
