"""States that cannot be saved, or not be loaded."""

from collections.abc import Sequence
from typing import Any

from megabatch import Extension, MegabatchError, Planner
from megabatch.planners import Auto, Tokens
from tests.unit.failures.table import SAMPLES, Failure, accumulator, weighed_squares


def saved_while_open() -> None:
    gradient = accumulator()
    gradient.forward_backward(SAMPLES, weighed_squares)
    gradient.state_dict()


class Noted(Extension):
    def state_dict(self) -> dict[str, int]:
        return {"noted": 1}


class Ending(Planner):
    def cut(self, lengths: Sequence[int], samples: Sequence[Any]) -> list[list[int]]:
        return [[next(iter([]))]]


def attached_twice() -> None:
    shared = Noted()
    for _ in range(2):
        accumulator(extensions=[shared])


FAILURES = {
    "saved while an update is open": Failure("state_dict() … finalize()", saved_while_open, MegabatchError),
    "an update that an earlier version saved open": Failure(
        "ranks, update … settings", lambda: accumulator().load_state_dict({"ranks": 1, "update": {}})
    ),
    "an extension that is none": Failure(
        "extensions has a list … objects of megabatch.Extension", lambda: accumulator(extensions=[[]])
    ),
    "an extension of two accumulators": Failure("a Noted in extensions … another accumulator", attached_twice),
    "two states of one name": Failure(
        "save a state as 'noted'", lambda: accumulator(extensions=[Noted(), Noted()]).state_dict()
    ),
    "a planner whose iterator ends": Failure(
        "the planner's cut() raised StopIteration",
        lambda: accumulator(micro_batch_size=None, planner=Ending()).forward_backward(SAMPLES, weighed_squares),
    ),
    "a planner that is a class": Failure(
        "the class Tokens … Tokens(8192)", lambda: accumulator(micro_batch_size=None, planner=Tokens)
    ),
    "an extension twice": Failure("given twice", lambda: accumulator(extensions=[extension := Extension(), extension])),
    "a fit that is a number": Failure("Auto has the fit 8192 … another accumulator", lambda: Auto(fit=8192)),
    "a planner that is none": Failure(
        "planner is [] … megabatch.Planner", lambda: accumulator(micro_batch_size=None, planner=[])
    ),
}
