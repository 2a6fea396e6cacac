"""Open updates that cannot be saved, or not be gone on with."""

from typing import Any

import torch

from megabatch import GradientAccumulator, MegabatchError
from tests.exact.experts import samples, sparse_lm, unbalanced
from tests.unit.failures.experts import bias_of
from tests.unit.failures.pipeline import pipeline
from tests.unit.failures.table import SAMPLES, Failure, accumulator, squares, weighed_squares
from tests.unit.failures.wrappers import fsdp1, layers


def opened(model: torch.nn.Module | None = None, **settings: Any) -> GradientAccumulator:
    gradient = accumulator(model, **settings)
    gradient.forward_backward(SAMPLES, weighed_squares)
    return gradient


def saved_inside_the_loop() -> None:
    gradient = accumulator()
    for microbatch in gradient.microbatches(SAMPLES):
        gradient.backward(*squares(gradient.model, microbatch))
        gradient.state_dict()


def of_other_ranks() -> None:
    accumulator().load_state_dict(opened().state_dict() | {"ranks": 2})


def of_another_model() -> None:
    accumulator(torch.nn.Linear(1, 2).double()).load_state_dict(opened().state_dict())


def experts_counted_before() -> None:
    gradient, _ = bias_of(sparse_lm())
    gradient.forward_backward(samples(0, 2), unbalanced)
    again, _ = bias_of(sparse_lm())
    again.load_state_dict(gradient.state_dict())
    again.forward_backward(samples(0, 2), unbalanced)


FAILURES = {
    "saved inside a call": Failure("state_dict()", saved_inside_the_loop, MegabatchError),
    "gone on with on other ranks": Failure("of 2 ranks … are 1", of_other_ranks),
    "gone on with by another model": Failure("(1, 1) … (2, 1)", of_another_model),
    "gone on with where experts were counted": Failure("ExpertBias", experts_counted_before),
}
IN_A_GROUP = {
    "a saved update under FSDP1": Failure("FSDP1", lambda: opened(fsdp1(layers())).state_dict()),
    "a saved update of a pipeline": Failure("a pipeline", lambda: opened(pipeline()).state_dict()),
}
