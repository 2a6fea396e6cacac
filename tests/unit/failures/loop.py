"""Misuse of calls and of finalize."""

import torch

from megabatch import Learner, MegabatchError
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares

NONE_OPEN = "finalize() … forward_backward()"


def call_inside_a_loss() -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, lambda *_: gradient.forward_backward(SAMPLES, squares))


def finalize_inside_a_loss() -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, lambda *_: gradient.finalize())


def finalize_after_an_error() -> None:
    gradient = accumulator()
    try:
        gradient.forward_backward(SAMPLES, lambda model, microbatch: 1 / 0)
    except ZeroDivisionError:
        gradient.finalize()


def finalize_twice() -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, squares)
    gradient.finalize()
    gradient.finalize()


def finalize(**settings) -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, squares)
    gradient.finalize(**settings)


def plateau() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Learner(model, optimizer, accumulator(model), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


FAILURES = {
    "a schedule that is stepped with a metric": Failure("ReduceLROnPlateau", plateau),
    "a call inside a loss": Failure(
        "forward_backward() or microbatch() was called inside", call_inside_a_loss, MegabatchError
    ),
    "finalize without an update": Failure(NONE_OPEN, lambda: accumulator().finalize(), MegabatchError),
    "finalize inside a loss": Failure("finalize() was called inside", finalize_inside_a_loss, MegabatchError),
    "finalize after an error": Failure(NONE_OPEN, finalize_after_an_error, MegabatchError),
    "finalize twice": Failure(NONE_OPEN, finalize_twice, MegabatchError),
    "max_norm=0": Failure("max_norm … is 0", lambda: finalize(max_norm=0)),
    "max_norm=nan": Failure("max_norm", lambda: finalize(max_norm=float("nan"))),
    "weight=-1": Failure("is -1", lambda: finalize(weight=-1)),
}
