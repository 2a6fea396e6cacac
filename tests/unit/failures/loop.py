"""Misuse of the open loop and of finalize."""

import torch
from torch import nn

from megabatch import Learner, MegabatchError
from tests.exact.spikes import Spikes
from tests.unit.failures.table import SAMPLES, Failure, accumulator, linear, squares

NONE_OPEN = "finalize() … forward_backward()"
NESTED = "microbatches()"
LOST = "backward() … microbatch 1 when"
NONE_TO_RUN = "backward() … microbatches()"


def no_backward() -> None:
    for _ in accumulator().microbatches(SAMPLES):
        pass


def backward_twice() -> None:
    gradient = accumulator()
    for microbatch in gradient.microbatches(SAMPLES):
        gradient.backward(*squares(gradient.model, microbatch))
        gradient.backward(*squares(gradient.model, microbatch))


def backward_again(*, at_once: bool) -> None:
    """After one that memory has failed, half-way."""
    model = nn.Sequential(linear(), linear())
    Spikes(model, ("0", "1")).set({1: ("backward", 0)})
    gradient = accumulator(model)
    for microbatch in gradient.microbatches(SAMPLES):
        try:
            gradient.backward(*squares(model, microbatch))
        except torch.OutOfMemoryError:
            if at_once:
                gradient.backward(*squares(model, microbatch))


def backward_outside() -> None:
    gradient = accumulator()
    gradient.backward(*squares(gradient.model, SAMPLES[0]))


def nested() -> None:
    gradient = accumulator()
    for _ in gradient.microbatches(SAMPLES):
        for _ in gradient.microbatches(SAMPLES):
            pass


def call_inside_the_loop() -> None:
    gradient = accumulator()
    for _ in gradient.microbatches(SAMPLES):
        gradient.forward_backward(SAMPLES, squares)


def finalize_inside_the_loop() -> None:
    gradient = accumulator()
    for _ in gradient.microbatches(SAMPLES):
        gradient.finalize()


def finalize_after_backward_inside_the_loop() -> None:
    gradient = accumulator()
    for microbatch in gradient.microbatches(SAMPLES):
        gradient.backward(*squares(gradient.model, microbatch))
        gradient.finalize()


def finalize_after_a_break() -> None:
    gradient = accumulator()
    for microbatch in gradient.microbatches(SAMPLES):
        gradient.backward(*squares(gradient.model, microbatch))
        break
    gradient.finalize()


def finalize_after_a_break_with_the_loop_held() -> None:
    gradient = accumulator()
    loop = gradient.microbatches(SAMPLES)
    gradient.backward(*squares(gradient.model, next(loop)))
    gradient.finalize()


def nested_after_backward() -> None:
    gradient = accumulator()
    for microbatch in gradient.microbatches(SAMPLES):
        gradient.backward(*squares(gradient.model, microbatch))
        gradient.forward_backward(SAMPLES, squares)


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
    "no backward in the body": Failure("backward() … microbatch 0", no_backward, MegabatchError),
    "backward twice": Failure(NONE_TO_RUN, backward_twice, MegabatchError),
    "backward again after it has failed": Failure(LOST, lambda: backward_again(at_once=True), MegabatchError),
    "a loop that goes on after backward has failed": Failure(
        LOST, lambda: backward_again(at_once=False), MegabatchError
    ),
    "backward outside": Failure(NONE_TO_RUN, backward_outside, MegabatchError),
    "nested loops": Failure(NESTED, nested, MegabatchError),
    "nested loops, after backward": Failure(NESTED, nested_after_backward, MegabatchError),
    "a call inside the loop": Failure(NESTED, call_inside_the_loop, MegabatchError),
    "finalize without an update": Failure(NONE_OPEN, lambda: accumulator().finalize(), MegabatchError),
    "finalize inside the loop": Failure(NONE_OPEN, finalize_inside_the_loop, MegabatchError),
    "finalize after backward inside the loop": Failure(
        NONE_OPEN, finalize_after_backward_inside_the_loop, MegabatchError
    ),
    "finalize after a break": Failure(NONE_OPEN, finalize_after_a_break, MegabatchError),
    "finalize after a break, with the loop held": Failure(
        NONE_OPEN, finalize_after_a_break_with_the_loop_held, MegabatchError
    ),
    "finalize after an error": Failure(NONE_OPEN, finalize_after_an_error, MegabatchError),
    "finalize twice": Failure(NONE_OPEN, finalize_twice, MegabatchError),
    "max_norm=0": Failure("max_norm … is 0", lambda: finalize(max_norm=0)),
    "max_norm=nan": Failure("max_norm", lambda: finalize(max_norm=float("nan"))),
    "weight=-1": Failure("is -1", lambda: finalize(weight=-1)),
}
